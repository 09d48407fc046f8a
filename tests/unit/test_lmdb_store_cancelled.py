"""A call that is cancelled while the disk is busy still completes its change: counts and disk agree."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tidegate.messages import Dequeue, Settle
from tidegate.queues import LogicalQueues
from tidegate.queues.enqueue_controller import make_message
from tidegate.queues.stores.lmdb_store import LmdbStore

MESSAGES = 10


async def cancel(work: Coroutine[Any, Any, Any], turns: int) -> None:
    """Cancels the work after so many turns of the event loop."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelling() == 1


async def counts(queues: LogicalQueues) -> tuple[int, int, int]:
    statistics = await queues.statistics("q")
    return statistics.messages, statistics.waiting, statistics.leased


@pytest.mark.parametrize("turns", [1, 2])
def test_a_cancelled_enqueue_is_whole(tmp_path: Path, turns: int) -> None:
    async def scenario() -> None:
        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        await queues.define("q", {})
        await cancel(queues.enqueue("q", [make_message(i) for i in range(MESSAGES)]), turns)
        assert await counts(queues) == (MESSAGES, MESSAGES, 0)
        assert len(await queues.dequeue(Dequeue("q", wait_s=0))) == MESSAGES
        await queues.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", [1, 2])
def test_a_cancelled_delete_is_whole(tmp_path: Path, turns: int) -> None:
    async def scenario() -> None:
        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        await queues.define("q", {})
        await queues.enqueue("q", [make_message(i) for i in range(MESSAGES)])
        receipts = [leased.receipt for leased in await queues.dequeue(Dequeue("q", wait_s=0))]
        await cancel(queues.settle(Settle("q", "delete", receipts)), turns)
        assert await counts(queues) == (0, 0, 0)
        await queues.close()

    asyncio.run(scenario())


def test_two_who_make_a_queue_make_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        await asyncio.gather(*(queues.define("q", {}) for _ in range(5)))
        await queues.enqueue("q", [make_message(i) for i in range(MESSAGES)])
        await queues.close()

        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        assert await counts(queues) == (MESSAGES, MESSAGES, 0)
        assert len(await queues.dequeue(Dequeue("q", wait_s=0))) == MESSAGES
        await queues.close()

    asyncio.run(scenario())
