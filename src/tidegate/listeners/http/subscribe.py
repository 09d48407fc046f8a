"""Push over HTTP: WebSocket `/v1/subscribe?filter=…` and server-sent events `/v1/stream?filter=…`.

A connection is one session with one subscription. With `name=…` the subscription is durable (`durable`), and a stream
must be requested by POST. The response starts once the subscription is acknowledged: every notification published after
that is delivered. Deliveries are taken from the outbox as fast as the peer reads, one JSON object each:
`{"notification": {…}, "publisher": "…", "sequence": n}`, or `{"gap": n}` if a slow reader lost n notifications.

A filter may refer to the subscriber's context, as in `floor==$floor`; `context=…` passes the values as JSON. Over
WebSocket, the subscriber sends `{"context": {"floor": 4}}` to change them, and the broker echoes the message once the
change is in force.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from tidegate.errors import Overloaded, ProtocolError, TidegateError, Unavailable
from tidegate.filters import Filter
from tidegate.frames import HEADER, HEADER_BYTES, Gap, Kind, decode_body, decode_deliver
from tidegate.hosts.embedded_host import BrokerHost
from tidegate.hosts.session import Session
from tidegate.layers.outbox import Policy
from tidegate.layers.session_events import (
    DeliveriesWait,
    SessionEnded,
    SessionEvent,
    SubscriptionReady,
    SubscriptionRebound,
    SubscriptionRefused,
)
from tidegate.listeners.http.durable import DurableSession, open_durable
from tidegate.listeners.http.json_keys import refuse_duplicate_keys
from tidegate.listeners.http.json_response import error_response
from tidegate.listeners.http.push import EventStream, push, refuse_name_by_get, server_sent_events
from tidegate.notification import Value
from tidegate.queues import LogicalQueues

TAKE_BYTES: Final = 64 * 1024
KEEP_ALIVE_S: Final = 15.0
CLIENT_ID: Final = 1
# Context messages that wait for their answer. Above this size the connection is not read.
CONTEXTS_BYTES_MAX: Final = 64 * 1024
# The bounds of a subscriber's context. A filter has at most 32 constraints, so few of the names can be in use.
CONTEXT_NAMES_MAX: Final = 64
CONTEXT_BYTES_MAX: Final = 64 * 1024


class Context(msgspec.Struct, forbid_unknown_fields=True):
    """Values that a subscriber reports of itself, such as its floor."""

    context: dict[str, Value]


class PushSession:
    """One subscription of one HTTP connection; `events` yields lists of encoded JSON objects."""

    def __init__(self, host: BrokerHost) -> None:
        self._host = host
        self._session = Session(host, self)
        self._session.open()
        self._wake = asyncio.Event()
        self._text = ""
        self._context: dict[str, Value] = {}
        self._rebinding: deque[Context] = deque()
        self._rebound: list[bytes] = []
        self._contexts_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._is_ready = False
        self._is_stopping = False
        self._error: TidegateError | None = None

    def on_event(self, event: SessionEvent) -> None:
        if isinstance(event, SubscriptionReady):
            self._is_ready = True
        elif isinstance(event, SubscriptionRebound):
            self._rebound.append(msgspec.json.encode(self._rebinding.popleft()))
        elif isinstance(event, (SessionEnded, SubscriptionRefused)):
            self._error = event.error
        elif not isinstance(event, DeliveriesWait):
            return
        self._wake.set()

    async def subscribe(self, query: Mapping[str, str]) -> None:
        """Subscribes, and returns once the subscription is acknowledged."""
        self._text = query.get("filter", "")
        if "context" in query:
            self._context = self._checked(_read_context(f'{{"context": {query["context"]}}}').context)
        parsed = Filter.parse(self._text, self._context)
        policy = Policy.parse(query.get("policy", Policy.DROP_OLDEST))
        self._session.subscribe(CLIENT_ID, parsed, policy)
        while not self._is_ready:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def wait_room(self) -> None:
        """Waits until another context may be read: the earlier ones were answered, and the answers were written."""
        await self._room.wait()

    def on_message(self, message: str) -> None:
        """Applies a change of the subscriber's context. An invalid message ends the session, and later ones are
        ignored."""
        if self._error is not None:
            return
        self._contexts_bytes += len(message)
        if self._contexts_bytes > CONTEXTS_BYTES_MAX:
            self._room.clear()
        try:
            changed = _read_context(message)
            self._context = self._checked(self._context | changed.context)
            parsed = Filter.parse(self._text, self._context)
            # Recorded first: the confirmation may come before `rebind` returns.
            self._rebinding.append(changed)
            self._session.rebind(CLIENT_ID, parsed)
        except TidegateError as error:
            self._error = error
            self._wake.set()

    def _checked(self, context: dict[str, Value]) -> dict[str, Value]:
        """Returns the context, or raises L624 if it is too large. It only grows: names stay until the session ends."""
        size_bytes = len(msgspec.json.encode(context))
        if len(context) > CONTEXT_NAMES_MAX or size_bytes > CONTEXT_BYTES_MAX:
            raise self._host.refusals.note(
                Overloaded(
                    "L624",
                    f"the context has {len(context)} names and {size_bytes} bytes",
                    f"send only names that the filter uses, at most {CONTEXT_NAMES_MAX} and {CONTEXT_BYTES_MAX} bytes",
                )
            )
        return context

    async def events(self) -> AsyncIterator[list[bytes]]:
        """Yields deliveries until the broker stops, and an empty list every `KEEP_ALIVE_S` while there are none."""
        try:
            while True:
                rebound, self._rebound = self._rebound, []
                frames: list[bytes] = []
                self._session.take(TAKE_BYTES, frames.extend)
                if frames or rebound:
                    yield [*(event for frame in frames for event in encode_events(frame)), *rebound]
                    if not self._rebinding and not self._rebound:
                        self._contexts_bytes = 0
                        self._room.set()
                elif self._error is not None:
                    raise self._error
                elif self._is_stopping:
                    return
                elif not await self._wait():
                    yield []
        finally:
            self._room.set()

    def stop(self) -> None:
        """Ends `events` once all pending deliveries are sent."""
        self._is_stopping = True
        self._wake.set()

    async def close(self) -> None:
        self._session.close()

    async def _wait(self) -> bool:
        """Waits for the next frame. Returns False if none arrived within `KEEP_ALIVE_S`."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True


AnyPushSession: TypeAlias = PushSession | DurableSession


class HttpSubscriber:
    """The endpoints, and all push sessions of the broker."""

    def __init__(self, host: BrokerHost, queues: LogicalQueues) -> None:
        self._host = host
        self._queues = queues
        self._sessions: set[AnyPushSession] = set()
        self._is_stopping = False

    async def stream(self, request: Request) -> Response:
        """Sends server-sent events."""
        refuse_name_by_get(request)
        session = await self._open(request.query_params)
        return EventStream(server_sent_events(session), on_end=lambda: self._close(session))

    async def subscribe(self, websocket: WebSocket) -> None:
        """Sends deliveries over a WebSocket."""
        try:
            session = await self._open(websocket.query_params)
        except TidegateError as error:
            await websocket.send_denial_response(error_response(error))
            return
        try:
            await websocket.accept()
            async with asyncio.TaskGroup() as tasks:
                pushing = tasks.create_task(push(session, websocket))
                tasks.create_task(self._listen(session, websocket, pushing))
        except* WebSocketDisconnect:
            pass
        finally:
            await self._close(session)

    def stop(self) -> None:
        self._is_stopping = True
        for session in self._sessions:
            session.stop()

    def __len__(self) -> int:
        return len(self._sessions)

    async def _open(self, query: Mapping[str, str]) -> AnyPushSession:
        if self._is_stopping:
            raise Unavailable("U702", "the broker is shutting down", "connect again in a moment")
        session = await (open_durable(self._queues, query) if "name" in query else self._open_live(query))
        self._sessions.add(session)
        return session

    async def _open_live(self, query: Mapping[str, str]) -> PushSession:
        session = PushSession(self._host)
        try:
            await session.subscribe(query)
        except BaseException:
            await session.close()
            raise
        return session

    async def _close(self, session: AnyPushSession) -> None:
        self._sessions.discard(session)
        await session.close()

    async def _listen(self, session: AnyPushSession, websocket: WebSocket, pushing: asyncio.Task[None]) -> None:
        """Reads the subscriber's contexts, and stops pushing when the subscriber disconnects."""
        with contextlib.suppress(WebSocketDisconnect):
            while websocket.client_state is WebSocketState.CONNECTED:
                if isinstance(session, PushSession):
                    await session.wait_room()
                message = await websocket.receive()
                if isinstance(session, PushSession) and message["type"] == "websocket.receive":
                    session.on_message(message.get("text") or "")
        pushing.cancel()


def _read_context(text: str) -> Context:
    try:
        context = msgspec.json.decode(text, type=Context)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(
            "P344",
            f"the context is invalid: {error}",
            'send an object of names and values: context={"floor": 3}, or over WebSocket {"context": {"floor": 3}}',
        ) from error
    refuse_duplicate_keys(text.encode())
    return context


def encode_events(frame: bytes) -> list[bytes]:
    """Returns the JSON objects for one frame from an outbox."""
    kind = HEADER.unpack_from(frame)[1]
    body = memoryview(frame)[HEADER_BYTES:]
    if kind == Kind.GAP:
        gap: Gap = decode_body(body, Gap)
        return [msgspec.json.encode({"gap": sum(gap.dropped.values())})]
    assert kind == Kind.DELIVER, kind
    publisher, deliveries = decode_deliver(body)
    encode: Any = msgspec.json.encode
    return [
        encode({"notification": each.notification, "publisher": publisher, "sequence": each.sequence})
        for each in deliveries
    ]
