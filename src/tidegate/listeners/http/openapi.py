"""The OpenAPI document of the HTTP listener: every request, its answers and its errors."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

from tidegate.config import Config
from tidegate.layers.layer import Layer
from tidegate.layers.outbox import Policy
from tidegate.listeners.http.openapi_knowledge import knowledge_paths
from tidegate.listeners.http.openapi_parts import (
    answer,
    get_operation,
    header_parameter,
    json_content,
    object_of,
    query_parameter,
    refusals,
    text_operation,
)
from tidegate.listeners.http.openapi_queues import queue_paths, queue_schemas
from tidegate.listeners.http.publish import KEY, PUBLISHER, SEQUENCE
from tidegate.listeners.http.scale import SLICES_MAX
from tidegate.notification import ATTRIBUTES_MAX, INTEGER_MAX, NAME_BYTES_MAX, PAYLOAD, TEXT_BYTES_MAX
from tidegate.security.publisher_key import KEY_CHARACTERS_MAX, KEY_CHARACTERS_MIN, NAME_CHARACTERS_MAX

_PUSH_REFUSALS: Final = (400, 401, 403, 404, 409, 422, 429, 503)


def openapi_document(config: Config) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidegate",
            "version": importlib.metadata.version("tidegate"),
            "description": "Content-based publish/subscribe for the Internet of Things. Filters: docs/filters.md.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            "/v1/notifications": {"post": _publish(config)},
            "/v1/stream": {"get": _stream(), "post": _named_stream()},
            "/v1/subscribe": {"get": _subscribe()},
            "/v1/why": {"post": _why()},
            **queue_paths(),
            **(knowledge_paths() if config.ssap_port >= 0 else {}),
            "/v1/layers": {
                "get": get_operation("The slices of each layer, their epoch and their load", {"type": "object"})
            },
            "/v1/rates": {
                "get": get_operation(
                    "Notifications accepted and delivered per second, over the last ten minutes", _rates()
                )
            },
            "/v1/scale": {"post": _scale()},
            "/healthz": {"get": get_operation("The process is up", _status())},
            "/readyz": {"get": get_operation("The broker accepts notifications", _status(), 503)},
            "/metrics": {"get": text_operation("Metrics for Prometheus", "text/plain", 401, 403)},
            "/openapi.json": {"get": get_operation("This document", {"type": "object"})},
        },
        "components": {
            "schemas": {"Notification": _notification(), "Error": _error(), "Explanation": _explanation()}
            | queue_schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _publish(config: Config) -> dict[str, Any]:
    notification = {"$ref": "#/components/schemas/Notification"}
    many = {"type": "array", "items": notification, "minItems": 1}
    body = {"description": f"At most {config.body_bytes_max} bytes", "required": True}
    return {
        "operationId": "publish",
        "summary": "Publish one or more notifications; either all or none are accepted",
        "parameters": [
            header_parameter(PUBLISHER, {"type": "string", "maxLength": NAME_CHARACTERS_MAX}),
            header_parameter(SEQUENCE, {"type": "integer", "minimum": 1}),
            header_parameter(KEY, {"type": "string", "minLength": KEY_CHARACTERS_MIN, "maxLength": KEY_CHARACTERS_MAX}),
        ],
        "requestBody": body | json_content({"oneOf": [notification, many]}),
        "responses": {
            "200": answer(
                "Acknowledged: every matching subscription that was acknowledged before receives them",
                object_of({"accepted": {"type": "integer"}}),
            )
        }
        | refusals(400, 401, 403, 409, 413, 422, 429, 503),
    }


def _stream() -> dict[str, Any]:
    operation = text_operation(
        "Receive deliveries as server-sent events, one event each", "text/event-stream", 405, *_PUSH_REFUSALS
    )
    return operation | {"operationId": "stream", "parameters": _filter_parameters()[:-1]}


def _named_stream() -> dict[str, Any]:
    summary = "The same, also for a durable subscription; its notifications are deleted once they are sent"
    operation = text_operation(summary, "text/event-stream", *_PUSH_REFUSALS)
    return operation | {"operationId": "streamNamed", "parameters": _filter_parameters()}


def _subscribe() -> dict[str, Any]:
    return {
        "operationId": "subscribe",
        "summary": "Receive deliveries over a WebSocket, one JSON text message each",
        "parameters": _filter_parameters(),
        "responses": {"101": {"description": "Subscribed"}} | refusals(426, *_PUSH_REFUSALS),
    }


def _why() -> dict[str, Any]:
    question = object_of({"filter": {"type": "string"}, "notification": {"type": "object"}})
    return {
        "operationId": "why",
        "summary": "Explain whether a filter matches a notification, constraint by constraint",
        "requestBody": {"required": True} | json_content(question),
        "responses": {"200": answer("The explanation", {"$ref": "#/components/schemas/Explanation"})}
        | refusals(400, 401, 403, 413),
    }


def _rates() -> dict[str, Any]:
    number = {"type": "number"}
    rate = object_of({"at": number, "accepted": number, "delivered": number})
    return object_of({"rates": {"type": "array", "items": rate}})


def _scale() -> dict[str, Any]:
    count = {"type": "integer", "minimum": 1, "maximum": SLICES_MAX}
    layers = {layer.field: count for layer in Layer}
    return {
        "operationId": "scale",
        "summary": "Change the number of slices of a cluster's layers; answers when the change is complete",
        "requestBody": {"required": True} | json_content(object_of(layers, *layers)),
        "responses": {"200": answer("Its effect on a probe: longest delay, losses, duplicates", {"type": "object"})}
        | refusals(400, 401, 403, 413, 429, 503),
    }


def _filter_parameters() -> list[dict[str, Any]]:
    policy = {"type": "string", "enum": list(Policy), "default": str(Policy.DROP_OLDEST)}
    return [
        query_parameter("filter", {"type": "string"}, "Required unless name is given", "NO2>200"),
        query_parameter(
            "context", {"type": "string"}, "JSON object with the values for $name in the filter", '{"floor": 3}'
        ),
        query_parameter("policy", policy, "For a durable subscription: drop-oldest or block, by default block"),
        query_parameter(
            "name",
            {"type": "string"},
            "Name of a durable subscription; created if it does not exist and filter is given",
        ),
    ]


def _notification() -> dict[str, Any]:
    value = {
        "oneOf": [
            {"type": "string", "maxLength": TEXT_BYTES_MAX},
            {"type": "number", "description": f"whole numbers within ±{INTEGER_MAX}"},
            {"type": "boolean"},
        ]
    }
    return {
        "type": "object",
        "minProperties": 1,
        "maxProperties": ATTRIBUTES_MAX,
        "propertyNames": {"minLength": 1, "maxLength": NAME_BYTES_MAX},
        "properties": {PAYLOAD: {"type": "string", "contentEncoding": "base64"}},
        "additionalProperties": value,
        "examples": [{"station": "28079004", "NO2": 212}],
    }


def _error() -> dict[str, Any]:
    text = {"type": "string"}
    error = object_of({"code": text, "message": text, "remedy": text, "column": {"type": "integer"}}, "column")
    return object_of({"error": error})


def _explanation() -> dict[str, Any]:
    text = {"type": "string"}
    constraint = object_of({"text": text, "holds": {"type": "boolean"}, "reason": text})
    return object_of({"matches": {"type": "boolean"}, "constraints": {"type": "array", "items": constraint}})


def _status() -> dict[str, Any]:
    return object_of({"status": {"type": "string"}})
