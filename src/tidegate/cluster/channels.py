"""Channels: FIFO connections from one process to another, over TCP or Unix sockets, for the slices that live in them.

There is one connection for each direction between two processes. `wire` encodes the frames. Before a name is first
used, a NAME frame assigns it a number; the header of every frame has the numbers of its source and its destination.

A channel either carries everything in order or is broken, and both ends notice when it breaks. It is not reopened,
since frames in flight may be lost. The slices at the other end are reported to the coordinator, which decides: usually
the other process has died. The coordinator retires the names of both ends, so that nothing is ever sent twice.

What may go wrong here: a slice is not in the directory yet (its frames wait until it is); the other end does not read
(the windows of the publishers bound what is in flight, not the channel); the bytes are invalid, or a frame is one that
no slice sends (the connection is closed, and its sources are reported as broken).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from tidegate.cluster.wire import decode, encode
from tidegate.errors import ForeignFrame, TidegateError
from tidegate.frames import FRAME_BYTES_MAX, HEADER, PartialFrame, split_frames
from tidegate.layers.frames import LayerFrame

log = logging.getLogger(__name__)

READ_BYTES: Final = 1024 * 1024
# The kind of a frame that assigns a number to a name. A process names its own slices and those that it sends to.
NAME: Final = 255
NAMES_MAX: Final = 1 << 16
NAME_BYTES_MAX: Final = 256

OnFrame = Callable[[str, str, LayerFrame], None]
OnBroken = Callable[[set[str]], None]


class Channels:
    """The channels of one process. `on_frame(source, address, frame)` gets the incoming frames; `on_broken(names)` gets
    the slices that can no longer be reached."""

    def __init__(self, on_frame: OnFrame, on_broken: OnBroken) -> None:
        self._on_frame = on_frame
        self._on_broken = on_broken
        self.endpoints: dict[str, str] = {}
        self._waiting: dict[str, list[tuple[str, LayerFrame]]] = {}
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: set[_Incoming] = set()
        self._server: asyncio.AbstractServer | None = None

    async def listen(self, bind: str) -> str:
        """Listens on a free port of a host or, with unix:PATH, on a Unix socket. Returns the endpoint for `place`."""
        loop = asyncio.get_running_loop()
        if bind.startswith("unix:"):
            path = bind.removeprefix("unix:")
            Path(path).unlink(missing_ok=True)
            self._server = await loop.create_unix_server(lambda: _Incoming(self), path)
            return bind
        server = self._server = await loop.create_server(lambda: _Incoming(self), bind, 0)
        return f"{bind}:{server.sockets[0].getsockname()[1]}"

    def place(self, endpoints: dict[str, str]) -> None:
        """Replaces the endpoints of all slices, and sends the frames that waited for a name."""
        self.endpoints = endpoints
        for name in [name for name in self._waiting if name in endpoints]:
            for source, frame in self._waiting.pop(name):
                self.send(source, name, frame)

    def send(self, source: str, address: str, frame: LayerFrame) -> None:
        endpoint = self.endpoints.get(address)
        if endpoint is None:
            self._waiting.setdefault(address, []).append((source, frame))
            return
        channel = self._outgoing.get(endpoint)
        # A port may be reused: a new name at the endpoint of a lost channel is another process.
        if channel is None or (channel.is_lost and address not in channel.names):
            channel = self._outgoing[endpoint] = _Outgoing(endpoint, self._on_lost)
        channel.send(source, address, frame)

    def forget(self, names: set[str]) -> None:
        """Drops the frames that wait for dead slices."""
        for name in names:
            self._waiting.pop(name, None)

    async def close(self) -> None:
        """Closes all connections. Frames that were sent before are still written, if the other ends read."""
        if self._server is not None:
            self._server.close()
        for outgoing in self._outgoing.values():
            await outgoing.close()
        for incoming in list(self._incoming):
            incoming.abort()

    def _on_lost(self, channel: _Outgoing) -> None:
        self._on_broken(set(channel.names))


class _Outgoing:
    """The outgoing connection to one process. Frames of one turn of the event loop are written together."""

    def __init__(self, endpoint: str, on_lost: Callable[[_Outgoing], None]) -> None:
        self.names: set[str] = set()
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._numbers: dict[str, int] = {}
        self._pending: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.is_lost = False
        self._is_flushing = False
        # Not in a TaskGroup: sending is synchronous, and the channel lives as long as the process. `close` cancels it.
        self._connecting = self._loop.create_task(self._connect(endpoint))

    def send(self, source: str, address: str, frame: LayerFrame) -> None:
        if self.is_lost:
            return
        self.names.add(address)
        route = self._number(source) << 32 | self._number(address)
        self._pending.append(encode(frame, route))
        if self._transport is not None and not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._pending.clear()
            self._on_lost(self)

    async def close(self) -> None:
        self.is_lost = True
        self._connecting.cancel()
        if self._transport is not None:
            self._flush()
            self._transport.close()

    async def _connect(self, endpoint: str) -> None:
        try:
            if endpoint.startswith("unix:"):
                path = endpoint.removeprefix("unix:")
                transport, _ = await self._loop.create_unix_connection(lambda: _Watch(self), path)
            else:
                host, _colon, port = endpoint.rpartition(":")
                transport, _ = await self._loop.create_connection(lambda: _Watch(self), host, int(port))
        except OSError as error:
            log.info("%s cannot be reached: %s", endpoint, error)
            self.lose()
            return
        self._transport = transport
        self._flush()

    def _flush(self) -> None:
        self._is_flushing = False
        if self._pending and self._transport is not None and not self._transport.is_closing():
            pending, self._pending = self._pending, []
            self._transport.write(pending[0] if len(pending) == 1 else b"".join(pending))

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            text = name.encode()
            self._pending.append(HEADER.pack(len(text), NAME, 0, 0, number) + text)
        return number


class _Watch(asyncio.Protocol):
    """Watches an outgoing connection for its end. The other end sends nothing on it."""

    def __init__(self, channel: _Outgoing) -> None:
        self._channel = channel

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel.lose()


class _Incoming(asyncio.BufferedProtocol):
    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._transport: asyncio.Transport | None = None
        self._partial = PartialFrame()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._names: dict[int, str] = {}
        self._sources: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._channels._incoming.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._channels._incoming.discard(self)
        if self._sources:
            self._channels._on_broken(self._sources)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._partial.room() or self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._partial.take(self._buffer, nbytes)
        if not data:
            return
        consumed = 0
        try:
            for kind, route, start, consumed in split_frames(data, FRAME_BYTES_MAX):
                self._take(kind, route, data[start:consumed])
        except TidegateError as error:
            log.warning("closing a channel: %s", error)
            self.abort()
        else:
            self._partial.keep(data[consumed:])

    def abort(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.abort()

    def _take(self, kind: int, route: int, body: memoryview) -> None:
        if kind == NAME:
            self._learn_name(route, bytes(body))
            return
        source, address = self._names.get(route >> 32), self._names.get(route & 0xFFFFFFFF)
        if source is None or address is None:
            raise ForeignFrame(f"route {route:#x} uses a number that no name has")
        self._sources.add(source)
        self._channels._on_frame(source, address, decode(kind, body))

    def _learn_name(self, number: int, name: bytes) -> None:
        if len(name) > NAME_BYTES_MAX or len(self._names) >= NAMES_MAX:
            raise ForeignFrame(f"too many names, or too long a name: number {len(self._names) + 1}, {len(name)} bytes")
        try:
            self._names[number] = name.decode()
        except UnicodeDecodeError as error:
            raise ForeignFrame(f"a name is not UTF-8: {error}") from error
