"""The OpenAPI document of the HTTP listener: what may be sent, what comes back, and every way to be refused."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

from tidegate.config import Config
from tidegate.layers.outbox import Policy
from tidegate.notification import ATTRIBUTES_MAX, INTEGER_MAX, NAME_BYTES_MAX, PAYLOAD, TEXT_BYTES_MAX

_ERRORS: Final = {
    400: "The request or its filter is malformed",
    401: "No token, or a wrong one",
    403: "A web page of another origin",
    409: "Another connection speaks for this publisher now",
    413: "The body is too large",
    422: "A notification breaks the rules",
    426: "This is a WebSocket, and the request asks for no upgrade",
    429: "A limit is reached; Retry-After says when to come back",
    503: "The broker is shutting down, or could not acknowledge in time",
}


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
            "/v1/stream": {"get": _stream()},
            "/v1/subscribe": {"get": _subscribe()},
            "/v1/why": {"post": _why()},
            "/v1/layers": {"get": _get("Who serves what, in which epoch, with what load", {"type": "object"})},
            "/healthz": {"get": _get("The process is up", _status())},
            "/readyz": {"get": _get("The broker takes notifications", _status(), 503)},
            "/metrics": {"get": _text("Metrics for Prometheus", "text/plain", 401, 403)},
            "/openapi.json": {"get": _get("This document", {"type": "object"})},
        },
        "components": {
            "schemas": {"Notification": _notification(), "Error": _error(), "Explanation": _explanation()},
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
        "summary": "Publish one notification or many; all are accepted or none",
        "parameters": [
            _header("Tidegate-Publisher", {"type": "string", "maxLength": 128}),
            _header("Tidegate-Sequence", {"type": "integer", "minimum": 1}),
        ],
        "requestBody": body | _json({"oneOf": [notification, many]}),
        "responses": {
            "200": _answer(
                "Acknowledged: every subscription that was acknowledged before gets it",
                _object({"accepted": {"type": "integer"}}),
            )
        }
        | _refusals(400, 401, 403, 409, 413, 422, 429, 503),
    }


def _stream() -> dict[str, Any]:
    answer = _text("Server-sent events, one delivery each", "text/event-stream", 400, 401, 403, 429, 503)
    return answer | {"operationId": "stream", "parameters": _filter_parameters()}


def _subscribe() -> dict[str, Any]:
    return {
        "operationId": "subscribe",
        "summary": "WebSocket: one JSON text message a delivery",
        "parameters": _filter_parameters(),
        "responses": {"101": {"description": "Subscribed"}} | _refusals(400, 401, 403, 426, 429, 503),
    }


def _why() -> dict[str, Any]:
    question = _object({"filter": {"type": "string"}, "notification": {"type": "object"}})
    return {
        "operationId": "why",
        "summary": "Does a filter match a notification, constraint by constraint?",
        "requestBody": {"required": True} | _json(question),
        "responses": {"200": _answer("The explanation", {"$ref": "#/components/schemas/Explanation"})}
        | _refusals(400, 401, 403, 413),
    }


def _get(summary: str, schema: dict[str, Any], *refusals: int) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _answer(summary, schema)} | _refusals(401, 403, *refusals)}


def _text(summary: str, media_type: str, *refusals: int) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "string"}}}
    answer = {"200": {"description": summary, "content": content}}
    return {"summary": summary, "responses": answer | _refusals(*refusals)}


def _filter_parameters() -> list[dict[str, Any]]:
    policy = {"type": "string", "enum": list(Policy), "default": str(Policy.DROP_OLDEST)}
    return [
        {"name": "filter", "in": "query", "required": True, "schema": {"type": "string"}, "example": "NO2>200"},
        {"name": "policy", "in": "query", "required": False, "schema": policy},
    ]


def _header(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _refusals(*statuses: int) -> dict[str, Any]:
    error = {"$ref": "#/components/schemas/Error"}
    return {str(status): _answer(_ERRORS[status], error) for status in statuses}


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description} | _json(schema)


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _status() -> dict[str, Any]:
    return _object({"status": {"type": "string"}})


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
    error = _object({"code": text, "message": text, "remedy": text, "column": {"type": "integer"}}, "column")
    return _object({"error": error})


def _explanation() -> dict[str, Any]:
    text = {"type": "string"}
    constraint = _object({"text": text, "holds": {"type": "boolean"}, "reason": text})
    return _object({"matches": {"type": "boolean"}, "constraints": {"type": "array", "items": constraint}})
