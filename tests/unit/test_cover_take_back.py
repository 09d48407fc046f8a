"""A failed commit leaves nothing behind: its messages are not duplicates when they are sent again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tidegate.errors import Unavailable
from tidegate.messages import NewMessage
from tidegate.queues import LogicalQueues
from tidegate.queues.feed import Feed, FeedPart
from tidegate.queues.stores.group_commit import GroupCommit
from tidegate.queues.stores.lmdb_store import LmdbStore


def messages(device: str, first: int, last: int) -> list[NewMessage]:
    return [NewMessage(msgspec.Raw(b"\x80"), "", device, number) for number in range(first, last + 1)]


def test_what_a_failed_commit_brought_is_stored_when_it_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_commit: GroupCommit, _group: object) -> None:
        raise OSError("the disk is gone")

    async def feed_and_put(queues: LogicalQueues, last: int) -> None:
        await queues.feed("q", Feed([FeedPart(messages("p", 1, last), 1, "*")]))
        await queues.enqueue("q", messages("d", 1, last))

    async def scenario() -> None:
        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        await queues.define("q", {"filter": "*", "physical_queues": 2})
        await feed_and_put(queues, 100)
        with monkeypatch.context() as patch:
            patch.setattr(GroupCommit, "_commit", fail)
            with pytest.raises(Unavailable, match="U707"):
                await queues.feed("q", Feed([FeedPart(messages("p", 1, 200), 1, "*")]))
            with pytest.raises(Unavailable, match="U707"):
                await queues.enqueue("q", messages("d", 50, 200))
        await feed_and_put(queues, 200)
        assert (await queues.statistics("q")).messages == 400
        await queues.close()
        queues = LogicalQueues(LmdbStore(tmp_path))
        await queues.open()
        await feed_and_put(queues, 200)
        assert (await queues.statistics("q")).messages == 400
        await queues.close()

    asyncio.run(scenario())
