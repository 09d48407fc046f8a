"""Building blocks of the OpenAPI document: answers, refusals, bodies and schemas."""

from __future__ import annotations

from typing import Any, Final

_ERRORS: Final = {
    400: "The request, its filter or its SPARQL is malformed",
    401: "The token is missing or wrong",
    403: "The request comes from a web page of another origin",
    404: "There is no such queue, subscription or named query",
    405: "This operation requires a POST",
    406: "The result has no format that the Accept header allows",
    409: "Another connection has taken over the publisher, or the queue or named query has other settings",
    413: "The body is too large",
    415: "The Content-Type of the body is not supported",
    422: "A notification, message, setting or limit is invalid",
    426: "This endpoint is a WebSocket, and the request has no upgrade",
    429: "A limit is reached or a queue is full; retry after the time in Retry-After",
    503: "The broker is shutting down, its store has failed, or it could not acknowledge in time",
}


def get_operation(summary: str, schema: dict[str, Any], *refused: int) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": answer(summary, schema)} | refusals(401, 403, *refused)}


def text_operation(summary: str, media_type: str, *refused: int) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "string"}}}
    return {"summary": summary, "responses": {"200": {"description": summary, "content": content}} | refusals(*refused)}


def header_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema}


def query_parameter(name: str, schema: dict[str, Any], description: str, example: str = "") -> dict[str, Any]:
    shown = {"example": example} if example else {}
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description} | shown


def path_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def refusals(*statuses: int) -> dict[str, Any]:
    error = {"$ref": "#/components/schemas/Error"}
    return {str(status): answer(_ERRORS[status], error) for status in statuses}


def answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description} | json_content(schema)


def json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def object_of(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}
