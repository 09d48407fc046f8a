"""A WebSocket connection: uvicorn's protocol with the bounds that it lacks, and with a header that it omits.

The broker stops reading from a peer that does not read: answers, even to pings, could not be sent and would pile up.
Such a peer may stay for 20 s, which is how long uvicorn's pings wait for their answers. Compressed data is decompressed
in small pieces, so that the size limit of a message applies before much more than one message is in memory. uvicorn
adds its default headers to every answer except the refusal of a WebSocket; this module adds the missing one there.

What may go wrong: the peer may disconnect at any time. The next use of the connection then ends the route, and nothing
is logged.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import wsproto
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto.connection import ConnectionType
from wsproto.events import Event, RejectConnection

from tidegate.listeners.http.json_response import NO_SNIFF
from tidegate.listeners.peer_transport import PeerTransport

# Deflate expands one byte to about a thousand at most, so a piece can become about 4 MB.
PIECE_BYTES: Final = 4096


class WebSocketConnection(WSProtocol):
    """Takes over the PeerTransport and the place of the HTTP connection that requested the upgrade."""

    transport: PeerTransport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _ServerConnection(ConnectionType.SERVER)
        self.app = _end_on_disconnect(self.app)  # type: ignore[assignment, arg-type]

    # The transport calls these.

    def data_received(self, data: bytes) -> None:
        if not self.handshake_complete:
            super().data_received(data)
            return
        for start in range(0, len(data), PIECE_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + PIECE_BYTES])

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport.lost()
        super().connection_lost(exc)

    # The route calls these.

    async def send(self, message: Any) -> None:
        """Sends a message. Raises ClientDisconnected if the connection is closing: uvicorn would drop the message, or
        report it as out of order."""
        await self.writable.wait()
        if self.transport.is_closing():
            raise ClientDisconnected
        await super().send(message)

    async def receive(self) -> Any:
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message


class _ServerConnection(wsproto.WSConnection):
    def send(self, event: Event) -> bytes:
        if isinstance(event, RejectConnection):
            event = dataclasses.replace(event, headers=[*event.headers, NO_SNIFF])
        return super().send(event)


def _end_on_disconnect(app: ASGIApp) -> ASGIApp:
    """Turns the disconnect that a route notices into the error that uvicorn does not log."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except WebSocketDisconnect:
            raise ClientDisconnected from None

    return run
