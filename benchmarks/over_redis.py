"""Redis Streams as a queue: redis-server with an append-only file, driven by redis-py's asyncio client with hiredis.

A consumer group is the queue: XADD in pipelines, XREADGROUP, then XACK and XDEL in one pipeline, because XACK alone
frees nothing. The server has its default configuration, including rewrites of the file, but makes no snapshots.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

from redis.asyncio import Redis

from benchmarks.processes import Server, find_program, free_port
from benchmarks.queue_job import BATCH, CONSUMERS, PRODUCERS, WAIT_S, Ends

_GROUP: Final = "consumers"
_FIELD: Final = b"b"


@contextmanager
def redis_server(append_fsync: str) -> Iterator[tuple[int, int]]:
    """Runs a Redis on loopback, and yields its (pid, port). `append_fsync` is always or everysec."""
    port = free_port()
    with TemporaryDirectory(prefix="redis-bench-") as folder:
        settings = {
            "port": str(port), "bind": "127.0.0.1", "dir": folder, "logfile": "redis.log", "save": "",
            "appendonly": "yes", "appendfsync": append_fsync,
        }  # fmt: skip
        flags = [text for name, value in settings.items() for text in (f"--{name}", value)]
        with Server([find_program("redis-server"), *flags]) as server:
            server.wait_listening(port)
            yield server.pid, port


@asynccontextmanager
async def open_stream(port: int) -> AsyncIterator[Ends]:
    """Opens a new stream. Each producer and consumer gets its own connection from the client's pool."""
    name = f"bench-{os.getpid()}"
    async with Redis(host="127.0.0.1", port=port, protocol=2) as client:
        await client.xgroup_create(name, _GROUP, id="0", mkstream=True)

        async def put(bodies: list[bytes]) -> None:
            async with client.pipeline(transaction=False) as pipeline:
                for body in bodies:
                    pipeline.xadd(name, {_FIELD: body})
                await pipeline.execute()

        yield Ends([put] * PRODUCERS, [_Consumer(client, name, f"consumer-{i}") for i in range(CONSUMERS)])
        await client.delete(name)


class _Consumer:
    def __init__(self, client: Redis, stream: str, name: str) -> None:
        self._client = client
        self._stream = stream
        self._name = name
        self._taken: list[bytes] = []

    async def take(self) -> list[bytes]:
        reading = self._client.xreadgroup(
            _GROUP, self._name, {self._stream: ">"}, count=BATCH, block=int(1000 * WAIT_S)
        )
        streams = await cast(Awaitable[Any], reading)
        entries = streams[0][1] if streams else []
        self._taken = [entry for entry, _fields in entries]
        return [fields[_FIELD] for _entry, fields in entries]

    async def delete(self) -> int:
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.xack(self._stream, _GROUP, *self._taken)
            pipeline.xdel(self._stream, *self._taken)
            _acknowledged, deleted = await pipeline.execute()
        return int(deleted)
