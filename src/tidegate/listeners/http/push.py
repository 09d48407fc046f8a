"""The shared part of the push endpoints: sends events over a WebSocket, or as server-sent events, until one side ends.

A session yields its events as encoded JSON objects (`HasEvents`). The endpoints are in `subscribe` (notifications) and
`persistent` (changes of a query's result).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from tidegate.errors import ProtocolError, TidegateError
from tidegate.listeners.http.connection import ALLOW_STALLS


class HasEvents(Protocol):
    """Yields lists of encoded JSON objects until the broker stops. An empty list keeps an idle connection alive."""

    def events(self) -> AsyncIterator[list[bytes]]: ...


class EventStream(StreamingResponse):
    """A response of server-sent events. `on_end` is awaited however the response ends.

    The iterator could not do this itself: if it was never started, or waits for a peer that does not read, it is
    dropped without notice when the peer leaves."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], Awaitable[None]]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"][ALLOW_STALLS]()
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._on_end()


class ChangesState(ProtocolError):
    """A GET requests something that changes state, which only a POST may do."""

    status = 405


def refuse_name_by_get(request: Request) -> None:
    """Refuses a GET with `name=…`. Reading from a name, or creating one, changes what the broker stores. A page of
    another origin could send such a GET by an image tag, but browsers send `Origin` with every POST."""
    if request.method != "POST" and "name" in request.query_params:
        raise ChangesState(
            "P325",
            f"{request.method} {request.scope['path']} cannot have name=…, because reading by name changes stored data",
            "send the same request as POST, or use the WebSocket",
        )


async def push(session: HasEvents, websocket: WebSocket) -> None:
    """Sends a session's events until the broker stops or an error ends the session."""
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
