"""`/v1/sparql`: queries and updates after the SPARQL 1.1 Protocol; `/v1/graph`: triples of a document, to be added.

A query comes as `GET ?query=…`, or in the body of a POST, alone (`application/sparql-query`) or in a form; an update in
the body of a POST. Accept says how the result is to be written. With every answer goes the load of the knowledge base,
as headers `Tidegate-…`, and in the JSON that an update is answered with.

What may go wrong: too many requests wait (429); no or two queries, an update where a query belongs, a choice of graphs
outside the query (K119); a body of another kind (415, K120); a result that cannot be written as asked (406, K121); a
document that cannot be read (K123).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.config import Config
from tidegate.errors import KnowledgeError
from tidegate.knowledge.graph import DOCUMENTS, Delta, read_document
from tidegate.knowledge.knowledge_base import AskJob, ChangeJob, Job, KnowledgeBase, UpdateJob
from tidegate.knowledge.question import Result, SparqlQuery
from tidegate.knowledge.request_pool import Load
from tidegate.knowledge.result_formats import formats_of
from tidegate.knowledge.sparql import is_update
from tidegate.listeners.http_publish import read_body
from tidegate.listeners.http_queues import route
from tidegate.listeners.json_response import json_response

FORM: Final = "application/x-www-form-urlencoded"
QUERY: Final = "application/sparql-query"
UPDATE: Final = "application/sparql-update"
LOAD_HEADERS: Final = {
    "processing_s": "Tidegate-Processing-S",
    "waiting_s": "Tidegate-Waiting-S",
    "delay_s": "Tidegate-Delay-S",
    "delay_s_max": "Tidegate-Delay-S-Max",
    "interval_s": "Tidegate-Interval-S",
    "spread_s": "Tidegate-Spread-S",
}
FIELDS_MAX: Final = 100
# Longer results are written in a thread, so that others are served meanwhile.
ROWS_AT_ONCE: Final = 1000
_GRAPH_PARAMETERS: Final = frozenset(
    {"default-graph-uri", "named-graph-uri", "using-graph-uri", "using-named-graph-uri"}
)


class UnknownBody(KnowledgeError):
    """A body whose kind this call cannot read."""

    status = 415


class NotAcceptable(KnowledgeError):
    """A result in no form that the client accepts."""

    status = 406


class HttpSparql:
    def __init__(self, knowledge: KnowledgeBase, config: Config) -> None:
        self._knowledge = knowledge
        self._config = config

    def routes(self) -> list[Route]:
        return [route("/v1/sparql", GET=self._get, POST=self._post), route("/v1/graph", POST=self._insert)]

    async def _get(self, request: Request) -> Response:
        return await self._query(request, _the_one(request.query_params.multi_items(), "query"))

    async def _post(self, request: Request) -> Response:
        text = _decoded(await read_body(request, self._config.body_bytes_max))
        kind = _media_type(request)
        beside = request.query_params.multi_items()
        if kind == FORM:
            form = _form(text)
            what = "update" if any(name == "update" for name, _ in form) else "query"
            text = _the_one([*beside, *form], what)
        elif kind in (QUERY, UPDATE):
            what = "query" if kind == QUERY else "update"
            _the_one([*beside, (what, text)], what)
        else:
            raise UnknownBody("K120", f"a body of {kind[:60]!r}", f"send {QUERY}, {UPDATE} or {FORM}")
        return await (self._update(request, text) if what == "update" else self._query(request, text))

    async def _insert(self, request: Request) -> Response:
        body = await read_body(request, self._config.body_bytes_max)
        kind = _media_type(request)
        if kind not in DOCUMENTS:
            raise UnknownBody("K120", f"a body of {kind[:60]!r}", f"send one of {', '.join(DOCUMENTS)}")
        triples = await asyncio.to_thread(read_document, body, kind)
        delta, load = await submit(self._knowledge, kp_of(request), ChangeJob((), triples))
        return change_response(delta, load)

    async def _query(self, request: Request, text: str) -> Response:
        if is_update(text):
            raise KnowledgeError(
                "K119", "this is no query", "send SELECT, ASK, CONSTRUCT or DESCRIBE; updates as update="
            )
        result, load = await submit(self._knowledge, kp_of(request), AskJob(SparqlQuery(text)))
        return await _result_response(result, load, request.headers.get("accept", "*/*"))

    async def _update(self, request: Request, text: str) -> Response:
        delta, load = await submit(self._knowledge, kp_of(request), UpdateJob(text))
        return change_response(delta, load)


async def submit(knowledge: KnowledgeBase, kp: str, job: Job) -> tuple[Any, dict[str, float]]:
    """The answer, and the load as it is told; an error is raised."""
    answer, load = await knowledge.call(kp, job)
    assert load is not None
    return answer, told(knowledge, load)


def told(knowledge: KnowledgeBase, load: Load) -> dict[str, float]:
    """What a client is told of the load, with the spread of the last notification."""
    shown = msgspec.structs.asdict(load) | {"spread_s": knowledge.spread_s}
    return {name: round(value, 6) for name, value in shown.items() if value is not None}


def kp_of(connection: HTTPConnection) -> str:
    """Whose quota counts: the client's address. No KP of SSAP has such a name, as theirs have a slash."""
    return f"http {connection.client.host if connection.client else ''}"


def acceptable(accept: str, offered: Iterable[str]) -> str | None:
    """The offered media type that an Accept header likes best, the first of equals; None when it wants no such."""
    wanted = dict(map(_quality, filter(None, map(str.strip, accept.lower().split(",")))))
    best, best_quality = None, 0.0
    for media_type in offered:
        group = media_type.partition("/")[0]
        names = (media_type, f"{group}/*", "*/*")
        quality = next((wanted[name] for name in names if name in wanted), 0.0)
        if quality > best_quality:
            best, best_quality = media_type, quality
    return best


def change_response(delta: Delta, load: dict[str, float]) -> Response:
    """What a change has really changed."""
    return _with_load(json_response({"added": len(delta.added), "removed": len(delta.removed)} | load), load)


async def _result_response(result: Result, load: dict[str, float], accept: str) -> Response:
    formats = formats_of(result)
    media_type = acceptable(accept, formats)
    if media_type is None:
        raise NotAcceptable("K121", f"no result as {accept[:60]!r}", f"accept one of {', '.join(formats)}")
    write = formats[media_type]
    body = write(result) if len(result.rows) <= ROWS_AT_ONCE else await asyncio.to_thread(write, result)
    return _with_load(Response(body, headers={"Content-Type": media_type, "Vary": "Accept"}), load)


def _with_load(response: Response, load: dict[str, float]) -> Response:
    for name, value in load.items():
        response.headers[LOAD_HEADERS[name]] = f"{value:.6f}"
    return response


def _form(text: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError as error:
        raise KnowledgeError("K119", f"the form has over {FIELDS_MAX} fields", "give one query or update") from error


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _quality(part: str) -> tuple[str, float]:
    media_type, *parameters = (each.strip() for each in part.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return media_type, float(value)
            except ValueError:
                return media_type, 0.0
    return media_type, 1.0


def _the_one(parameters: list[tuple[str, str]], name: str) -> str:
    """The one query or update among the parameters of a request."""
    chosen = [each for each, _ in parameters if each in _GRAPH_PARAMETERS]
    if chosen:
        raise KnowledgeError("K119", f"{chosen[0]} is not supported", "write FROM or GRAPH into the query")
    texts = [text for each, text in parameters if each in ("query", "update")]
    if len(texts) != 1 or not any(each == name for each, _ in parameters):
        raise KnowledgeError("K119", f"there is not one {name}, but {len(texts)} texts", f"give one {name}=…")
    return texts[0]


def _decoded(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise KnowledgeError("K119", f"the body is not UTF-8: {error.reason}", "send Unicode text as UTF-8") from error
