"""The part of the OpenAPI document about queues and named subscriptions. The schemas of bodies are generated from the
types that parse them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tidegate.listeners.http.json_message import PostedMessage
from tidegate.listeners.http.openapi_parts import (
    answer,
    json_content,
    object_of,
    path_parameter,
    query_parameter,
    refusals,
)
from tidegate.listeners.http.queues import (
    READ_MESSAGES,
    SETTLEMENTS,
    DeleteBelowRequest,
    DequeueRequest,
    RedriveRequest,
    SettleRequest,
)
from tidegate.listeners.http.subscriptions import SubscriptionRequest
from tidegate.messages import Enqueued
from tidegate.queues.definition import QueueSettings
from tidegate.queues.statistics import QueueStatistics

_TYPES: Final = (
    QueueSettings,
    QueueStatistics,
    PostedMessage,
    Enqueued,
    DequeueRequest,
    SettleRequest,
    RedriveRequest,
    DeleteBelowRequest,
    SubscriptionRequest,
)
_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "integer", "minimum": 0}
_LEVELS: Final = ("messages", "waiting", "leased", "parked", "dead_letters")
_TIMES: Final = ("last_read_at", "expires_at")


def queue_paths() -> dict[str, Any]:
    queue = "/v1/queues/{q}"
    physical = queue + "/physical/{i}"
    return {
        "/v1/queues": {"get": _list_queues()},
        queue: {
            "parameters": [path_parameter("q", _TEXT)],
            "get": _operation("showQueue", "Show a queue and how full it is", _ref("Queue"), 404),
            "put": _define_queue(),
            "delete": _operation("dropQueue", "Drop a queue, its dead-letter queue and all messages", None, 404, 422),
        },
        f"{queue}/stats": _of_queue(
            "get", _operation("queueStatistics", "Show the levels and counts of a queue", _ref("QueueStatistics"), 404)
        ),
        f"{queue}/messages": _of_queue("post", _enqueue()),
        f"{queue}/dequeue": _of_queue("post", _dequeue()),
        **{f"{queue}/{action}": _of_queue("post", _settle(action)) for action in SETTLEMENTS},
        f"{queue}/redrive": _of_queue("post", _redrive()),
        f"{physical}/messages": _of_physical("get", _read()),
        f"{physical}/delete-below": _of_physical("post", _delete_below()),
        "/v1/subscriptions": {"get": _list_subscriptions(), "post": _define_subscription()},
        "/v1/subscriptions/{name}": {
            "parameters": [path_parameter("name", _TEXT)],
            "get": _operation("showSubscription", "Show a named subscription", _ref("Subscription"), 404),
            "delete": _operation(
                "dropSubscription", "Drop a named subscription and its pending notifications", None, 404
            ),
        },
    }


def queue_schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    levels = dict.fromkeys(_LEVELS, _NUMBER)
    times = {name: {"anyOf": [{"type": "number"}, {"type": "null"}]} for name in _TIMES}
    subscription = {"name": _TEXT, "filter": _TEXT, "policy": _TEXT, "queue": _TEXT} | levels | times
    return schemas | {
        "Queue": object_of({"name": _TEXT} | schemas["QueueSettings"]["properties"] | levels, *_LEVELS),
        "Subscription": object_of(subscription, *_LEVELS, *_TIMES),
        "DequeuedMessage": _message({"receipt": _TEXT, "delivery": _NUMBER, "queue": _NUMBER, "sequence": _NUMBER}),
        "KeptMessage": _message({"sequence": _NUMBER}),
    }


# Operations.


def _list_queues() -> dict[str, Any]:
    listed = object_of({"queues": _many(_ref("Queue"))})
    parameter = query_parameter(
        "all", {"enum": [0, 1]}, "1 includes dead-letter queues and the queues of subscriptions"
    )
    return _operation("listQueues", "List the queues, and how full they are", listed) | {"parameters": [parameter]}


def _define_queue() -> dict[str, Any]:
    operation = _operation("defineQueue", "Create a queue, or replace its settings", _ref("Queue"), 409, 422, 503)
    return _with_body(operation, _ref("QueueSettings")) | _made(operation, "Queue")


def _enqueue() -> dict[str, Any]:
    operation = _operation(
        "enqueue",
        "Enqueue messages; answers when all are stored with the queue's durability",
        _ref("Enqueued"),
        404,
        422,
        429,
        503,
    )
    message = _ref("PostedMessage")
    return _with_body(operation, {"oneOf": [message, _many(message)]}, is_required=True)


def _dequeue() -> dict[str, Any]:
    messages = object_of({"messages": _many(_ref("DequeuedMessage"))})
    operation = _operation("dequeue", "Lease messages; waits until there are some", messages, 404, 422, 503)
    return _with_body(operation, _ref("DequeueRequest"))


def _settle(action: str) -> dict[str, Any]:
    settled = object_of({SETTLEMENTS[action]: _NUMBER, "stale": _NUMBER})
    operation = _operation(f"{action}Messages", f"{action.capitalize()} leased messages", settled, 404, 422, 503)
    return _with_body(operation, _ref("SettleRequest"), is_required=True)


def _redrive() -> dict[str, Any]:
    operation = _operation(
        "redrive", "Move dead letters back into the queue", object_of({"redriven": _NUMBER}), 404, 422, 429, 503
    )
    return _with_body(operation, _ref("RedriveRequest"))


def _read() -> dict[str, Any]:
    messages = object_of({"messages": _many(_ref("KeptMessage")), "next": _NUMBER})
    parameters = [
        query_parameter("from", _NUMBER, "The first sequence"),
        query_parameter("to", _NUMBER, "The sequence to stop before; by default all are read"),
        query_parameter("max", _NUMBER | {"default": READ_MESSAGES}, "Most messages in one answer"),
    ]
    operation = _operation(
        "read", "Read messages in order, leased or not, without leasing them", messages, 400, 404, 422, 503
    )
    return operation | {"parameters": parameters}


def _delete_below() -> dict[str, Any]:
    deleted = object_of({"deleted": _NUMBER})
    operation = _operation("deleteBelow", "Delete all messages below a sequence", deleted, 404, 422, 503)
    return _with_body(operation, _ref("DeleteBelowRequest"), is_required=True)


def _list_subscriptions() -> dict[str, Any]:
    listed = object_of({"subscriptions": _many(_ref("Subscription"))})
    return _operation("listSubscriptions", "List the named subscriptions, and their pending notifications", listed)


def _define_subscription() -> dict[str, Any]:
    operation = _operation(
        "defineSubscription", "Create a named subscription, or change its filter", _ref("Subscription"), 422, 503
    )
    return _with_body(operation, _ref("SubscriptionRequest"), is_required=True) | _made(operation, "Subscription")


# Building blocks of operations.


def _operation(name: str, summary: str, schema: dict[str, Any] | None, *refused: int) -> dict[str, Any]:
    """Returns an operation. One without a schema answers 204."""
    done = {"204": {"description": summary}} if schema is None else {"200": answer(summary, schema)}
    return {"operationId": name, "summary": summary, "responses": done | refusals(401, 403, *refused)}


def _with_body(operation: dict[str, Any], schema: dict[str, Any], *, is_required: bool = False) -> dict[str, Any]:
    operation["responses"] |= refusals(400, 413)
    return operation | {"requestBody": {"required": is_required} | json_content(schema)}


def _made(operation: dict[str, Any], schema: str) -> dict[str, Any]:
    return {"responses": operation["responses"] | {"201": answer("Created", _ref(schema))}}


def _of_queue(method: str, operation: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": [path_parameter("q", _TEXT)], method: operation}


def _of_physical(method: str, operation: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": [path_parameter("q", _TEXT), path_parameter("i", _NUMBER)], method: operation}


def _message(place: dict[str, Any]) -> dict[str, Any]:
    record = {
        "body": {"description": "The posted body; {'$msgpack': base64} if JSON cannot represent it"},
        "enqueued_at": {"type": "number", "description": "Seconds since 1970, UTC"},
        "headers": {"type": "object", "additionalProperties": _TEXT},
        "group": _TEXT,
        "device": _TEXT,
        "device_sequence": _NUMBER,
    }
    return object_of(record | place, "group", "device", "device_sequence")


def _many(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
