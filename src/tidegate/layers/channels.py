"""Channels: FIFO from a process to another, over TCP or Unix sockets, for the slices that live in them.

There is one connection for each direction between two processes. Frames are those of `wire`; before a name is first
used, a NAME frame gives it a number, and the header of every frame has those of its source and its destination.

A channel either carries everything in order or is broken, and a broken one is known at both ends: nobody tries again,
since what was under way may be lost. Whoever is at the other end is reported, and the coordinator decides: mostly the
other process has died. It takes the names of both ends out of use, so that nothing is ever sent twice.

What may go wrong here: a slice is not in the directory yet (what is for it waits until it is), the other end does not
read (what is under way is bounded by the windows of the publishers, not here), bytes of something else (the connection
is closed).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from tidegate.errors import TidegateError
from tidegate.frames import FRAME_BYTES_MAX, HEADER, PartialFrame, split_frames
from tidegate.layers.frames import LayerFrame
from tidegate.layers.wire import decode, encode

log = logging.getLogger(__name__)

READ_BYTES: Final = 1024 * 1024
# The kind of a frame that gives a name a number.
NAME: Final = 255

OnFrame = Callable[[str, str, LayerFrame], None]
OnBroken = Callable[[set[str]], None]


class Channels:
    """`on_frame(source, address, frame)` gets what comes; `on_broken(names)` is told who cannot be reached any more."""

    def __init__(self, on_frame: OnFrame, on_broken: OnBroken) -> None:
        self._on_frame = on_frame
        self._on_broken = on_broken
        self.endpoints: dict[str, str] = {}
        self._waiting: dict[str, list[tuple[str, LayerFrame]]] = {}
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: set[_Incoming] = set()
        self._server: asyncio.AbstractServer | None = None

    async def listen(self, bind: str) -> str:
        """On a host (a free port of it) or, with unix:PATH, on a socket; where that is, for `place`."""
        loop = asyncio.get_running_loop()
        if bind.startswith("unix:"):
            path = bind.removeprefix("unix:")
            Path(path).unlink(missing_ok=True)
            self._server = await loop.create_unix_server(lambda: _Incoming(self), path)
            return bind
        server = self._server = await loop.create_server(lambda: _Incoming(self), bind, 0)
        return f"{bind}:{server.sockets[0].getsockname()[1]}"

    def place(self, endpoints: dict[str, str]) -> None:
        """Who lives where, now. What has waited for a name goes out."""
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
        # A port may come into use again: whoever has it now is not who was lost.
        if channel is None or (channel.is_lost and address not in channel.names):
            channel = self._outgoing[endpoint] = _Outgoing(endpoint, self._on_lost)
        channel.send(source, address, frame)

    def forget(self, names: set[str]) -> None:
        """Nothing is kept for the dead."""
        for name in names:
            self._waiting.pop(name, None)

    async def close(self) -> None:
        """What was sent before is written, as long as the other ends read."""
        if self._server is not None:
            self._server.close()
        for outgoing in self._outgoing.values():
            await outgoing.close()
        for incoming in list(self._incoming):
            incoming.abort()

    def _on_lost(self, channel: _Outgoing) -> None:
        self._on_broken(set(channel.names))


class _Outgoing:
    """One direction to one process. Frames of one turn of the loop are written together."""

    def __init__(self, endpoint: str, on_lost: Callable[[_Outgoing], None]) -> None:
        self.names: set[str] = set()
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._numbers: dict[str, int] = {}
        self._pending: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.is_lost = False
        self._is_flushing = False
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
    """The other end says nothing here; that the connection ends is all there is to learn."""

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
        except (TidegateError, KeyError, UnicodeDecodeError) as error:
            log.warning("a channel is closed: %s", error)
            self.abort()
        else:
            self._partial.keep(data[consumed:])

    def abort(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.abort()

    def _take(self, kind: int, route: int, body: memoryview) -> None:
        if kind == NAME:
            self._names[route] = str(body, "utf-8")
            return
        source, address = self._names[route >> 32], self._names[route & 0xFFFFFFFF]
        self._sources.add(source)
        self._channels._on_frame(source, address, decode(kind, body))
