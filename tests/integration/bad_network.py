"""Bad networks: forwarders between a client and its broker that cut or refuse connections, or drop or change messages.

They leave no connection open, however they end. An open connection would fail whichever test runs when it is
garbage-collected.
"""

from __future__ import annotations

import asyncio
import random
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

READ_BYTES = 16 * 1024
SSAP_END = b"</SSAP_message>"


class Forwarder:
    """An async context manager that forwards everything unchanged. `target` and `address` have the same scheme."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._writers: set[asyncio.StreamWriter] = set()
        self._forwarding: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"{self._target.scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut_all()
        for task in self._forwarding:
            task.cancel()
        for outcome in await asyncio.gather(*self._forwarding, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def cut_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def pump_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards bytes to the broker until the connection ends, which raises an error."""
        await self._pump(reader, writer)

    async def pump_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards bytes to the client."""
        await self._pump(reader, writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
        raise ConnectionAbortedError

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._forwarding.add(asyncio.create_task(self._forward(reader, writer)))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with self._kept(writer):
                up_reader, up_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
                with self._kept(up_writer):
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(self.pump_up(reader, up_writer))
                        tasks.create_task(self.pump_down(up_reader, writer))
        except* (OSError, asyncio.IncompleteReadError):
            pass

    @contextmanager
    def _kept(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


class CuttingProxy(Forwarder):
    """Cuts each connection after a random number of bytes, up to `bytes_max`, anywhere within a frame.

    It stops after `cuts_max` cuts, because an answer longer than `bytes_max` would never get through.
    """

    def __init__(self, target: str, chance: random.Random, bytes_max: int, cuts_max: int) -> None:
        super().__init__(target)
        self._chance = chance
        self._bytes_max = bytes_max
        self._cuts_max = cuts_max
        self.cuts = 0

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = self._chance.randint(1, self._bytes_max) if self.cuts < self._cuts_max else 1 << 62
        while data := await reader.read(READ_BYTES):
            writer.write(data[:budget])
            await writer.drain()
            budget -= len(data)
            if budget <= 0:
                self.cuts += 1
                break
        raise ConnectionAbortedError


class RefusingProxy(Forwarder):
    """Answers the next `refusals` HTTP requests itself, as an overloaded broker does."""

    ANSWER = b'{"error":{"code":"L652","message":"too much to do","remedy":"come back later","retry_after_s":0.01}}'

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.refusals = 0

    async def pump_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.refusals:
            await super().pump_up(reader, writer)
        while await reader.read(READ_BYTES):  # so that the client receives its answer before the connection ends
            pass
        raise ConnectionAbortedError

    async def pump_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.refusals:
            await super().pump_down(reader, writer)
        self.refusals -= 1
        writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n%s" % (len(self.ANSWER), self.ANSWER))


class DroppingProxy(Forwarder):
    """Drops WebSocket messages of the broker for which `is_dropped` is true."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.is_dropped: Callable[[dict[str, Any]], bool] = lambda _: False
        self.dropped = 0

    async def pump_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readuntil(b"\r\n\r\n"))
        while True:
            head = await reader.readexactly(2)
            size = head[1]
            if size >= 126:
                length = await reader.readexactly(2 if size == 126 else 8)
                head += length
                (size,) = struct.unpack("!H" if size == 126 else "!Q", length)
            body = await reader.readexactly(size)
            if head[0] & 0x0F == 1 and self.is_dropped(msgspec.json.decode(body)):
                self.dropped += 1
                continue
            writer.write(head + body)
            await writer.drain()


class NumberlessProxy(Forwarder):
    """Removes the numbers from an SSAP broker's answers to queries, and drops its first indication."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.dropped = 0

    async def pump_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while message := await reader.readuntil(SSAP_END):
            if b"INDICATION" in message and not self.dropped:
                self.dropped += 1
                continue
            if b">QUERY<" in message:
                message = re.sub(rb'<parameter name="ind_sequence">\d+</parameter>', b"", message)
            writer.write(message)
            await writer.drain()
