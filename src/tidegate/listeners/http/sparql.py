"""`/v1/sparql`: queries and updates by the SPARQL 1.1 Protocol; `/v1/graph`: adds the triples of a document.

A query is sent as `GET ?query=…`, or in the body of a POST, alone (`application/sparql-query`) or in a form. An update
is sent in the body of a POST. The Accept header selects the format of the result. Every answer reports the load of the
knowledge base in the headers `Tidegate-…`; the JSON answer to an update also contains it.

What may go wrong: too many requests are waiting (429); no query or more than one, an update in place of a query, or
graphs selected outside the query (K119); an unsupported body type (415, K120); no acceptable result format (406, K121);
a malformed document (K123).
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
from tidegate.knowledge.documents import DOCUMENTS, read_document
from tidegate.knowledge.graph import Delta
from tidegate.knowledge.knowledge_base import AskJob, ChangeJob, Job, KnowledgeBase, UpdateJob
from tidegate.knowledge.question import Result, SparqlQuery
from tidegate.knowledge.request_pool import Load
from tidegate.knowledge.result_formats import formats_of
from tidegate.knowledge.sparql import is_update
from tidegate.listeners.http.body import read_body
from tidegate.listeners.http.json_response import json_response
from tidegate.listeners.http.routing import route

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
# Longer results are encoded in a thread, so that the event loop serves others meanwhile.
ROWS_INLINE_MAX: Final = 1000
_GRAPH_PARAMETERS: Final = frozenset(
    {"default-graph-uri", "named-graph-uri", "using-graph-uri", "using-named-graph-uri"}
)


class UnknownBody(KnowledgeError):
    """The endpoint does not support the media type of the body."""

    status = 415


class NotAcceptable(KnowledgeError):
    """The client accepts no format in which the result can be written."""

    status = 406


class HttpSparql:
    def __init__(self, knowledge: KnowledgeBase, config: Config) -> None:
        self._knowledge = knowledge
        self._config = config

    def routes(self) -> list[Route]:
        return [route("/v1/sparql", GET=self._get, POST=self._post), route("/v1/graph", POST=self._insert)]

    async def _get(self, request: Request) -> Response:
        return await self._query(request, _only_text(request.query_params.multi_items(), "query"))

    async def _post(self, request: Request) -> Response:
        text = _decoded(await read_body(request, self._config.body_bytes_max))
        kind = _media_type(request)
        in_url = request.query_params.multi_items()
        if kind == FORM:
            form = _form(text)
            what = "update" if any(name == "update" for name, _ in form) else "query"
            text = _only_text([*in_url, *form], what)
        elif kind in (QUERY, UPDATE):
            what = "query" if kind == QUERY else "update"
            _only_text([*in_url, (what, text)], what)
        else:
            raise UnknownBody(
                "K120",
                f"the Content-Type is {kind[:60]!r}, which is not supported",
                f"send {QUERY}, {UPDATE} or {FORM}",
            )
        return await (self._update(request, text) if what == "update" else self._query(request, text))

    async def _insert(self, request: Request) -> Response:
        body = await read_body(request, self._config.body_bytes_max)
        kind = _media_type(request)
        if kind not in DOCUMENTS:
            raise UnknownBody(
                "K120",
                f"the Content-Type is {kind[:60]!r}, which is not supported",
                f"send one of {', '.join(DOCUMENTS)}",
            )
        triples = await asyncio.to_thread(read_document, body, kind)
        delta, load = await submit(self._knowledge, kp_of(request), ChangeJob((), triples))
        return change_response(delta, load)

    async def _query(self, request: Request, text: str) -> Response:
        if is_update(text):
            raise KnowledgeError(
                "K119",
                "this is an update, not a query",
                "send updates as update=, and SELECT, ASK, CONSTRUCT or DESCRIBE as query=",
            )
        result, load = await submit(self._knowledge, kp_of(request), AskJob(SparqlQuery(text)))
        return await _result_response(result, load, request.headers.get("accept", "*/*"))

    async def _update(self, request: Request, text: str) -> Response:
        delta, load = await submit(self._knowledge, kp_of(request), UpdateJob(text))
        return change_response(delta, load)


async def submit(knowledge: KnowledgeBase, kp: str, job: Job) -> tuple[Any, dict[str, float]]:
    """Runs a job; returns its answer and the load to report with it. Raises the error of a job that fails."""
    answer, load = await knowledge.call(kp, job)
    assert load is not None
    return answer, reported_load(knowledge, load)


def reported_load(knowledge: KnowledgeBase, load: Load) -> dict[str, float]:
    """Returns the load to report to a client, with the spread of the last change's notifications."""
    shown = msgspec.structs.asdict(load) | {"spread_s": knowledge.spread_s}
    return {name: round(value, 6) for name, value in shown.items() if value is not None}


def kp_of(connection: HTTPConnection) -> str:
    """Returns the name under which the client's quota is counted: its address. KPs of SSAP have a slash in their names,
    so the two never collide."""
    return f"http {connection.client.host if connection.client else ''}"


def acceptable(accept: str, offered: Iterable[str]) -> str | None:
    """Returns the offered media type that an Accept header prefers, the first of equals; None if it accepts none."""
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
    """Reports how many triples a change added and removed. Triples that existed already do not count."""
    return _with_load(json_response({"added": len(delta.added), "removed": len(delta.removed)} | load), load)


async def _result_response(result: Result, load: dict[str, float], accept: str) -> Response:
    formats = formats_of(result)
    media_type = acceptable(accept, formats)
    if media_type is None:
        raise NotAcceptable(
            "K121",
            f"this result has no format that Accept: {accept[:60]!r} allows",
            f"accept one of {', '.join(formats)}",
        )
    write = formats[media_type]
    body = write(result) if len(result.rows) <= ROWS_INLINE_MAX else await asyncio.to_thread(write, result)
    return _with_load(Response(body, headers={"Content-Type": media_type, "Vary": "Accept"}), load)


def _with_load(response: Response, load: dict[str, float]) -> Response:
    for name, value in load.items():
        response.headers[LOAD_HEADERS[name]] = f"{value:.6f}"
    return response


def _form(text: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError as error:
        raise KnowledgeError(
            "K119", f"the form has more than {FIELDS_MAX} fields", "send one query or one update"
        ) from error


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


def _only_text(parameters: list[tuple[str, str]], name: str) -> str:
    """Returns the only query or update among the parameters of a request; raises K119 unless there is exactly one."""
    chosen = [each for each, _ in parameters if each in _GRAPH_PARAMETERS]
    if chosen:
        raise KnowledgeError("K119", f"{chosen[0]} is not supported", "use FROM or GRAPH in the query instead")
    texts = [text for each, text in parameters if each in ("query", "update")]
    if len(texts) != 1 or not any(each == name for each, _ in parameters):
        raise KnowledgeError(
            "K119",
            f"expected one {name}, found {len(texts)} queries and updates",
            f"send exactly one {name}=…",
        )
    return texts[0]


def _decoded(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise KnowledgeError("K119", f"the body is not UTF-8: {error.reason}", "send Unicode text as UTF-8") from error
