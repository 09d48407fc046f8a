"""Push over HTTP: WebSocket `/v1/subscribe?filter=…` and server-sent events `/v1/stream?filter=…`.

A connection is one session with one subscription; with `name=…` that is a durable one (`http_durable`). The response
starts when the subscription is acknowledged: what is published after that arrives. Deliveries are taken from the outbox
as fast as the peer reads, one JSON object each: `{"notification": {…}, "publisher": "…", "sequence": n}`, or
`{"gap": n}` where a slow reader has lost some.

A filter may name the subscriber's context, as `floor==$floor`, which `context=…` gives as JSON. Over WebSocket the
subscriber sends `{"context": {"floor": 4}}` when it is somewhere else, and gets the same back when that is in force.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from tidegate.errors import ProtocolError, TidegateError, Unavailable
from tidegate.filters import Filter
from tidegate.frames import HEADER, HEADER_BYTES, Gap, Kind, decode_body, decode_deliver
from tidegate.layers.embedded_host import BrokerHost
from tidegate.layers.frames import (
    DeliveriesWait,
    LayerFrame,
    SessionEnded,
    SubscriptionReady,
    SubscriptionRebound,
    SubscriptionRefused,
)
from tidegate.layers.outbox import Policy
from tidegate.listeners.http_durable import DurableSession, open_durable
from tidegate.listeners.json_response import error_response
from tidegate.notification import Value
from tidegate.queues import LogicalQueues

TAKE_BYTES: Final = 64 * 1024
KEEP_ALIVE_S: Final = 15.0
CLIENT_ID: Final = 1


class Context(msgspec.Struct, forbid_unknown_fields=True):
    """What a subscriber says of itself."""

    context: dict[str, Value]


class PushSession:
    """One subscription of one HTTP connection; `events` gives lists of encoded JSON objects."""

    def __init__(self, host: BrokerHost) -> None:
        self._host = host
        self._point = host.connection_point
        self._session = host.open_session(self)
        self._wake = asyncio.Event()
        self._text = ""
        self._context: dict[str, Value] = {}
        self._rebinding: deque[Context] = deque()
        self._rebound: list[bytes] = []
        self._is_ready = False
        self._is_stopping = False
        self._error: TidegateError | None = None

    def on_frame(self, frame: LayerFrame) -> None:
        if isinstance(frame, SubscriptionReady):
            self._is_ready = True
        elif isinstance(frame, SubscriptionRebound):
            self._rebound.append(msgspec.json.encode(self._rebinding.popleft()))
        elif isinstance(frame, (SessionEnded, SubscriptionRefused)):
            self._error = frame.error
        elif not isinstance(frame, DeliveriesWait):
            return
        self._wake.set()

    async def subscribe(self, query: Mapping[str, str]) -> None:
        """Returns when the subscription is acknowledged."""
        self._text = query.get("filter", "")
        if "context" in query:
            self._context = _read_context(f'{{"context": {query["context"]}}}').context
        parsed = Filter.parse(self._text, self._context)
        policy = Policy.parse(query.get("policy", Policy.DROP_OLDEST))
        self._host.carry(self._point.subscribe(self._session, CLIENT_ID, parsed, policy))
        while not self._is_ready:
            if self._error is not None:
                raise self._error
            await self._wait()

    def on_message(self, message: str) -> None:
        """Of the subscriber: another context. What is wrong ends the session."""
        try:
            changed = _read_context(message)
            self._context |= changed.context
            outputs = self._point.rebind(self._session, CLIENT_ID, Filter.parse(self._text, self._context))
        except TidegateError as error:
            self._error = error
            self._wake.set()
        else:
            self._rebinding.append(changed)
            self._host.carry(outputs)

    async def events(self) -> AsyncIterator[list[bytes]]:
        """What is delivered, until the broker stops; an empty list now and then while nothing is."""
        while True:
            rebound, self._rebound = self._rebound, []
            frames, outputs = self._point.take(self._session, TAKE_BYTES)
            self._host.carry(outputs)
            if frames or rebound:
                yield [*(event for frame in frames for event in encode_events(frame)), *rebound]
            elif self._error is not None:
                raise self._error
            elif self._is_stopping:
                return
            elif not await self._wait():
                yield []

    def stop(self) -> None:
        """What waits is still given out, then `events` ends."""
        self._is_stopping = True
        self._wake.set()

    async def close(self) -> None:
        self._host.close_session(self._session)

    async def _wait(self) -> bool:
        """False when nothing has happened for a while."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True


class HasEvents(Protocol):
    """Gives lists of encoded JSON objects until the broker stops, an empty list now and then."""

    def events(self) -> AsyncIterator[list[bytes]]: ...


Session: TypeAlias = PushSession | DurableSession


class HttpSubscriber:
    """The endpoints, and all push sessions of the broker."""

    def __init__(self, host: BrokerHost, queues: LogicalQueues) -> None:
        self._host = host
        self._queues = queues
        self._sessions: set[Session] = set()
        self._is_stopping = False

    async def stream(self, request: Request) -> Response:
        """Server-sent events."""
        session = await self._open(request.query_params)
        return EventStream(server_sent_events(session), on_end=lambda: self._close(session))

    async def subscribe(self, websocket: WebSocket) -> None:
        """WebSocket."""
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

    async def _open(self, query: Mapping[str, str]) -> Session:
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

    async def _close(self, session: Session) -> None:
        self._sessions.discard(session)
        await session.close()

    async def _listen(self, session: Session, websocket: WebSocket, pushing: asyncio.Task[None]) -> None:
        """A subscriber may change its context, and leave."""
        with contextlib.suppress(WebSocketDisconnect):
            while websocket.client_state is WebSocketState.CONNECTED:
                message = await websocket.receive()
                if isinstance(session, PushSession) and message["type"] == "websocket.receive":
                    session.on_message(message.get("text") or "")
        pushing.cancel()


class EventStream(StreamingResponse):
    """Server-sent events. `on_end` is awaited however it ends; the iterator cannot tell: one that was never started, or
    that waits for a peer that does not read, is dropped silently when the peer leaves."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], Awaitable[None]]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._on_end()


def _read_context(text: str) -> Context:
    try:
        return msgspec.json.decode(text, type=Context)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(
            "P344",
            f"no context: {error}",
            'give an object of names and values: context={"floor": 3}, over WebSocket {"context": {"floor": 3}}',
        ) from error


async def push(session: HasEvents, websocket: WebSocket) -> None:
    """Sends what a session has to tell, until the broker stops or an error ends it."""
    try:
        async for events in session.events():
            for event in events:
                await websocket.send_text(event.decode())
        await websocket.close(1001, "the broker is shutting down")
    except TidegateError as error:
        await websocket.send_text(msgspec.json.encode({"error": error.to_dict()}).decode())
        await websocket.close(1008, error.code)


async def server_sent_events(session: HasEvents) -> AsyncIterator[bytes]:
    yield b": subscribed\n\n"
    try:
        async for events in session.events():
            yield b"".join(b"data: " + event + b"\n\n" for event in events) or b": nothing new\n\n"
    except TidegateError as error:
        yield b"event: error\ndata: " + msgspec.json.encode({"error": error.to_dict()}) + b"\n\n"


def encode_events(frame: bytes) -> list[bytes]:
    """The JSON objects of one frame from an outbox."""
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
