"""Messages whose removal fails stay in the queue: they are counted, and delivered again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidegate.errors import Unavailable
from tidegate.messages import Dequeue, Leased, Record
from tidegate.queues import LogicalQueues
from tidegate.queues.enqueue_controller import make_message
from tidegate.queues.stores.group_commit import GroupCommit
from tidegate.queues.stores.lmdb_store import LmdbStore


def fail(_commit: GroupCommit, _group: object) -> list[object]:
    raise OSError("the disk is gone")


@asynccontextmanager
async def opened(directory: Path, **settings: Any) -> AsyncIterator[LogicalQueues]:
    queues = LogicalQueues(LmdbStore(directory))
    await queues.open()
    await queues.define("q", settings)
    try:
        yield queues
    finally:
        await queues.close()


def bodies(found: list[Leased]) -> list[Any]:
    return [msgspec.msgpack.decode(msgspec.msgpack.decode(each.record, type=Record).body) for each in found]


async def level(queues: LogicalQueues) -> tuple[int, int, int]:
    now = await queues.statistics("q")
    return now.messages, now.waiting, now.dropped


def test_messages_that_could_not_be_dropped_to_make_room_are_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, physical_queues=1, messages_max=3) as queues:
            await queues.enqueue("q", [make_message(n) for n in range(3)])
            size_bytes = (await queues.statistics("q")).bytes
            with monkeypatch.context() as patch:
                patch.setattr(GroupCommit, "_commit", fail)
                with pytest.raises(Unavailable, match="U707"):
                    await queues.enqueue("q", [make_message(3)], make_room=True)
            assert await level(queues) == (3, 3, 0)
            assert (await queues.statistics("q")).bytes == size_bytes
            assert bodies(await queues.dequeue(Dequeue("q", max=1, wait_s=0))) == [0]
            await queues.enqueue("q", [make_message(3)], make_room=True)
            assert await level(queues) == (3, 2, 1)
            assert bodies(await queues.dequeue(Dequeue("q", wait_s=0))) == [2, 3]
            assert (await queues.statistics("q")).bytes == size_bytes

    asyncio.run(scenario())


def test_a_consumer_that_waits_receives_messages_that_could_not_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, physical_queues=1, messages_max=3) as queues:
            await queues.enqueue("q", [make_message(n) for n in range(3)])
            with monkeypatch.context() as patch:
                patch.setattr(GroupCommit, "_commit", fail)
                putting = asyncio.create_task(
                    queues.enqueue("q", [make_message(n) for n in range(3, 6)], make_room=True)
                )
                await asyncio.sleep(0)
                waiting = asyncio.create_task(queues.dequeue(Dequeue("q", wait_s=60)))
                with pytest.raises(Unavailable, match="U707"):
                    await putting
            async with asyncio.timeout(3):
                assert bodies(await waiting) == [0, 1, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize("after_lifetime", ["delete", "dead-letter"])
def test_old_messages_that_could_not_be_removed_are_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_lifetime: str
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, physical_queues=3, after_lifetime=after_lifetime) as queues:
            for n in range(6):
                await queues.enqueue("q", [make_message(n)])
            stored = queues._store.queue("q")
            with monkeypatch.context() as patch:
                patch.setattr(GroupCommit, "_commit", fail)
                with pytest.raises(Unavailable, match="U707"):
                    await stored.expire(time.time() + 1, 100)
            assert await level(queues) == (6, 6, 0)
            assert await stored.expire(time.time() + 1, 100) == 6
            assert await level(queues) == (0, 0, 0)
            dead = sum(each.messages for each in await queues.levels("q.dead"))
            assert dead == (6 if after_lifetime == "dead-letter" else 0)

    asyncio.run(scenario())
