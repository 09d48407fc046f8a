"""The embedded store: physical queues in LMDB, owned by one broker process.

All decisions are made in the event loop, from the state of `PhysicalQueue`. The disk is written by group commit, and
read directly from the mapped file. Leases are in memory: after a crash every message that was not deleted is delivered
again, and counted as redelivered.

There is one environment for each durability: `fsync` and `os` in the data directory, and `memory` in the system's
memory file system, for as long as the process runs. They are separate because a power cut may corrupt an environment
without syncs, which must not affect the others. Definitions are always synced.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Final

import lmdb
import msgspec

from tidegate.errors import ConfigError, TidegateError
from tidegate.queues.definition import DEAD, Definition, Durability
from tidegate.queues.store import disk_full, no_such_queue
from tidegate.queues.stores import store_identity
from tidegate.queues.stores.cover_table import COVERS_BYTES_MAX, CoverBudget
from tidegate.queues.stores.group_commit import MAP_BYTES, GroupCommit
from tidegate.queues.stores.inspection import PhysicalCount, inspect, unmounted
from tidegate.queues.stores.layout import PREFIX, Databases, StoredDefinition, pack_definition, unpack_definition
from tidegate.queues.stores.lmdb_queue import LmdbQueue, Shared
from tidegate.security.private_files import FILE_MODE, private_directory
from tidegate.storage.lmdb_pages import PageFile

log = logging.getLogger(__name__)

CLEARED_AT_ONCE: Final = 10_000
ON_DISK: Final[tuple[Durability, ...]] = ("fsync", "os")
# Disk space reserved for deletes while a disk is full (`group_commit`).
RESERVE_BYTES: Final = 8 * 1024 * 1024
MEMORY_RESERVE_BYTES: Final = 1024 * 1024
_MEMORY_DIRECTORY: Final = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it


class LmdbStore:
    """Guarantees: a message survives as its durability promises once its enqueue has returned, and stays available
    until it is deleted. For one event loop only. A lock ensures that only one process uses the directory."""

    is_shared = False

    def __init__(
        self,
        directory: Path,
        *,
        map_bytes: int = MAP_BYTES,
        is_required: bool = False,
        covers_bytes_max: int = COVERS_BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `is_required` a directory without a store is refused, since it may be an unmounted volume."""
        self._directory = directory
        self._is_required = is_required
        self._clock = clock
        self._covers = CoverBudget(covers_bytes_max)
        self._counts: dict[Durability, dict[bytes, PhysicalCount]] = {}
        self._identities: dict[str, str] = {}
        self._map_bytes = map_bytes
        self._queues: dict[str, LmdbQueue] = {}
        self._databases: dict[Durability, Databases] = {}
        self._memory: tempfile.TemporaryDirectory[str] | None = None
        self._lock: IO[str] | None = None
        self._next_number = 1
        self._epoch = secrets.token_hex(4)

    @property
    def cover_bytes(self) -> int:
        return self._covers.bytes

    # Definitions.

    async def open(self) -> list[Definition]:
        self._lock = lock_directory(self._directory)
        try:
            return await self._open()
        except TidegateError:
            await self.close()
            raise

    async def _open(self) -> list[Definition]:
        try:
            self._inspect()
            registry = self._environment("fsync")
            with registry.commit.reading() as transaction:
                kept = {
                    bytes(name).decode(): unpack_definition(bytes(name), bytes(value))
                    for name, value in transaction.cursor(db=registry.queues)
                }
            await self._seal(registry, kept)
        except (lmdb.Error, OSError) as error:
            raise ConfigError(
                "C415",
                f"the queues in {self._directory} cannot be opened: {error}",
                "restore the directory, or choose another with --data",
            ) from error
        for name, stored in kept.items():
            self._use(Definition(name, stored.settings, stored.id), stored.number)
        self._counts.clear()
        self._clear_orphans()
        return [queue.definition for queue in self._queues.values()]

    async def close(self) -> None:
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
                name, stored = each.name.encode(), StoredDefinition(numbers[each.name], each.settings, each.id)
                transaction.put(name, pack_definition(name, stored), db=registry.queues)

        await registry.commit.commit(write, takes_room=True)
        for each in both:
            self._use(each, numbers[each.name])
        return definition

    async def drop(self, name: str) -> None:
        dropped = [self.queue(name), self.queue(name + DEAD)]
        registry = self._environment("fsync")

        def write(transaction: lmdb.Transaction) -> None:
            for queue in dropped:
                transaction.delete(queue.definition.name.encode(), db=registry.queues)
                transaction.delete(queue.definition.name.encode(), db=registry.reads)

        await registry.commit.commit(write)
        for queue in dropped:
            self._queues.pop(queue.definition.name, None)
            for physical in queue.physical:
                physical.covers.replace({})
                queue.databases.commit.start(self._clear(queue.databases, physical.prefix))

    def watch_definitions(self, changed: Callable[[str, Definition | None], Awaitable[None]]) -> None:
        """Does nothing: no other process uses this store."""

    def queue(self, name: str) -> LmdbQueue:
        queue = self._queues.get(name)
        if queue is None:
            raise no_such_queue(name)
        return queue

    def trouble(self) -> TidegateError | None:
        for databases in self._databases.values():
            if databases.commit.is_full:
                return disk_full(str(databases.commit.path))
        return None

    # Internals.

    def _use(self, definition: Definition, number: int) -> None:
        self._next_number = max(self._next_number, number + 1)
        known = self._queues.get(definition.name)
        if known is not None:
            known.definition = definition
        else:
            durability = definition.settings.durability or "fsync"
            databases = self._environment(durability)
            counts = self._counts.get(durability, {})
            shared = Shared(self._environment("fsync"), self.queue, self._epoch, self._clock, self._covers)
            self._queues[definition.name] = LmdbQueue(definition, number, databases, shared, counts)

    def _environment(self, durability: Durability) -> Databases:
        """Returns the databases for a durability; opens them when they are first needed."""
        databases = self._databases.get(durability)
        if databases is None:
            if durability == "memory":
                parent = _MEMORY_DIRECTORY if _MEMORY_DIRECTORY.is_dir() else None
                self._memory = tempfile.TemporaryDirectory(prefix="tidegate-", dir=parent)
                path = Path(self._memory.name)
            else:
                path = environment_path(self._directory, durability)
            commit = GroupCommit(
                path,
                is_synced=durability == "fsync",
                map_bytes=self._map_bytes,
                reserve_bytes=MEMORY_RESERVE_BYTES if durability == "memory" else RESERVE_BYTES,
            )
            databases = self._databases[durability] = Databases(commit)
            if durability != "memory":
                self._identify(durability, databases)
        return databases

    def _inspect(self) -> None:
        """Raises before LMDB opens a file that it must not open. Keeps the counts of reachable messages."""
        self._identities = store_identity.read_identities(self._directory)
        if self._is_required and not store_identity.has_data(environment_path(self._directory, "fsync")):
            raise unmounted(self._directory)
        for durability in ON_DISK:
            path = environment_path(self._directory, durability)
            store_identity.check_present(self._directory, durability, path, self._identities)
            if not store_identity.has_data(path):
                continue
            with PageFile(path / store_identity.DATA) as file:
                found = inspect(file)
            found.raise_if_damaged(self._directory)
            store_identity.check_same(self._directory, durability, path, self._identities, found.identity)
            self._counts[durability] = found.counts

    def _identify(self, durability: Durability, databases: Databases) -> None:
        """Gives an environment without an identity a new one, and records it in the directory."""
        identity = databases.identity()
        if identity is None:
            try:
                identity = databases.identify(store_identity.make_identity())
            except lmdb.Error as error:
                log.warning(
                    "the identity of the store cannot be written yet path=%s error=%s", databases.commit.path, error
                )
                return
            log.info("the store has a new identity path=%s id=%s", databases.commit.path, identity)
        if self._identities.get(durability) != identity:
            self._identities[durability] = identity
            store_identity.write_identities(self._directory, self._identities)

    async def _seal(self, registry: Databases, kept: dict[str, StoredDefinition]) -> None:
        """Rewrites definitions of former versions with checksums."""
        packed = {name.encode(): pack_definition(name.encode(), stored) for name, stored in kept.items()}

        def write(transaction: lmdb.Transaction) -> None:
            for name, value in packed.items():
                transaction.put(name, value, db=registry.queues)

        with registry.commit.reading() as transaction:
            are_sealed = all(
                len(value) == len(packed[bytes(name)]) for name, value in transaction.cursor(db=registry.queues)
            )
        if not are_sealed:
            with contextlib.suppress(TidegateError):  # a full disk: the next start tries again
                await registry.commit.commit(write, takes_room=True)

    def _number_of(self, name: str) -> int:
        known = self._queues.get(name)
        if known is not None:
            return known.number
        self._next_number += 1
        return self._next_number - 1

    def _clear_orphans(self) -> None:
        """Removes the rest of dropped queues whose removal the end of the broker has interrupted."""
        known = {queue.number for queue in self._queues.values()}
        for durability in ON_DISK:
            if not environment_path(self._directory, durability).is_dir():
                continue
            databases = self._environment(durability)
            with databases.commit.reading() as transaction:
                prefixes = [bytes(key) for key in transaction.cursor(db=databases.counters).iternext(values=False)]
            for prefix in prefixes:
                # A new queue must not get a number under which entries of a dropped queue remain.
                self._next_number = max(self._next_number, PREFIX.unpack(prefix)[0] + 1)
                if PREFIX.unpack(prefix)[0] not in known:
                    databases.commit.start(self._clear(databases, prefix))

    async def _clear(self, databases: Databases, prefix: bytes) -> None:
        is_done = False
        while not is_done:
            is_done = await databases.commit.commit(
                lambda transaction: databases.clear(transaction, prefix, CLEARED_AT_ONCE)
            )


def environment_path(directory: Path, durability: Durability) -> Path:
    return directory / "queues" / durability


def lock_directory(directory: Path) -> IO[str]:
    """Locks the directory for the life of the process: two brokers on one directory would deliver everything twice."""
    try:
        private_directory(directory)
        file = (directory / "lock").open("w")
        os.fchmod(file.fileno(), FILE_MODE)
    except OSError as error:
        raise ConfigError(
            "C414", f"data directory {str(directory)!r} cannot be used: {error}", "choose a writable one with --data"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(
            "C414", f"data directory {str(directory)!r} is in use by another broker", "choose another with --data"
        ) from error
    with contextlib.suppress(OSError):  # only information for people: a full disk must not prevent the start
        os.write(file.fileno(), f"{os.getpid()}\n".encode())
    return file
