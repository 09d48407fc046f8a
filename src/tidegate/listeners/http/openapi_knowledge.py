"""The part of the OpenAPI document about the knowledge base."""

from __future__ import annotations

from typing import Any, Final

from tidegate.knowledge.documents import DOCUMENTS
from tidegate.knowledge.result_formats import SOLUTION_FORMATS, TRIPLE_FORMATS
from tidegate.listeners.http.openapi_parts import answer, object_of, query_parameter, refusals
from tidegate.listeners.http.sparql import FORM, LOAD_HEADERS, QUERY, UPDATE

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
        "/v1/persistent": {
            "get": _persistent("persistentQuery", 405),
            "post": _persistent("namedPersistentQuery"),
            "delete": _drop(),
        },
        "/v1/persistent/named": {"get": _list_named()},
    }


def _query() -> dict[str, Any]:
    return {
        "operationId": "query",
        "summary": "Run a query, by the SPARQL 1.1 Protocol",
        "parameters": [query_parameter("query", _TEXT, "Required", _EXAMPLE)],
        "responses": {"200": _result()} | refusals(406, *_REFUSALS),
    }


def _query_or_update() -> dict[str, Any]:
    form = object_of({"query": _TEXT, "update": _TEXT}, "query", "update")
    return {
        "operationId": "queryOrUpdate",
        "summary": "Run a query or an update, by the SPARQL 1.1 Protocol",
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


def _persistent(operation: str, *refused: int) -> dict[str, Any]:
    return {
        "operationId": operation,
        "summary": "Receive the result of a query, then its changes, over a WebSocket or as server-sent events",
        "parameters": [
            query_parameter("query", _TEXT, "Required unless a mask or a known name is given", _EXAMPLE),
            *(query_parameter(name, _TEXT, "Part of a mask: subject, predicate or object") for name in "spo"),
            query_parameter("subscription", _TEXT, "The subscription to resume after a lost connection"),
            query_parameter("sequence", _COUNT, "The last sequence that the client received"),
            query_parameter(
                "name",
                _TEXT,
                "Keeps the query under this name, or resumes it; then the query may be omitted. Server-sent events of "
                "a named query require a POST",
            ),
        ],
        "responses": {
            "101": {"description": "Subscribed"},
            "200": {"description": "Subscribed", "content": {"text/event-stream": {"schema": _TEXT}}},
        }
        | refusals(404, 409, 503, *refused, *_REFUSALS),
    }


def _drop() -> dict[str, Any]:
    return {
        "operationId": "dropPersistentQuery",
        "summary": "Drop a named persistent query",
        "parameters": [query_parameter("name", _TEXT, "Required")],
        "responses": {"204": {"description": "The query was dropped"}} | refusals(401, 403, 404),
    }


def _list_named() -> dict[str, Any]:
    kept = object_of(
        {"name": _TEXT, "is_followed": _TRUTH} | dict.fromkeys(("query", *"spo"), _TEXT), *("query", *"spo")
    )
    listed = object_of({"queries": {"type": "array", "items": kept}})
    return {
        "operationId": "listPersistentQueries",
        "summary": "List the named persistent queries, and whether a client follows each now",
        "responses": {"200": answer("All named persistent queries", listed)} | refusals(401, 403),
    }


def _result() -> dict[str, Any]:
    written = {media_type: {"schema": _TEXT} for media_type in (*SOLUTION_FORMATS, *TRIPLE_FORMATS)}
    return _change() | {
        "description": "The result of a query, in the format that Accept selects; or the changes of an update",
        "content": written | _change()["content"],
    }


def _change() -> dict[str, Any]:
    changed = object_of({"added": _COUNT, "removed": _COUNT} | dict.fromkeys(LOAD_HEADERS, _SECONDS))
    headers = {name: {"schema": _SECONDS} for name in LOAD_HEADERS.values()}
    return answer("The number of added and removed triples", changed) | {"headers": headers}
