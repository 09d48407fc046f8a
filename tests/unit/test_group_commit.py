"""Group commit: one sync for many, all or nothing, a map that grows, and a disk that is full."""

from __future__ import annotations

import asyncio
import resource
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tidegate.errors import Overloaded, TidegateError, Unavailable
from tidegate.queues.stores.group_commit import WAITING_BYTES_MAX, GroupCommit, Write

MIB = 1024 * 1024


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def put(commit: GroupCommit, key: bytes, value: bytes) -> Write:
    database = commit.open_database("test")
    return lambda transaction: transaction.put(key, value, db=database)


def read(commit: GroupCommit) -> dict[bytes, bytes]:
    database = commit.open_database("test")
    with commit.reading() as transaction:
        return {bytes(key): bytes(value) for key, value in transaction.cursor(db=database)}


def test_writes_that_wait_together_are_one_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        commit = GroupCommit(tmp_path, is_synced=True)
        writes = [put(commit, b"%d" % i, b"v") for i in range(500)]
        before = commit.commits
        await asyncio.gather(*(commit.commit(write) for write in writes))
        assert len(read(commit)) == 500
        assert commit.commits - before <= 10
        await commit.close()

    run(scenario())


def test_a_lazy_write_goes_with_the_next_commit_and_is_kept_at_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        commit = GroupCommit(tmp_path, is_synced=True)
        commit.submit_lazily(put(commit, b"lazy", b"1"))
        await commit.commit(put(commit, b"busy", b"2"))
        assert read(commit) == {b"lazy": b"1", b"busy": b"2"}
        commit.submit_lazily(put(commit, b"last", b"3"))
        await commit.close()
        reopened = GroupCommit(tmp_path, is_synced=True)
        assert read(reopened)[b"last"] == b"3"
        await reopened.close()

    run(scenario())


def test_the_map_grows_by_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        commit = GroupCommit(tmp_path, is_synced=False, map_bytes=MIB)
        for i in range(64):
            await commit.commit(put(commit, b"%d" % i, b"v" * 100_000))
        assert len(read(commit)) == 64
        await commit.close()

    run(scenario())


def test_a_group_that_fails_has_not_happened_and_the_next_one_works(tmp_path: Path) -> None:
    async def scenario() -> None:
        commit = GroupCommit(tmp_path, is_synced=True)

        def fail(transaction: lmdb.Transaction) -> None:
            raise lmdb.DiskError("the disk is on fire")

        await commit.commit(put(commit, b"before", b"1"))
        with pytest.raises(Unavailable, match="on fire"):
            await commit.commit(fail)
        await commit.commit(put(commit, b"after", b"2"))
        assert read(commit) == {b"before": b"1", b"after": b"2"}
        await commit.close()

    run(scenario())


@contextmanager
def files_at_most(size_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond: what a full disk looks like to whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_refuses_and_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        commit = GroupCommit(tmp_path, is_synced=True)
        kept: dict[bytes, bytes] = {}
        failures: list[TidegateError] = []
        with files_at_most(2 * MIB):
            for i in range(40):
                key, value = b"%d" % i, b"v" * 100_000
                try:
                    await commit.commit(put(commit, key, value))
                    kept[key] = value
                except Unavailable as error:
                    failures.append(error)
        assert kept
        assert failures
        assert read(commit) == kept
        await commit.commit(put(commit, b"room again", b"1"))
        await commit.close()
        reopened = GroupCommit(tmp_path, is_synced=True)
        assert read(reopened) == kept | {b"room again": b"1"}
        await reopened.close()

    run(scenario())


def test_what_waits_for_a_slow_disk_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        commit = GroupCommit(tmp_path, is_synced=False)
        is_slow = threading.Event()
        ended: list[TidegateError | None] = []

        def submit() -> None:
            commit.submit(lambda _transaction: is_slow.wait(), ended.append, WAITING_BYTES_MAX // 2 + 1)

        submit()
        while commit._waiting:  # until the writer has begun with it
            await asyncio.sleep(0.001)
        submit()
        with pytest.raises(Overloaded):
            submit()
        is_slow.set()
        await commit.close()
        await asyncio.sleep(0)
        assert ended == [None, None]

    run(scenario())
