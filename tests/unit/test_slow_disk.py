"""A slow disk delays only requests that wait for it, in ever larger groups."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tidegate.messages import Dequeue, Enqueued
from tidegate.queues import LogicalQueues
from tidegate.queues.enqueue_controller import make_message
from tidegate.queues.stores.group_commit import GroupCommit
from tidegate.queues.stores.lmdb_store import LmdbStore


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event that commits wait for in the writer's thread, as they would for a disk."""
    event = threading.Event()
    event.set()
    commit = GroupCommit._commit

    def slow_commit(self: GroupCommit, group: Any) -> list[object]:
        event.wait()
        return commit(self, group)

    monkeypatch.setattr(GroupCommit, "_commit", slow_commit)
    return event


def test_what_waits_for_a_slow_disk_goes_together_and_is_not_seen_before(
    tmp_path: Path, may_write: threading.Event
) -> None:
    async def scenario() -> None:
        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        await queues.define("slow", {})
        await queues.define("quick", {"durability": "memory"})
        await queues.enqueue("slow", [make_message("early")])
        store = queues._store
        assert isinstance(store, LmdbStore)
        commit = store._environment("fsync").commit
        may_write.clear()
        waiting = [asyncio.create_task(queues.enqueue("slow", [make_message(n)])) for n in range(300)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        # Earlier messages can be taken meanwhile, but messages that wait for the disk cannot.
        assert len(await queues.dequeue(Dequeue("slow", wait_s=0))) == 1
        assert await queues.dequeue(Dequeue("slow", wait_s=0)) == []
        before = commit.commits
        may_write.set()
        assert sum(done.accepted for done in await asyncio.gather(*waiting)) == 300
        assert commit.commits - before <= 3
        taken = [await queues.dequeue(Dequeue("slow", wait_s=0)) for _ in range(8)]
        assert sum(map(len, taken)) == 300
        await queues.close()

    asyncio.run(scenario())


def test_a_consumer_that_leaves_while_its_delete_waits_for_the_disk_has_deleted(
    tmp_path: Path, may_write: threading.Event
) -> None:
    async def scenario() -> None:
        store = LmdbStore(tmp_path)
        queues = LogicalQueues(store)
        await queues.open()
        await queues.define("q", {"physical_queues": 1})
        await queues.enqueue("q", [make_message(1)])
        [message] = await queues.dequeue(Dequeue("q", wait_s=0))
        may_write.clear()
        deleting = asyncio.create_task(store.queue("q").delete([message.receipt]))
        await asyncio.sleep(0.02)
        deleting.cancel()
        await asyncio.sleep(0.02)
        assert not deleting.done()
        may_write.set()
        await asyncio.wait([deleting])
        assert (await queues.statistics("q")).messages == 0
        await queues.close()

    asyncio.run(scenario())


def test_a_numbered_batch_that_comes_again_meanwhile_waits_for_what_becomes_of_the_first(
    tmp_path: Path, may_write: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        await queues.define("q", {"physical_queues": 2})

        def put(number: int) -> asyncio.Task[Enqueued]:
            return asyncio.create_task(queues.enqueue("q", [make_message(number)], producer="p", number=number))

        await put(1)
        may_write.clear()
        first, again = put(2), put(2)
        await asyncio.sleep(0.05)
        assert not first.done()
        assert not again.done()
        may_write.set()
        assert [(await first).duplicates, (await again).duplicates] == [0, 1]

        may_write.clear()
        with monkeypatch.context() as broken:
            broken.setattr(GroupCommit, "_commit", _fail)
            failed = await asyncio.gather(put(3), put(3), return_exceptions=True)
        assert [getattr(each, "code", None) for each in failed] == ["U707", "U707"]
        may_write.set()
        assert [(await put(2)).duplicates, (await put(3)).duplicates, (await put(3)).duplicates] == [1, 0, 1]
        assert (await queues.statistics("q")).messages == 3
        await queues.close()

    asyncio.run(scenario())


def _fail(_commit: GroupCommit, _group: Any) -> None:
    raise OSError("no disk")
