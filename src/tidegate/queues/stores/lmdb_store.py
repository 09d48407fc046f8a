"""The embedded store: physical queues in LMDB, owned by one broker process.

Everything that is decided is decided in the event loop, from what `PhysicalQueue` knows; the disk is written by group
commit, and read directly from the mapped file. Leases live in memory: after a crash everything that was not deleted is
delivered again, and counted as such.

There is one environment for each durability: `fsync` and `os` in the data directory, `memory` where the system keeps
files in memory, for as long as the process runs. They are apart because an environment without syncs may be spoilt by
a power cut, and must not take the others with it. Definitions are always synced.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import IO, Any, Final

import lmdb
import msgspec

from tidegate.errors import ConfigError, TidegateError
from tidegate.messages import PAGE_BYTES_MAX, Level
from tidegate.queues.definition import DEAD, Definition, Durability, QueueSettings
from tidegate.queues.store import Entry, Granted, Numbered, OnReady, SealedPage, StoreCounts, no_such_queue
from tidegate.queues.stores.group_commit import MAP_BYTES, GroupCommit
from tidegate.queues.stores.layout import PREFIX, Databases
from tidegate.queues.stores.lmdb_queue import LmdbQueue

CLEARED_AT_ONCE: Final = 10_000
_MEMORY_DIRECTORY: Final = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it


class _Stored(msgspec.Struct):
    """A definition as it is kept; `number` stands for the name in keys."""

    number: int
    settings: QueueSettings
    id: str


class LmdbStore:
    """Guarantees: what an enqueue has returned for survives as its durability says, and is leased until it is deleted.
    Only for one event loop; only one process may have the directory, which a lock ensures."""

    is_shared = False

    def __init__(self, directory: Path, *, map_bytes: int = MAP_BYTES) -> None:
        self._directory = directory
        self._map_bytes = map_bytes
        self._queues: dict[str, LmdbQueue] = {}
        self._databases: dict[Durability, Databases] = {}
        self._memory: tempfile.TemporaryDirectory[str] | None = None
        self._lock: IO[str] | None = None
        self._next_number = 1
        self._epoch = secrets.token_hex(4)
        self._background: set[asyncio.Task[None]] = set()

    # Definitions.

    async def open(self) -> list[Definition]:
        self._loop = asyncio.get_running_loop()
        self._lock = _lock(self._directory)
        try:
            registry = self._environment("fsync")
            with registry.commit.reading() as transaction:
                kept = {
                    bytes(name).decode(): msgspec.msgpack.decode(value, type=_Stored)
                    for name, value in transaction.cursor(db=registry.queues)
                }
        except (lmdb.Error, OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                "C415",
                f"the queues in {self._directory} cannot be opened: {error}",
                "restore it, or give another --data",
            ) from error
        for name, stored in kept.items():
            self._use(Definition(name, stored.settings, stored.id), stored.number)
        self._clear_orphans()
        return [queue.definition for queue in self._queues.values()]

    async def close(self) -> None:
        if self._background:
            await asyncio.wait(self._background)
        for databases in self._databases.values():
            await databases.commit.close()
        if self._memory is not None:
            self._memory.cleanup()
        if self._lock is not None:
            self._lock.close()

    async def define(self, definition: Definition) -> Definition:
        known = self._queues.get(definition.name)
        if known is not None:
            definition = msgspec.structs.replace(definition, id=known.definition.id)
        if definition.settings.durability is None:
            settings = msgspec.structs.replace(definition.settings, durability="fsync")
            definition = Definition(definition.name, settings, definition.id)
        both = [definition, definition.dead_letters()]
        numbers = {each.name: self._number_of(each.name) for each in both}
        registry = self._environment("fsync")

        def write(transaction: lmdb.Transaction) -> None:
            for each in both:
                stored = msgspec.msgpack.encode(_Stored(numbers[each.name], each.settings, each.id))
                transaction.put(each.name.encode(), stored, db=registry.queues)

        await registry.commit.commit(write)
        for each in both:
            self._use(each, numbers[each.name])
        return definition

    async def drop(self, name: str) -> None:
        dropped = [self._queue(name), self._queue(name + DEAD)]
        registry = self._environment("fsync")

        def write(transaction: lmdb.Transaction) -> None:
            for queue in dropped:
                transaction.delete(queue.definition.name.encode(), db=registry.queues)

        await registry.commit.commit(write)
        for queue in dropped:
            self._queues.pop(queue.definition.name, None)
            for physical in queue.physical:
                self._clear_in_background(queue.databases, physical.prefix)

    def watch_definitions(self, changed: Callable[[str, Definition | None], Awaitable[None]]) -> None:
        """No other process has this store."""

    # Messages: each step is the queue's own.

    async def enqueue(
        self,
        queue: str,
        batches: dict[int, list[Entry]],
        *,
        make_room: bool = False,
        numbered: Numbered | None = None,
    ) -> int:
        if numbered is not None:
            return await self._queue(queue).enqueue_numbered(batches, numbered)
        return await self._queue(queue).enqueue(batches, make_room=make_room)

    async def has(self, queue: str, batches: dict[int, list[Entry]]) -> bool:
        return self._queue(queue).has(batches)

    async def lease(self, queue: str, physical: int, messages_max: int, bytes_max: int, visibility_s: float) -> Granted:
        leasing = self._queue(queue)
        granted, dead = leasing.lease(physical, messages_max, bytes_max, visibility_s)
        if dead:  # the consumer does not wait for that
            self._in_background(leasing.bury(physical, dead, self._queue(leasing.definition.dead)))
        return granted

    async def delete(self, queue: str, receipts: list[str]) -> int:
        return await self._queue(queue).delete(receipts)

    async def extend(self, queue: str, receipts: list[str], visibility_s: float) -> int:
        return self._queue(queue).extend(receipts, visibility_s)

    async def release(self, queue: str, receipts: list[str], delay_s: float) -> int:
        return self._queue(queue).release(receipts, delay_s)

    async def give_back(self, queue: str, receipts: list[str]) -> int:
        return self._queue(queue).give_back(receipts)

    async def end_leases(self, queue: str) -> int:
        return self._queue(queue).end_leases()

    async def read(
        self, queue: str, physical: int, start: int, stop: int, messages_max: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> SealedPage:
        return self._queue(queue).read(physical, start, stop, messages_max, bytes_max)

    async def delete_below(self, queue: str, physical: int, sequence: int) -> int:
        return await self._queue(queue).delete_below(physical, sequence)

    async def set_aside(self, queue: str, physical: int, sequence: int) -> None:
        await self._queue(queue).set_aside(physical, sequence)

    async def redrive(self, queue: str, messages_max: int) -> int:
        return await self._queue(queue + DEAD).redrive(messages_max, self._queue(queue))

    # Looking.

    async def levels(self, queue: str) -> list[Level]:
        return self._queue(queue).levels()

    def counts(self, queue: str) -> StoreCounts:
        return self._queue(queue).count()

    def watch(self, queue: str, on_ready: OnReady) -> None:
        self._queue(queue).watch(on_ready)

    def listen(self, queue: str, *, is_on: bool) -> None:
        """This store always tells."""

    # Inside.

    def _queue(self, name: str) -> LmdbQueue:
        queue = self._queues.get(name)
        if queue is None:
            raise no_such_queue(name)
        return queue

    def _use(self, definition: Definition, number: int) -> None:
        self._next_number = max(self._next_number, number + 1)
        known = self._queues.get(definition.name)
        if known is not None:
            known.definition = definition
        else:
            databases = self._environment(definition.settings.durability or "fsync")
            self._queues[definition.name] = LmdbQueue(definition, number, databases, self._epoch)

    def _environment(self, durability: Durability) -> Databases:
        """The databases for a durability, opened when they are first needed."""
        databases = self._databases.get(durability)
        if databases is None:
            if durability == "memory":
                parent = _MEMORY_DIRECTORY if _MEMORY_DIRECTORY.is_dir() else None
                self._memory = tempfile.TemporaryDirectory(prefix="tidegate-", dir=parent)
                path = Path(self._memory.name)
            else:
                path = self._directory / "queues" / durability
            commit = GroupCommit(path, is_synced=durability == "fsync", map_bytes=self._map_bytes)
            databases = self._databases[durability] = Databases(commit)
        return databases

    def _number_of(self, name: str) -> int:
        known = self._queues.get(name)
        if known is not None:
            return known.number
        self._next_number += 1
        return self._next_number - 1

    def _clear_orphans(self) -> None:
        """What a dropped queue has left when the broker ended before all of it was gone."""
        known = {queue.number for queue in self._queues.values()}
        for durability in ("fsync", "os"):
            if not (self._directory / "queues" / durability).is_dir():
                continue
            databases = self._environment(durability)
            with databases.commit.reading() as transaction:
                prefixes = [bytes(key) for key in transaction.cursor(db=databases.counters).iternext(values=False)]
            for prefix in prefixes:
                self._next_number = max(self._next_number, PREFIX.unpack(prefix)[0] + 1)
                if PREFIX.unpack(prefix)[0] not in known:
                    self._clear_in_background(databases, prefix)

    def _clear_in_background(self, databases: Databases, prefix: bytes) -> None:
        self._in_background(self._clear(databases, prefix))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Nobody waits for it but `close`. When the disk fails, the writer has said so, and the next start or the next
        lease tries again."""

        async def run() -> None:
            with contextlib.suppress(TidegateError):
                await work

        task = self._loop.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _clear(self, databases: Databases, prefix: bytes) -> None:
        is_done = [False]

        def write(transaction: lmdb.Transaction) -> None:
            is_done[0] = databases.clear(transaction, prefix, CLEARED_AT_ONCE)

        while not is_done[0]:
            await databases.commit.commit(write)


def _lock(directory: Path) -> IO[str]:
    """Held while the process lives: two brokers on one directory would deliver everything twice."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("w")
    except OSError as error:
        raise ConfigError(
            "C414", f"data directory {str(directory)!r} cannot be used: {error}", "give a writable one with --data"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(
            "C414", f"data directory {str(directory)!r} is used by another broker", "give this one its own with --data"
        ) from error
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
