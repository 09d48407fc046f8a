"""A bad network: a TCP forwarder between a client and its broker that cuts connections, anywhere within a frame."""

from __future__ import annotations

import asyncio
import random
from types import TracebackType
from typing import Self

from tidegate.client.address import Address

READ_BYTES = 16 * 1024


class CuttingProxy:
    """Use it in `async with`. Each connection ends after a random number of bytes, up to `bytes_max`.

    After `cuts_max` cuts it cuts no more: an answer longer than `bytes_max` would never get through.
    """

    def __init__(self, target: str, chance: random.Random, bytes_max: int, cuts_max: int) -> None:
        self._target = Address.parse(target)
        self._chance = chance
        self._bytes_max = bytes_max
        self._cuts_max = cuts_max
        self._writers: set[asyncio.StreamWriter] = set()
        self.cuts = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.address = f"tidegate://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
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
            up_reader, up_writer = await asyncio.open_connection(self._target.host, self._target.port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, up_writer}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, up_writer, self._budget()))
                tasks.create_task(self._pump(up_reader, writer, self._budget()))
        except* ConnectionError:
            pass
        finally:
            self._writers -= {writer, up_writer}
            for each in (writer, up_writer):
                each.transport.abort()

    def _budget(self) -> int:
        return self._chance.randint(1, self._bytes_max) if self.cuts < self._cuts_max else 1 << 62

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int) -> None:
        while data := await reader.read(READ_BYTES):
            writer.write(data[:budget])
            await writer.drain()
            budget -= len(data)
            if budget <= 0:
                self.cuts += 1
                raise ConnectionAbortedError
        raise ConnectionAbortedError
