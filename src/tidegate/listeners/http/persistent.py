"""Persistent queries: `/v1/persistent?query=SELECT …`, or a mask of one or more of `?s=…&p=…&o=…`.

WebSocket requests receive the result and its changes over the WebSocket; plain requests receive server-sent events.

The first message is `{"subscription", "sequence": 0, "variables", "result": [row, …], …load}`, each later one
`{"sequence": n, "added": [row, …], "removed": [row, …], "merged": m, "spread_s": t}`. A row maps variables to terms in
SPARQL's JSON format; the row of an ASK is true or false. While a peer does not read, its changes wait in the knowledge
base and are merged; other subscribers are not affected. If the client's evaluation time was used up, `"held_s"` reports
how long a change waited for it.

A client that lost its connection reconnects within a minute with the same question and `&subscription=…&sequence=n`. It
receives `{"subscription", "sequence": n, "variables"}`, then one message with all changes that it missed. If that is
not possible, the first message has `"reset": true` and the whole result. A client that closes its WebSocket with code
1000 ends its subscription.

Over WebSocket a subscriber may check whether it has everything: it sends `{"check": n}`. The check takes its turn among
the queries. The answer is `{"check": n, "sequence": last, …load}`, sent after all changes up to `last`, or
`{"check": n, "refused": error}`.

With `&name=…` the query is kept until it is dropped (`named_queries`); a client reconnects with the name and
`&sequence=n`. Server-sent events of a named query require a POST (P325), because opening and reading it changes stored
state. `/v1/persistent/named` lists the named queries.

What may go wrong: no question or more than one (K122); an error of the knowledge base; a query that can no longer be
answered because it takes too long (K140) or its result is too large (K109), which a last message reports; a client that
reconnects while its former connection still seems open, which is then ended (K124).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from tidegate.errors import KnowledgeError, Overloaded, TidegateError, Unavailable
from tidegate.knowledge.knowledge_base import CheckJob, Subscribed, SubscribeJob
from tidegate.knowledge.named_queries import NamedQueries, NoSuchName, is_named, question_of, subscription_id
from tidegate.knowledge.persistent_query import Indication, Resumption
from tidegate.knowledge.question import Question, Result, Row
from tidegate.knowledge.request_pool import Load
from tidegate.knowledge.result_formats import json_row
from tidegate.listeners.http.json_response import error_response, json_response
from tidegate.listeners.http.push import EventStream, push, refuse_name_by_get, server_sent_events
from tidegate.listeners.http.routing import parse_number
from tidegate.listeners.http.sparql import kp_of, reported_load, submit

KEEP_ALIVE_S: Final = 15.0
NORMAL_CLOSURE: Final = 1000


class Check(msgspec.Struct):
    """A check that a subscriber requests. It chooses the number, and the answer repeats it."""

    check: int


class TakenOver(KnowledgeError):
    """Another connection has taken over the subscription."""

    status = 409


class PersistentSession:
    """One subscription on one connection."""

    def __init__(self, named: NamedQueries) -> None:
        self._named = named
        self._knowledge = named.knowledge
        self._name = ""
        self._wake = asyncio.Event()
        self._head: Result | None = None
        self._first: list[dict[str, Any]] = []
        self._kp = ""
        self._sequence = 0
        self._check: int | None = None
        self._checked: dict[str, Any] | None = None
        self._is_stopping = False
        self._error: TidegateError | None = None
        self.subscription_id = ""
        self.is_ended_by_client = False

    async def open(self, kp: str, query: Mapping[str, str]) -> None:
        self._kp = kp
        if "name" in query:
            await self._open_named(query["name"], query)
            return
        question = question_of(query)
        if "subscription" in query:
            sequence = parse_number("sequence", query.get("sequence", "0"))
            if self._resume(query["subscription"], sequence, question):
                return
        subscribed, load = await submit(self._knowledge, kp, SubscribeJob(question, self._wake.set))
        self._begin(subscribed, load | ({"reset": True} if "subscription" in query else {}))

    async def events(self) -> AsyncIterator[list[bytes]]:
        """Yields messages until the broker stops, and an empty list every `KEEP_ALIVE_S` while there are none."""
        first, self._first = [msgspec.json.encode(message) for message in self._first], []
        yield first
        del first  # the first result may be large, and this generator lives as long as the connection
        while True:
            self._wake.clear()
            if self._error is not None:
                raise self._error
            if self._is_stopping:
                return
            if news := [msgspec.json.encode(message) for message in self._news()]:
                yield news
            elif not await self._wait():
                yield []

    def check(self, number: int) -> None:
        """Starts a check. Only one is pending at a time: checks that arrive meanwhile share its answer, which has the
        number of the latest."""
        is_under_way, self._check = self._check is not None, number
        if not is_under_way:
            self._knowledge.submit(self._kp, CheckJob(), self._on_checked)

    def stop(self) -> None:
        self._is_stopping = True
        self._wake.set()

    def end(self, error: TidegateError) -> None:
        self._error = error
        self._wake.set()

    def close(self) -> None:
        """Detaches the subscription from the lost connection, so that another one can resume it. Ends it instead if the
        client ended it and it has no name."""
        if self.is_ended_by_client and not self._name:
            with contextlib.suppress(TidegateError):  # the subscription has already ended
                self._knowledge.unsubscribe(self.subscription_id)
        else:
            self._knowledge.detach(self.subscription_id, is_kept=bool(self._name))

    def _on_checked(self, answer: TidegateError | None, load: Load | None) -> None:
        self._checked = {"refused": answer.to_dict()} if answer is not None else {}
        if isinstance(answer, Overloaded):
            self._checked["refused"]["retry_after_s"] = answer.retry_after_s
        if load is not None:
            self._checked |= reported_load(self._knowledge, load)
        self._wake.set()

    def _news(self) -> Iterator[dict[str, Any]]:
        """Yields the pending change, then the answer to a check. In this order the answer has the last sequence."""
        if (taken := self._take()) is not None:
            yield self._indication(taken)
        if self._checked is not None:
            answer, self._checked = self._checked, None
            number, self._check = self._check, None
            yield {"check": number} | answer | ({} if "refused" in answer else {"sequence": self._sequence})

    def _take(self) -> Indication | None:
        return self._named.take(self._name) if self._name else self._knowledge.take(self.subscription_id)

    async def _wait(self) -> bool:
        """Waits for the next event. Returns False if none happened within `KEEP_ALIVE_S`."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def _begin(self, subscribed: Subscribed, extra: dict[str, Any]) -> None:
        self.subscription_id, self._head = subscribed.subscription_id, subscribed.result.with_rows([])
        self._first = [self._opening(0) | {"result": _rows(self._head, subscribed.result.rows)} | extra]

    async def _open_named(self, name: str, query: Mapping[str, str]) -> None:
        last_sequence = parse_number("sequence", query["sequence"]) if "sequence" in query else None
        subscription_id = await self._named.begin(name, query)
        self._name = name
        self._continue_from(subscription_id, self._named.resume(name, last_sequence, self._wake.set), last_sequence)

    def _resume(self, subscription_id: str, last_sequence: int, question: Question) -> bool:
        """Resumes a subscription. Returns False if it does not exist, has another question, or is a named one, which
        only its name resumes."""
        try:
            is_same = self._knowledge.queries.question_of(subscription_id) == question
            if not is_same or is_named(subscription_id):
                return False
            resumption = self._knowledge.resume(subscription_id, last_sequence, self._wake.set)
        except TidegateError:
            return False
        self._continue_from(subscription_id, resumption, last_sequence)
        return True

    def _continue_from(self, subscription_id: str, resumption: Resumption, last_sequence: int | None) -> None:
        whole = resumption.result
        self.subscription_id, self._head = subscription_id, self._knowledge.queries.head_of(subscription_id)
        if whole is not None:
            extra = {"result": _rows(whole, whole.rows)} | ({} if last_sequence is None else {"reset": True})
            self._first = [self._opening(resumption.sequence) | extra]
            return
        assert last_sequence is not None, "a client without a last sequence gets a whole result"
        self._first = [self._opening(last_sequence)]
        if resumption.missed is not None:
            self._first.append(self._indication(resumption.missed))

    def _opening(self, sequence: int) -> dict[str, Any]:
        assert self._head is not None
        self._sequence = sequence
        return {"subscription": self.subscription_id, "sequence": sequence, "variables": self._head.names}

    def _indication(self, taken: Indication) -> dict[str, Any]:
        assert self._head is not None
        self._sequence = taken.sequence
        return {
            "sequence": taken.sequence,
            "added": _rows(self._head, taken.difference.added),
            "removed": _rows(self._head, taken.difference.removed),
            "merged": taken.merged,
            "spread_s": round(self._knowledge.spread_s, 6),
        } | ({"held_s": round(taken.held_s, 6)} if taken.held_s else {})


class HttpPersistent:
    """The endpoints, and all open sessions by subscription id."""

    def __init__(self, named: NamedQueries) -> None:
        self._named = named
        self._sessions: dict[str, PersistentSession] = {}
        self._is_stopping = False

    def __len__(self) -> int:
        return len(self._sessions)

    async def stream(self, request: Request) -> Response:
        """Sends server-sent events."""
        refuse_name_by_get(request)
        session = await self._open(request)

        async def on_end() -> None:
            self._close(session)

        return EventStream(server_sent_events(session), on_end)

    async def subscribe(self, websocket: WebSocket) -> None:
        """Sends the result and its changes over a WebSocket."""
        try:
            session = await self._open(websocket)
        except TidegateError as error:
            await websocket.send_denial_response(error_response(error))
            return
        try:
            await websocket.accept()
            async with asyncio.TaskGroup() as tasks:
                pushing = tasks.create_task(push(session, websocket))
                tasks.create_task(_listen(session, websocket, pushing))
        except* WebSocketDisconnect:
            pass
        finally:
            self._close(session)

    async def list_named(self, request: Request) -> Response:
        """Lists the named queries, and whether a client follows each now."""
        shown = [
            {"name": name} | question | {"is_followed": subscription_id(name) in self._sessions}
            for name, question in self._named.questions().items()
        ]
        return json_response({"queries": shown})

    async def drop(self, request: Request) -> Response:
        """Drops a named persistent query, and ends the connection that follows it."""
        name = request.query_params.get("name", "")
        self._named.drop(name)
        if (session := self._sessions.get(subscription_id(name))) is not None:
            session.end(NoSuchName("K127", f"the persistent query {name!r} was dropped", "open it again"))
        return Response(status_code=204)

    def stop(self) -> None:
        self._is_stopping = True
        for session in self._sessions.values():
            session.stop()

    async def _open(self, connection: HTTPConnection) -> PersistentSession:
        if self._is_stopping:
            raise Unavailable("U702", "the broker is shutting down", "connect again in a moment")
        session = PersistentSession(self._named)
        await session.open(kp_of(connection), connection.query_params)
        if (former := self._sessions.get(session.subscription_id)) is not None:
            former.end(TakenOver("K124", "another connection has taken over the subscription", "use one at a time"))
        self._sessions[session.subscription_id] = session
        if self._is_stopping:  # `stop` ran while the session was being opened
            session.stop()
        return session

    def _close(self, session: PersistentSession) -> None:
        # A session that was taken over must not detach the subscription from its new connection.
        if self._sessions.get(session.subscription_id) is session:
            del self._sessions[session.subscription_id]
            session.close()


async def _listen(session: PersistentSession, websocket: WebSocket, pushing: asyncio.Task[None]) -> None:
    """Reads the client's checks and its disconnect; ignores any other message."""
    with contextlib.suppress(WebSocketDisconnect):
        while websocket.client_state is WebSocketState.CONNECTED:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                session.is_ended_by_client = message.get("code") == NORMAL_CLOSURE
            else:
                with contextlib.suppress(msgspec.MsgspecError):
                    session.check(msgspec.json.decode(message.get("text") or b"", type=Check).check)
    pushing.cancel()


def _rows(head: Result, rows: Iterable[Row]) -> list[Any]:
    return [json_row(head, row) for row in rows]
