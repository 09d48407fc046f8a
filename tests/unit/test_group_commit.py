"""Group commit: one sync for many requests, all or nothing, a growing map, and a full disk."""

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


def delete(commit: GroupCommit, key: bytes) -> Write:
    database = commit.open_database("test")
    return lambda transaction: transaction.delete(key, db=database)


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


def test_a_commit_returns_what_its_write_returned_in_the_run_that_was_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        commit = GroupCommit(tmp_path, is_synced=False, map_bytes=MIB)
        large, small = put(commit, b"large", b"v" * 3 * MIB), put(commit, b"small", b"1")
        runs = 0

        def write(transaction: lmdb.Transaction) -> int:
            nonlocal runs
            runs += 1
            large(transaction)
            return runs

        assert list(await asyncio.gather(commit.commit(write), commit.commit(small))) == [runs, True]
        assert runs > 1
        await commit.close()

    run(scenario())


def test_a_write_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        commit = GroupCommit(tmp_path, is_synced=True)
        may_go = threading.Event()

        def wait(transaction: lmdb.Transaction) -> None:
            may_go.wait()

        def fail(transaction: lmdb.Transaction) -> None:
            raise lmdb.CorruptedError("a damaged page")

        writes = [put(commit, b"%d" % i, b"v") for i in range(100)]
        writes[37] = fail
        first = asyncio.create_task(commit.commit(wait))
        others = [asyncio.create_task(commit.commit(write)) for write in writes]
        await asyncio.sleep(0)
        may_go.set()
        await first
        outcomes = await asyncio.gather(*others, return_exceptions=True)
        assert [i for i, outcome in enumerate(outcomes) if isinstance(outcome, TidegateError)] == [37]
        assert len(read(commit)) == 99
        await commit.close()

    run(scenario())


def test_on_a_full_disk_only_writes_that_take_room_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        commit = GroupCommit(tmp_path, is_synced=True, reserve_bytes=MIB)
        value = b"v" * 50_000
        with files_at_most((tmp_path / "data.mdb").stat().st_size):
            kept, refused = 0, None
            while refused is None:
                try:
                    await commit.commit(put(commit, b"%d" % kept, value), len(value), takes_room=True)
                    kept += 1
                except Unavailable as error:
                    refused = error
            assert kept
            assert refused.code == "U707"
            assert "full" in refused.message
            assert commit.is_full
            for i in range(kept):  # each needs new pages, and later ones may use freed pages
                await commit.commit(delete(commit, b"%d" % i))
            await commit.commit(put(commit, b"again", value), len(value), takes_room=True)
            assert not commit.is_full
        await commit.close()

    run(scenario())


@contextmanager
def files_at_most(size_bytes: int) -> Iterator[None]:
    """Limits the size of all files of this process, which a writer sees as a full disk."""
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
        submitted: list[asyncio.Future[bool]] = []

        def submit() -> None:
            submitted.append(commit.submit(lambda _transaction: is_slow.wait(), WAITING_BYTES_MAX // 2 + 1))

        submit()
        while commit._waiting:  # until the writer has started on it
            await asyncio.sleep(0.001)
        submit()
        with pytest.raises(Overloaded):
            submit()
        is_slow.set()
        await commit.close()
        await asyncio.sleep(0)
        assert [done.result() for done in submitted] == [True, True]

    run(scenario())
