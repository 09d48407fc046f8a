"""The part of the OpenAPI document about the knowledge base."""

from __future__ import annotations

from typing import Any, Final

from tidegate.knowledge.graph import DOCUMENTS
from tidegate.knowledge.result_formats import SOLUTION_FORMATS, TRIPLE_FORMATS
from tidegate.listeners.http_sparql import FORM, LOAD_HEADERS, QUERY, UPDATE
from tidegate.listeners.openapi_parts import answer, object_of, query_parameter, refusals

_TEXT: Final = {"type": "string"}
_SECONDS: Final = {"type": "number", "minimum": 0}
_TRUTH: Final = {"type": "boolean"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_EXAMPLE: Final = "SELECT ?room ?t WHERE { ?room <temperature> ?t }"
_REFUSALS: Final = (400, 401, 403, 413, 429)


def knowledge_paths() -> dict[str, Any]:
    return {
        "/v1/sparql": {"get": _query(), "post": _query_or_update()},
        "/v1/graph": {"post": _insert()},
        "/v1/persistent": {"get": _persistent(), "delete": _drop()},
        "/v1/persistent/named": {"get": _list_named()},
    }


def _query() -> dict[str, Any]:
    return {
        "operationId": "query",
        "summary": "A query, after the SPARQL 1.1 Protocol",
        "parameters": [query_parameter("query", _TEXT, "Needed", _EXAMPLE)],
        "responses": {"200": _result()} | refusals(406, *_REFUSALS),
    }


def _query_or_update() -> dict[str, Any]:
    form = object_of({"query": _TEXT, "update": _TEXT}, "query", "update")
    return {
        "operationId": "queryOrUpdate",
        "summary": "A query or an update, after the SPARQL 1.1 Protocol",
        "requestBody": {
            "required": True,
            "content": {FORM: {"schema": form}, QUERY: {"schema": _TEXT}, UPDATE: {"schema": _TEXT}},
        },
        "responses": {"200": _result()} | refusals(406, 415, *_REFUSALS),
    }


def _insert() -> dict[str, Any]:
    return {
        "operationId": "insert",
        "summary": "Add the triples of a document",
        "requestBody": {
            "required": True,
            "content": {media_type: {"schema": _TEXT} for media_type in DOCUMENTS},
        },
        "responses": {"200": _change()} | refusals(415, *_REFUSALS),
    }


def _persistent() -> dict[str, Any]:
    return {
        "operationId": "persistentQuery",
        "summary": "The result of a query, then what changes in it: a WebSocket, or server-sent events",
        "parameters": [
            query_parameter("query", _TEXT, "Needed, unless there is a mask", _EXAMPLE),
            *(query_parameter(name, _TEXT, "Of a mask") for name in "spo"),
            query_parameter("subscription", _TEXT, "To go on with one whose connection was lost"),
            query_parameter("sequence", _COUNT, "The last that was seen of it"),
            query_parameter("name", _TEXT, "Under which it is kept, or was; then the question may be absent"),
        ],
        "responses": {
            "101": {"description": "Subscribed"},
            "200": {"description": "Subscribed", "content": {"text/event-stream": {"schema": _TEXT}}},
        }
        | refusals(404, 409, 503, *_REFUSALS),
    }


def _drop() -> dict[str, Any]:
    return {
        "operationId": "dropPersistentQuery",
        "summary": "A named persistent query goes",
        "parameters": [query_parameter("name", _TEXT, "Needed")],
        "responses": {"204": {"description": "It is gone"}} | refusals(401, 403, 404),
    }


def _list_named() -> dict[str, Any]:
    kept = object_of(
        {"name": _TEXT, "is_followed": _TRUTH} | dict.fromkeys(("query", *"spo"), _TEXT), *("query", *"spo")
    )
    listed = object_of({"queries": {"type": "array", "items": kept}})
    return {
        "operationId": "listPersistentQueries",
        "summary": "The persistent queries that are kept under names, and whether somebody follows them now",
        "responses": {"200": answer("All of them", listed)} | refusals(401, 403),
    }


def _result() -> dict[str, Any]:
    written = {media_type: {"schema": _TEXT} for media_type in (*SOLUTION_FORMATS, *TRIPLE_FORMATS)}
    return _change() | {
        "description": "The result of a query, as Accept wants it; what an update has changed",
        "content": written | _change()["content"],
    }


def _change() -> dict[str, Any]:
    changed = object_of({"added": _COUNT, "removed": _COUNT} | dict.fromkeys(LOAD_HEADERS, _SECONDS))
    headers = {name: {"schema": _SECONDS} for name in LOAD_HEADERS.values()}
    return answer("What has changed", changed) | {"headers": headers}
