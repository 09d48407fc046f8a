"""Group commit: one thread writes for all queues, and one sync of the disk makes the whole group durable.

A sync takes about a millisecond, however much it covers, so no write gets one alone. While the disk is busy with a
transaction, new writes (enqueues, deletes and delivery counts of all queues) wait together for the next one. The busier
the broker, the larger the groups.

A write is a function of the transaction, and may run more than once: if the map is full, it is enlarged and the group
runs again. If a group fails, its halves are tried separately, so that an impossible write, such as one on a damaged
page, fails alone.

LMDB never writes in place, so that even a delete needs new pages. The writer therefore keeps a reserve: blocks of the
disk that belong to the file and that no page uses yet. A write that takes room is refused if it would touch the reserve
and the disk has no more free blocks; all other writes may use the reserve. While the disk is full, the writer checks
every `ROOM_CHECK_S` whether there is room again, on the disk or in pages that deletes have freed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import lmdb

from tidegate.errors import Overloaded, TidegateError
from tidegate.queues.store import disk_full, store_failed
from tidegate.security.private_files import DIRECTORY_MODE, FILE_MODE
from tidegate.storage.lmdb_pages import PageFile

log = logging.getLogger(__name__)

T = TypeVar("T")
Write: TypeAlias = Callable[[lmdb.Transaction], object]

MAP_BYTES: Final = 1024**3
WAITING_BYTES_MAX: Final = 256 * 1024 * 1024
GROUP_WRITES_MAX: Final = 4096
ROOM_CHECK_S: Final = 1.0
# Bytes of pages that a group may take per byte that it writes: pages are half full, and large values take whole pages.
ROOM_FACTOR: Final = 2
# The most commits that are tried to separate the good writes of a failed group from the bad ones.
ATTEMPTS_MAX: Final = 64


class Waiting(NamedTuple):
    """A write that waits for its group. `done` receives its result, if a caller wants it."""

    write: Write
    done: asyncio.Future[Any] | None = None
    size_bytes: int = 0
    takes_room: bool = False


class GroupCommit:
    """One LMDB environment with its writer. With `is_synced` a commit is on the disk, not only in the system's memory.
    While `is_full`, writes that take room are refused."""

    def __init__(self, path: Path, *, is_synced: bool, map_bytes: int = MAP_BYTES, reserve_bytes: int = 0) -> None:
        path.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        self.path = path
        self.commits = 0
        self.is_full = False
        self._reserve_bytes = reserve_bytes
        self._env = lmdb.open(
            str(path),
            map_size=map_bytes,
            max_dbs=16,
            sync=is_synced,
            metasync=is_synced,
            readahead=False,
            mode=FILE_MODE,
        )
        self._loop = asyncio.get_running_loop()
        self._background: set[asyncio.Task[None]] = set()
        self._map_bytes = max(map_bytes, self._env.info()["map_size"])
        # LMDB forbids enlarging the map while a transaction is open in this process.
        self._mapping = threading.Lock()
        self._waiting: list[Waiting] = []
        self._waiting_bytes = 0
        self._is_urgent = False
        self._has_work = threading.Condition()
        self._is_closing = False
        self._page_bytes = self._env.stat()["psize"]
        self._file = os.open(path / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
        self._check_room(0, is_start=True)
        self._thread = threading.Thread(target=self._run, name=f"tidegate-commit-{path.name}", daemon=True)
        self._thread.start()

    def open_database(self, name: str) -> lmdb._Database:
        return self._env.open_db(name.encode())

    def write_now(self, write: Write) -> None:
        """Commits in this thread. It is for the first write to an environment, before other callers use it."""
        self._commit([Waiting(write)])

    def submit(
        self, write: Callable[[lmdb.Transaction], T], size_bytes: int = 0, *, takes_room: bool = False
    ) -> asyncio.Future[T]:
        """Queues a write. The future receives what the write returned when it is committed, or the error."""
        done: asyncio.Future[T] = self._loop.create_future()
        with self._has_work:
            if self._waiting_bytes + size_bytes > WAITING_BYTES_MAX:
                raise Overloaded(
                    "L609",
                    f"{self._waiting_bytes} bytes are waiting for the disk",
                    "try again in a moment, or use a faster disk",
                )
            self._waiting.append(Waiting(write, done, size_bytes, takes_room))
            self._waiting_bytes += size_bytes
            self._is_urgent = True
            self._has_work.notify()
        return done

    async def commit(
        self, write: Callable[[lmdb.Transaction], T], size_bytes: int = 0, *, takes_room: bool = False
    ) -> T:
        """Returns what the write returned, when it is committed, as `until_done` does."""
        return await until_done(self.submit(write, size_bytes, takes_room=takes_room))

    def submit_lazily(self, write: Write) -> None:
        """Queues a write for the next group that a caller waits for; a crash before that loses it."""
        with self._has_work:
            self._waiting.append(Waiting(write))
            if len(self._waiting) >= GROUP_WRITES_MAX:
                self._is_urgent = True
                self._has_work.notify()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that only `close` waits for. If the disk fails, the writer reports it, and the next start or the
        next lease tries again."""

        async def run() -> None:
            with suppress(TidegateError):
                await work

        task = self._loop.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @contextmanager
    def reading(self) -> Iterator[lmdb.Transaction]:
        with self._mapping, self._env.begin(buffers=False) as transaction:
            yield transaction

    @contextmanager
    def viewing(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """Reads as `reading` does, but yields views of the mapped file, which are invalid after the transaction."""
        with self._mapping, self._env.begin(buffers=True) as transaction:
            yield transaction

    async def close(self) -> None:
        """Waits for the work in the background, commits the pending writes, and closes the environment."""
        if self._background:
            await asyncio.wait(self._background)
        with self._has_work:
            self._is_closing = True
            self._has_work.notify()
        await asyncio.to_thread(self._thread.join)
        self._env.close()
        os.close(self._file)

    # The writer's thread.

    def _run(self) -> None:
        while (group := self._next_group()) is not None:
            group_bytes = sum(each.size_bytes for each in group)
            if self.is_full or any(each.takes_room for each in group):
                self._check_room(group_bytes)
            if self.is_full:
                refused = [each for each in group if each.takes_room]
                group = [each for each in group if not each.takes_room]
                self._finish(refused, disk_full(str(self.path)))
            if group:
                self._commit_or_fail(group)

    def _next_group(self) -> list[Waiting] | None:
        """Returns all pending writes; an empty list while the disk is full and none is pending; None at the end."""
        with self._has_work:
            while not self._is_closing and not self._is_urgent:
                if not self._has_work.wait(ROOM_CHECK_S if self.is_full else None):
                    return []
            group, self._waiting = self._waiting, []
            self._waiting_bytes = 0
            self._is_urgent = False
            return group or None

    def _commit_or_fail(self, group: list[Waiting]) -> None:
        """Commits a group, or those parts of it that can be committed, with at most `ATTEMPTS_MAX` commits."""
        parts, attempts = [group], 0
        failed: list[Waiting] = []
        while parts:
            part = parts.pop()
            attempts += 1
            try:
                results = self._commit(part)
            except Exception as failure:  # the callers must be notified, even of a bug in a write
                if attempts == 1:
                    log.exception("a commit of %d writes has failed path=%s", len(part), self.path)
                if len(part) == 1 or attempts >= ATTEMPTS_MAX:
                    failed += part
                    self._finish(part, store_failed(f"{self.path}: {failure}"))
                else:
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
            else:
                self._finish(part, results)
        if failed and len(group) > 1:
            log.error("%d of %d writes have failed path=%s", len(failed), len(group), self.path)

    def _finish(self, group: list[Waiting], outcome: list[object] | TidegateError) -> None:
        self.commits += 1
        self._loop.call_soon_threadsafe(_complete, group, outcome)

    def _commit(self, group: list[Waiting]) -> list[object]:
        """Returns the result of each write."""
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    return [each.write(transaction) for each in group]
            except (lmdb.MapFullError, lmdb.MapResizedError):
                self._enlarge()

    def _check_room(self, group_bytes: int, *, is_start: bool = False) -> None:
        """Ensures that the reserve is left after a group of this many bytes, or sets `is_full`."""
        if not self._reserve_bytes:
            return
        used_bytes = (self._env.info()["last_pgno"] + 1) * self._page_bytes
        # A margin, so that the state does not alternate between full for one small group and free for the next.
        wanted_bytes = self._reserve_bytes + max(self._reserve_bytes // 4, ROOM_FACTOR * group_bytes)
        ahead_bytes = os.fstat(self._file).st_size - used_bytes
        # Always allocate at the start: a copy of the file may have lost the blocks that no page uses.
        has_room = (ahead_bytes >= wanted_bytes and not is_start) or any(
            self._allocate(used_bytes, size_bytes) for size_bytes in (wanted_bytes + self._reserve_bytes, wanted_bytes)
        )
        is_full = not has_room and max(0, ahead_bytes) + self._free_bytes() < wanted_bytes
        if is_full and not self.is_full:
            log.error("the disk is full: enqueues are refused, deletes still work path=%s", self.path)
        if self.is_full and not is_full:
            log.info("there is room on the disk again path=%s", self.path)
        self.is_full = is_full

    def _allocate(self, start: int, size_bytes: int) -> bool:
        """Allocates blocks of the disk for the file. Returns false if there are not enough."""
        try:
            os.posix_fallocate(self._file, start, size_bytes)
        except OSError as error:
            log.debug("no room path=%s bytes=%d error=%s", self.path, size_bytes, error)
            return False
        return True

    def _free_bytes(self) -> int:
        """Returns the bytes in pages that former commits have freed. Only the writer changes them, and this is the
        writer's thread."""
        try:
            with PageFile(self.path / "data.mdb") as file:
                metas, _problems = file.metas()
                newest = max(metas, key=lambda meta: meta.transaction, default=None)
                return file.free_pages(newest) * newest.page_bytes if newest is not None else 0
        except (OSError, ValueError) as error:
            log.warning("free pages cannot be counted path=%s error=%s", self.path, error)
            return 0

    def _enlarge(self) -> None:
        self._map_bytes *= 2
        log.info("enlarging the map path=%s bytes=%d", self.path, self._map_bytes)
        with self._mapping:
            self._env.set_mapsize(self._map_bytes)


async def until_done(done: asyncio.Future[T]) -> T:
    """Returns the result of a write when it is committed, even if the caller was cancelled in the meantime. The state
    in memory must agree with the disk, so the caller first completes the steps that follow the commit."""
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError as error:
            cancelled = error
        except TidegateError:
            break
    if cancelled is not None:
        _cancel_again(cancelled)
    return done.result()


def _complete(group: list[Waiting], outcome: list[object] | TidegateError) -> None:
    for index, each in enumerate(group):
        if each.done is None:
            continue
        if isinstance(outcome, TidegateError):
            each.done.set_exception(outcome)
        else:
            each.done.set_result(outcome[index])


def _cancel_again(cancelled: asyncio.CancelledError) -> None:
    """Postpones a cancellation to the task's next wait. It is counted once, and keeps the message by which its owner
    recognizes it."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    task.cancel(*cancelled.args)
