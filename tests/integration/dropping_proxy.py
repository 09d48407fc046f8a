"""A bad network for WebSockets: a forwarder that drops the messages that a test tells it to, and cuts connections."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

READ_BYTES = 16 * 1024


class DroppingProxy:
    """Use it in `async with`. Of what the broker says, messages for which `is_dropped` holds do not arrive."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._writers: set[asyncio.StreamWriter] = set()
        self.is_dropped: Callable[[dict[str, Any]], bool] = lambda _: False
        self.dropped = 0
        self.passed: list[dict[str, Any]] = []
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut_all()

    def cut_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        self._writers |= {writer, up_writer}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pump(reader, up_writer))
                tasks.create_task(self._pump_messages(up_reader, writer))
        except* (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers -= {writer, up_writer}
            for each in (writer, up_writer):
                each.transport.abort()

    async def _pump_messages(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readuntil(b"\r\n\r\n"))
        while True:
            head = await reader.readexactly(2)
            size = head[1]
            if size >= 126:
                length = await reader.readexactly(2 if size == 126 else 8)
                head += length
                (size,) = struct.unpack("!H" if size == 126 else "!Q", length)
            body = await reader.readexactly(size)
            if head[0] & 0x0F == 1:
                message = msgspec.json.decode(body)
                if self.is_dropped(message):
                    self.dropped += 1
                    continue
                self.passed.append(message)
            writer.write(head + body)
            await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()
    raise ConnectionAbortedError
