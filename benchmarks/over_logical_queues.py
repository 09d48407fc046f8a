"""Tidegate's durable queues as contenders: the store alone in one process, and a broker with the Python client."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.queue_job import BATCH, CONSUMERS, PRODUCERS, WAIT_S, Ends
from tidegate.client import Message, Queue, connect
from tidegate.messages import Dequeue, Leased, Settle
from tidegate.queues.definition import Durability
from tidegate.queues.enqueue_controller import make_message
from tidegate.queues.logical_queues import LogicalQueues
from tidegate.queues.records import decode_record
from tidegate.queues.stores.lmdb_store import LmdbStore

_STORE_QUEUE: Final = "bench"
# The number is the end of a body, so that it can be read without unpacking the body.
_NUMBER: Final = slice(-8, None)


@asynccontextmanager
async def open_store(durability: Durability) -> AsyncIterator[Ends]:
    """Opens the queues that the listeners of a broker call, without listeners."""
    with TemporaryDirectory(prefix="tidegate-bench-") as data:
        queues = LogicalQueues(LmdbStore(Path(data)))
        await queues.open()
        await queues.define(_STORE_QUEUE, {"durability": durability})

        async def put(bodies: list[bytes]) -> None:
            await queues.enqueue(_STORE_QUEUE, [make_message(body) for body in bodies])

        try:
            yield Ends([put] * PRODUCERS, [_StoreConsumer(queues) for _ in range(CONSUMERS)])
        finally:
            await queues.close()


class _StoreConsumer:
    def __init__(self, queues: LogicalQueues) -> None:
        self._queues = queues
        self._taken: list[Leased] = []

    async def take(self) -> list[bytes]:
        self._taken = await self._queues.dequeue(Dequeue(_STORE_QUEUE, max=BATCH, wait_s=WAIT_S))
        return [bytes(memoryview(decode_record(leased.record).body)[_NUMBER]) for leased in self._taken]

    async def delete(self) -> int:
        receipts = [leased.receipt for leased in self._taken]
        return (await self._queues.settle(Settle(_STORE_QUEUE, "delete", receipts))).done


@asynccontextmanager
async def open_client(address: str, durability: Durability) -> AsyncIterator[Ends]:
    """Opens one connection to a broker, which producers and consumers share."""
    async with connect(address) as broker:
        queue = broker.queue(f"bench-{os.getpid()}")
        await queue.create(durability=durability)
        yield Ends([queue.put] * PRODUCERS, [_ClientConsumer(queue) for _ in range(CONSUMERS)])


class _ClientConsumer:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._taken: list[Message] = []

    async def take(self) -> list[bytes]:
        self._taken = await self._queue.take(max=BATCH, wait_s=WAIT_S)
        return [message.body for message in self._taken]

    async def delete(self) -> int:
        return (await self._queue.delete(self._taken)).done
