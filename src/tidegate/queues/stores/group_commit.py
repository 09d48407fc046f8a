"""Group commit: one thread writes for everyone, and one sync of the disk makes all of it durable.

A sync costs about a millisecond whatever it covers, so nobody gets one alone: while the disk is busy with a
transaction, what comes meanwhile (enqueues, deletes and delivery counts of all queues) waits together for the next.
The busier the broker, the larger the groups.

A write is a function of the transaction, and may run twice: when the map is full it is enlarged and the group done
again. When a group fails, all its writes fail and none of them has happened.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import lmdb

from tidegate.errors import Overloaded, TidegateError
from tidegate.queues.store import store_failed

log = logging.getLogger(__name__)

Write: TypeAlias = Callable[[lmdb.Transaction], object]
Done: TypeAlias = Callable[[TidegateError | None], None]

MAP_BYTES: Final = 1024**3
WAITING_BYTES_MAX: Final = 256 * 1024 * 1024
GROUP_WRITES_MAX: Final = 4096


class GroupCommit:
    """One LMDB environment with its writer. `is_synced`: a commit is on the disk, not only in the system's memory."""

    def __init__(self, path: Path, *, is_synced: bool, map_bytes: int = MAP_BYTES) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.commits = 0
        self._env = lmdb.open(
            str(path), map_size=map_bytes, max_dbs=16, sync=is_synced, metasync=is_synced, readahead=False
        )
        self._loop = asyncio.get_running_loop()
        self._map_bytes = max(map_bytes, self._env.info()["map_size"])
        # A transaction must not be open in this process while the map is enlarged.
        self._mapping = threading.Lock()
        self._waiting: list[tuple[Write, Done]] = []
        self._waiting_bytes = 0
        self._is_urgent = False
        self._has_work = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"tidegate-commit-{path.name}", daemon=True)
        self._thread.start()

    def open_database(self, name: str) -> lmdb._Database:
        return self._env.open_db(name.encode())

    def submit(self, write: Write, done: Done, size_bytes: int = 0) -> None:
        """`done` is called in the event loop when the write is committed, or has failed."""
        with self._has_work:
            if self._waiting_bytes + size_bytes > WAITING_BYTES_MAX:
                raise Overloaded(
                    "L609",
                    f"{self._waiting_bytes} bytes wait for the disk",
                    "come back in a moment, or use a faster disk",
                )
            self._waiting.append((write, done))
            self._waiting_bytes += size_bytes
            self._is_urgent = True
            self._has_work.notify()

    async def commit(self, write: Write, size_bytes: int = 0) -> None:
        """Returns when the write is committed, even to a caller who was cancelled meanwhile: what is known in memory
        must agree with the disk, so the caller does what follows from the commit first."""
        future: asyncio.Future[None] = self._loop.create_future()

        def done(error: TidegateError | None) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.submit(write, done, size_bytes)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError as error:
                cancelled = error
            except TidegateError:
                break
        if cancelled is not None:
            _cancel_again(cancelled)
        future.result()

    def submit_lazily(self, write: Write) -> None:
        """It goes with the next group that somebody waits for; a crash before that loses it."""
        with self._has_work:
            self._waiting.append((write, _ignore))
            if len(self._waiting) >= GROUP_WRITES_MAX:
                self._is_urgent = True
                self._has_work.notify()

    @contextmanager
    def reading(self) -> Iterator[lmdb.Transaction]:
        with self._mapping, self._env.begin(buffers=False) as transaction:
            yield transaction

    @contextmanager
    def viewing(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """As `reading`, but it gives views of the mapped file, which end with it."""
        with self._mapping, self._env.begin(buffers=True) as transaction:
            yield transaction

    async def close(self) -> None:
        """Commits what waits."""
        with self._has_work:
            self._is_closing = True
            self._has_work.notify()
        await asyncio.to_thread(self._thread.join)
        self._env.close()

    # The writer's thread.

    def _run(self) -> None:
        while group := self._next_group():
            try:
                self._commit(group)
                error = None
            except Exception as failure:  # whoever waits must hear of it, a mistake of ours included
                log.exception("a commit has failed path=%s", self.path)
                error = store_failed(str(failure))
            self.commits += 1
            self._loop.call_soon_threadsafe(_tell, [done for _write, done in group], error)

    def _next_group(self) -> list[tuple[Write, Done]]:
        """Everything that waits; nothing when the end has come."""
        with self._has_work:
            while not self._is_closing and not self._is_urgent:
                self._has_work.wait()
            group, self._waiting = self._waiting, []
            self._waiting_bytes = 0
            self._is_urgent = False
            return group

    def _commit(self, group: list[tuple[Write, Done]]) -> None:
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    for write, _done in group:
                        write(transaction)
                return
            except (lmdb.MapFullError, lmdb.MapResizedError):
                self._enlarge()

    def _enlarge(self) -> None:
        self._map_bytes *= 2
        log.info("enlarging the map path=%s bytes=%d", self.path, self._map_bytes)
        with self._mapping:
            self._env.set_mapsize(self._map_bytes)


def _ignore(_error: TidegateError | None) -> None:
    """Nobody waits for a lazy write."""


def _tell(waiting: list[Done], error: TidegateError | None) -> None:
    for done in waiting:
        done(error)


def _cancel_again(cancelled: asyncio.CancelledError) -> None:
    """Puts off a cancellation to the next wait; counted once, and with the message by which its owner knows it."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    task.cancel(*cancelled.args)
