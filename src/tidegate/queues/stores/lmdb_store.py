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
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import lmdb
import msgspec

from tidegate.errors import ConfigError, TidegateError
from tidegate.queues.dead_letters import from_dead_letter, to_dead_letter
from tidegate.queues.definition import DEAD, Definition, Durability, QueueSettings
from tidegate.queues.records import decode_record, unseal
from tidegate.queues.store import (
    Entry,
    Grant,
    Granted,
    Level,
    OnReady,
    Receipt,
    StoreCounts,
    no_such_queue,
    queue_full,
    store_failed,
)
from tidegate.queues.stores.group_commit import MAP_BYTES, GroupCommit
from tidegate.queues.stores.layout import (
    IDENTITY_BYTES,
    IDENTITY_KEY,
    PREFIX,
    Databases,
    delete_here,
    key_of,
    sequence_of,
    value_of,
)
from tidegate.queues.stores.physical_queue import PhysicalQueue, Selection

CLEARED_AT_ONCE: Final = 10_000
_MEMORY_DIRECTORY: Final = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it


class _Stored(msgspec.Struct):
    """A definition as it is kept; `number` stands for the name in keys."""

    number: int
    settings: QueueSettings


@dataclass
class _Queue:
    """A logical queue. `reserved_*` counts what is on its way to the disk."""

    definition: Definition
    number: int
    databases: Databases
    physical: list[PhysicalQueue]
    counts: StoreCounts = field(default_factory=StoreCounts)
    on_ready: OnReady | None = None
    reserved_messages: int = 0
    reserved_bytes: int = 0

    @property
    def settings(self) -> QueueSettings:
        return self.definition.settings

    @property
    def messages(self) -> int:
        return self.reserved_messages + sum(physical.messages for physical in self.physical)

    @property
    def bytes(self) -> int:
        return self.reserved_bytes + sum(physical.size_bytes for physical in self.physical)


class LmdbStore:
    """Guarantees: what an enqueue has returned for survives as its durability says, and is leased until it is deleted.
    Only for one event loop; only one process may have the directory, which a lock ensures."""

    is_shared = False

    def __init__(self, directory: Path, *, map_bytes: int = MAP_BYTES) -> None:
        self._directory = directory
        self._map_bytes = map_bytes
        self._queues: dict[str, _Queue] = {}
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
            self._queues[name] = self._load(Definition(name, stored.settings), stored.number)
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
        if definition.settings.durability is None:
            settings = msgspec.structs.replace(definition.settings, durability="fsync")
            definition = Definition(definition.name, settings)
        both = [definition, definition.dead_letters()]
        numbers = {each.name: self._number_of(each.name) for each in both}
        registry = self._environment("fsync")

        def write(transaction: lmdb.Transaction) -> None:
            for each in both:
                stored = msgspec.msgpack.encode(_Stored(numbers[each.name], each.settings))
                transaction.put(each.name.encode(), stored, db=registry.queues)

        await registry.commit.commit(write)
        for each in both:
            known = self._queues.get(each.name)
            if known is None:
                self._queues[each.name] = self._load(each, numbers[each.name])
            else:
                known.definition = each
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

    # Messages.

    async def enqueue(self, queue: str, batches: dict[int, list[Entry]], *, make_room: bool = False) -> int:
        state = self._queue(queue)
        now_s = time.time()
        fresh, repeated = self._without_duplicates(state, batches, now_s)
        count = sum(len(entries) for entries in fresh.values())
        size_bytes = sum(len(entry.sealed) for entries in fresh.values() for entry in entries)
        try:
            if make_room:
                self._drop_oldest(state, count, size_bytes)
            self._check_room(state, count, size_bytes)
            await self._commit_entries(state, fresh, size_bytes, now_s)
        except TidegateError:
            for physical, entries in fresh.items():
                for entry in entries:
                    state.physical[physical].identities.pop(entry.identity, None)
            raise
        # A duplicate of a message whose own commit has failed meanwhile is no duplicate.
        if any(identity not in state.physical[physical].identities for physical, identity in repeated):
            raise store_failed("the message that this one repeats was not kept")
        state.counts.enqueued += count
        state.counts.duplicates += len(repeated)
        return len(repeated)

    async def lease(self, queue: str, physical: int, messages_max: int, bytes_max: int, visibility_s: float) -> Granted:
        state = self._queue(queue)
        at = state.physical[physical]
        now_s = self._loop.time()
        at.leases.expire(now_s)
        deadline_s = now_s + visibility_s
        databases = state.databases
        with databases.commit.reading() as transaction:
            cursor = transaction.cursor(db=databases.messages)
            taken = Selection(at, state.settings, messages_max, bytes_max, deadline_s)
            taken.take(cursor)
        if taken.dead:
            self._bury(state, at, taken.dead)
        self._remember_deliveries(state, at, taken.granted)
        self._wake_at(state, at, deadline_s)
        epoch = self._epoch
        grants = [
            Grant(sequence, delivery, f"{physical}.{sequence}.{delivery}.{epoch}", sealed)
            for sequence, delivery, sealed in taken.granted
        ]
        # Nothing although some wait: what waits cannot be given now, and whoever asks again at once would ask for ever.
        return Granted(grants, at.waiting if grants else 0)

    async def delete(self, queue: str, receipts: list[str]) -> int:
        state = self._queue(queue)
        gone: dict[int, list[tuple[int, bool]]] = {}
        for at, receipt in self._good(state, receipts):
            gone.setdefault(at.number, []).append((receipt.sequence, receipt.delivery > 1))
            at.leases.forget(receipt.sequence)
        count = sum(len(sequences) for sequences in gone.values())
        if gone:
            await self._remove(state, gone)
            state.counts.deleted += count
        return count

    async def extend(self, queue: str, receipts: list[str], visibility_s: float) -> int:
        state = self._queue(queue)
        deadline_s = self._loop.time() + visibility_s
        count = 0
        for at, receipt in self._good(state, receipts):
            at.leases.extend(receipt.sequence, deadline_s)
            self._wake_at(state, at, deadline_s)
            count += 1
        return count

    async def release(self, queue: str, receipts: list[str], delay_s: float) -> int:
        state = self._queue(queue)
        now_s = self._loop.time()

        def release(at: PhysicalQueue, sequence: int) -> None:
            at.leases.release(sequence, now_s, delay_s)
            if delay_s > 0:
                self._wake_at(state, at, now_s + delay_s)

        return self._put_back(state, receipts, release)

    async def give_back(self, queue: str, receipts: list[str]) -> int:
        state = self._queue(queue)

        def give_back(at: PhysicalQueue, sequence: int) -> None:
            at.leases.give_back(sequence)
            self._correct_deliveries(state, at, sequence)

        return self._put_back(state, receipts, give_back)

    async def read(
        self, queue: str, physical: int, start: int, stop: int, messages_max: int
    ) -> list[tuple[int, bytes]]:
        state = self._queue(queue)
        at = state.physical[physical]
        return list(self._walk(state, at, start, min(stop, at.committed_below), messages_max))

    async def delete_below(self, queue: str, physical: int, sequence: int) -> int:
        state = self._queue(queue)
        at = state.physical[physical]
        below = min(sequence, at.committed_below)
        at.cursor = max(at.cursor, below)
        at.leases.forget_below(below)
        databases = state.databases
        removed = [0, 0]

        def write(transaction: lmdb.Transaction) -> None:
            removed[:] = [0, 0]
            transaction_cursor = transaction.cursor(db=databases.messages)
            is_there = transaction_cursor.set_range(at.prefix)
            while is_there and key_of(transaction_cursor) < at.key(below):
                removed[0] += 1
                removed[1] += len(value_of(transaction_cursor))
                transaction.delete(key_of(transaction_cursor), db=databases.deliveries)
                is_there = delete_here(transaction_cursor)
            databases.add_to_counters(transaction, at.prefix, -removed[0], -removed[1], 0, at.cursor)

        await databases.commit.commit(write)
        at.messages -= removed[0]
        at.size_bytes -= removed[1]
        state.counts.deleted += removed[0]
        self._tell(state, at)  # a group may have become free
        return removed[0]

    async def set_aside(self, queue: str, physical: int, sequence: int) -> None:
        state = self._queue(queue)
        at = state.physical[physical]
        at.leases.forget(sequence)
        databases, key = state.databases, at.key(sequence)
        freed = [0]

        def write(transaction: lmdb.Transaction) -> None:
            value = transaction.get(key, db=databases.messages)
            freed[0] = 0
            if value is not None:
                transaction.put(key, value, db=databases.aside)
                freed[0] = databases.remove(transaction, key, was_redelivered=True)
                databases.add_to_counters(transaction, at.prefix, -1, -freed[0], 0, at.cursor)

        await databases.commit.commit(write)
        if freed[0]:
            at.messages -= 1
            at.size_bytes -= freed[0]
            state.counts.corrupt += 1

    async def redrive(self, queue: str, messages_max: int) -> int:
        alive, dead = self._queue(queue), self._queue(queue + DEAD)
        moved = 0
        for source, target in zip(dead.physical, alive.physical, strict=True):
            found = list(self._walk(dead, source, 1, source.committed_below, messages_max - moved))
            chosen = [(sequence, sealed) for sequence, sealed in found if not source.leases.is_taken(sequence)]
            entries = [Entry(from_dead_letter(sealed)) for _sequence, sealed in chosen]
            self._check_room(alive, len(entries), sum(len(entry.sealed) for entry in entries))
            if chosen:
                await self._move(dead, source, [sequence for sequence, _ in chosen], alive, target, entries)
                moved += len(chosen)
        return moved

    # Looking.

    async def levels(self, queue: str) -> list[Level]:
        state = self._queue(queue)
        now_s = self._loop.time()
        levels = []
        for at in state.physical:
            at.leases.expire(now_s)
            head = next(self._walk(state, at, 1, at.committed_below, 1), None)
            # Not `at.next`: whoever reads up to `next` must not pass over what is on its way to the disk.
            first, oldest_at = at.committed_below, None
            if head is not None:
                first, body = head[0], unseal(head[1])
                oldest_at = decode_record(body).enqueued_at if body is not None else None
            levels.append(
                Level(at.messages, at.size_bytes, at.waiting, at.leases.held, oldest_at, first, at.committed_below)
            )
        return levels

    def counts(self, queue: str) -> StoreCounts:
        state = self._queue(queue)
        state.counts.expired = sum(at.leases.expired for at in state.physical)
        return state.counts

    def watch(self, queue: str, on_ready: OnReady) -> None:
        """Tells at once of what a former process has left."""
        state = self._queue(queue)
        state.on_ready = on_ready
        for at in state.physical:
            self._tell(state, at)

    def listen(self, queue: str, *, is_on: bool) -> None:
        """This store always tells."""

    # Inside.

    def _queue(self, name: str) -> _Queue:
        queue = self._queues.get(name)
        if queue is None:
            raise no_such_queue(name)
        return queue

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

    def _load(self, definition: Definition, number: int) -> _Queue:
        self._next_number = max(self._next_number, number + 1)
        databases = self._environment(definition.settings.durability or "fsync")
        physical = [PhysicalQueue(number, i) for i in range(definition.settings.physical_queues)]
        since_s = time.time() - definition.settings.deduplication_s
        with databases.commit.reading() as transaction:
            for at in physical:
                counters = databases.read_counters(transaction, at.prefix)
                at.load(counters, databases.read_deliveries(transaction, at.prefix))
                at.identities = _read_identities(transaction, databases, at.prefix, since_s)
                at.forget_identities(since_s, definition.settings.deduplication_messages_max)
        return _Queue(definition, number, databases, physical)

    def _without_duplicates(
        self, state: _Queue, batches: dict[int, list[Entry]], now_s: float
    ) -> tuple[dict[int, list[Entry]], list[tuple[int, bytes]]]:
        """What is new, remembered as such; and what was there before, by physical queue and identity."""
        fresh: dict[int, list[Entry]] = {}
        repeated: list[tuple[int, bytes]] = []
        settings = state.settings
        for physical, entries in batches.items():
            identities = state.physical[physical].identities
            state.physical[physical].forget_identities(
                now_s - settings.deduplication_s, settings.deduplication_messages_max
            )
            new = []
            for entry in entries:
                if entry.identity and settings.deduplication_s:
                    if entry.identity in identities:
                        repeated.append((physical, entry.identity))
                        continue
                    identities[entry.identity] = now_s
                new.append(entry)
            fresh[physical] = new
        return fresh, repeated

    def _check_room(self, state: _Queue, messages: int, size_bytes: int) -> None:
        settings, name = state.settings, state.definition.name
        if state.messages + messages > settings.messages_max:
            state.counts.refused += messages
            raise queue_full(name, f"it has {state.messages} of {settings.messages_max} messages", "messages_max")
        if state.bytes + size_bytes > settings.bytes_max:
            state.counts.refused += messages
            raise queue_full(name, f"it has {state.bytes} of {settings.bytes_max} bytes", "bytes_max")

    def _drop_oldest(self, state: _Queue, messages: int, size_bytes: int) -> None:
        """Makes room for a bound notification whose queue was told to forget the oldest."""
        settings = state.settings
        surplus = state.messages + messages - settings.messages_max
        surplus_bytes = state.bytes + size_bytes - settings.bytes_max
        while surplus > 0 or surplus_bytes > 0:
            at = max(state.physical, key=lambda physical: physical.messages)
            head = self._oldest(state, at, surplus, surplus_bytes)
            if not head:
                return
            at.cursor = max(at.cursor, head[-1][0] + 1)
            for sequence, _size in head:
                at.leases.forget(sequence)
            self._drop(state, at, head)
            surplus -= len(head)
            surplus_bytes -= sum(size for _sequence, size in head)

    def _oldest(self, state: _Queue, at: PhysicalQueue, surplus: int, surplus_bytes: int) -> list[tuple[int, int]]:
        """The oldest messages of a physical queue that nobody leases, as many as make room, with their sizes."""
        found: list[tuple[int, int]] = []
        for sequence, sealed in self._walk(state, at, 1, at.committed_below, at.messages + len(at.dropping)):
            if surplus <= 0 and surplus_bytes <= 0:
                break
            if sequence not in at.dropping and not at.leases.is_taken(sequence):
                found.append((sequence, len(sealed)))
                surplus -= 1
                surplus_bytes -= len(sealed)
        return found

    def _drop(self, state: _Queue, at: PhysicalQueue, head: list[tuple[int, int]]) -> None:
        databases = state.databases
        sequences, size_bytes = {sequence for sequence, _size in head}, sum(size for _sequence, size in head)

        def write(transaction: lmdb.Transaction) -> None:
            for sequence in sequences:
                databases.remove(transaction, at.key(sequence), was_redelivered=True)
            databases.add_to_counters(transaction, at.prefix, -len(sequences), -size_bytes, 0, 0)

        def done(error: TidegateError | None) -> None:
            if error is None:
                at.dropping -= sequences

        databases.commit.submit(write, done)
        at.dropping |= sequences
        at.messages -= len(sequences)
        at.size_bytes -= size_bytes
        state.counts.dropped += len(sequences)

    async def _commit_entries(
        self, state: _Queue, batches: dict[int, list[Entry]], size_bytes: int, now_s: float
    ) -> None:
        databases = state.databases
        numbered = [self._number(state.physical[physical], entries) for physical, entries in batches.items()]
        count = sum(len(items) for _at, items, _identities, _size in numbered)
        state.reserved_messages += count
        state.reserved_bytes += size_bytes
        forget_before_ms = int(1000 * max(0.0, now_s - state.settings.deduplication_s))

        def write(transaction: lmdb.Transaction) -> None:
            cursor = transaction.cursor(db=databases.messages)
            for at, items, identities, size in numbered:
                if not items:
                    continue
                cursor.putmulti(items)
                databases.add_to_counters(transaction, at.prefix, len(items), size, at.next, at.cursor)
                if identities:
                    key = IDENTITY_KEY.pack(at.queue, at.number, int(1000 * now_s), sequence_of(items[0][0]))
                    forget_below = IDENTITY_KEY.pack(at.queue, at.number, forget_before_ms, 0)
                    _write_identities(transaction, databases, key, identities, at.prefix, forget_below)

        try:
            await self._commit(databases, write, size_bytes)
        finally:
            state.reserved_messages -= count
            state.reserved_bytes -= size_bytes
        for at, items, _identities, size in numbered:
            if items:
                at.messages += len(items)
                at.size_bytes += size
                at.committed_below = max(at.committed_below, sequence_of(items[-1][0]) + 1)
                self._tell(state, at)

    def _number(
        self, at: PhysicalQueue, entries: list[Entry]
    ) -> tuple[PhysicalQueue, list[tuple[bytes, bytes]], bytes, int]:
        """Gives entries their numbers: keys and values, what identifies them, and their size."""
        first = at.next
        at.next += len(entries)
        items = [(at.key(sequence), entry.sealed) for sequence, entry in enumerate(entries, first)]
        return at, items, b"".join(entry.identity for entry in entries), sum(len(entry.sealed) for entry in entries)

    async def _commit(
        self, databases: Databases, write: Callable[[lmdb.Transaction], None], size_bytes: int = 0
    ) -> None:
        """Waits for the commit even when the caller is cancelled, who then still does what follows from it: what
        is known here must agree with the disk."""
        future: asyncio.Future[None] = self._loop.create_future()

        def done(error: TidegateError | None) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        databases.commit.submit(write, done, size_bytes)
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

    async def _remove(self, state: _Queue, gone: dict[int, list[tuple[int, bool]]]) -> None:
        """Takes messages that nobody leases any more off the disk; when that fails, they are delivered again."""
        databases = state.databases
        freed: dict[int, int] = {}

        def write(transaction: lmdb.Transaction) -> None:
            for number, sequences in gone.items():
                at = state.physical[number]
                entries = [(at.key(sequence), was_redelivered) for sequence, was_redelivered in sequences]
                freed[number] = databases.remove_all(transaction, entries)
                databases.add_to_counters(transaction, at.prefix, -len(sequences), -freed[number], 0, at.cursor)

        for number, sequences in gone.items():
            state.physical[number].leaving += len(sequences)
        try:
            await self._commit(databases, write)
        except TidegateError:
            for number, sequences in gone.items():
                state.physical[number].leaving -= len(sequences)
                for sequence, _was_redelivered in sequences:
                    state.physical[number].leases.defer(sequence)
            raise
        for number, sequences in gone.items():
            at = state.physical[number]
            at.leaving -= len(sequences)
            at.messages -= len(sequences)
            at.size_bytes -= freed[number]
            self._tell(state, at)  # a group may have become free

    def _bury(self, state: _Queue, at: PhysicalQueue, dead: list[tuple[int, int, bytes]]) -> None:
        """Moves messages to the dead-letter queue without making the consumer wait for it."""
        grave = self._queue(state.definition.dead)
        now_s, name = time.time(), state.definition.name
        entries = [Entry(to_dead_letter(sealed, name, sequence, times, now_s)) for sequence, times, sealed in dead]
        sequences = [sequence for sequence, _times, _sealed in dead]
        state.counts.dead_lettered += len(dead)
        self._in_background(self._move(state, at, sequences, grave, grave.physical[at.number], entries))

    async def _move(
        self,
        source: _Queue,
        at: PhysicalQueue,
        sequences: list[int],
        target: _Queue,
        to: PhysicalQueue,
        entries: list[Entry],
    ) -> None:
        """Messages leave one queue and are new in another, in one commit."""
        databases = source.databases
        _, items, _, size_bytes = self._number(to, entries)
        freed = [0]
        for sequence in sequences:
            at.leases.forget(sequence)

        def write(transaction: lmdb.Transaction) -> None:
            freed[0] = sum(databases.remove(transaction, at.key(each), was_redelivered=True) for each in sequences)
            databases.add_to_counters(transaction, at.prefix, -len(sequences), -freed[0], 0, at.cursor)
            transaction.cursor(db=databases.messages).putmulti(items)
            databases.add_to_counters(transaction, to.prefix, len(items), size_bytes, to.next, to.cursor)

        at.leaving += len(sequences)
        try:
            await self._commit(databases, write)
        except TidegateError:
            at.leaving -= len(sequences)
            for sequence in sequences:
                at.leases.defer(sequence)
            raise
        at.leaving -= len(sequences)
        at.messages -= len(sequences)
        at.size_bytes -= freed[0]
        to.messages += len(items)
        to.size_bytes += size_bytes
        to.committed_below = max(to.committed_below, sequence_of(items[-1][0]) + 1)
        self._tell(target, to)

    def _good(self, state: _Queue, receipts: Iterable[str]) -> Iterator[tuple[PhysicalQueue, Receipt]]:
        """The receipts that are not stale, with their queues; each is looked at when its turn comes. All are parsed
        first: one that is malformed must not end a step that is half done."""
        now_s = self._loop.time()
        expired: PhysicalQueue | None = None
        for receipt in [Receipt.parse(text) for text in receipts]:
            if receipt.epoch == self._epoch and 0 <= receipt.physical < len(state.physical):
                at = state.physical[receipt.physical]
                if at is not expired:
                    at.leases.expire(now_s)
                    expired = at
                if at.leases.is_held(receipt.sequence, receipt.delivery):
                    yield at, receipt

    def _put_back(self, state: _Queue, receipts: list[str], put: Callable[[PhysicalQueue, int], None]) -> int:
        touched: dict[int, PhysicalQueue] = {}
        count = 0
        for at, receipt in self._good(state, receipts):
            put(at, receipt.sequence)
            touched[at.number] = at
            count += 1
        for at in touched.values():
            self._tell(state, at)
        return count

    def _remember_deliveries(self, state: _Queue, at: PhysicalQueue, granted: list[tuple[int, int, bytes]]) -> None:
        """With the next commit: how far messages were given out, and how often those that were given out before."""
        if not granted:
            return
        again = [(at.key(sequence), delivery) for sequence, delivery, _sealed in granted if delivery > 1]
        state.counts.redelivered += len(again)
        databases, cursor = state.databases, at.cursor

        def write(transaction: lmdb.Transaction) -> None:
            databases.add_to_counters(transaction, at.prefix, 0, 0, 0, cursor)
            for key, delivery in again:
                databases.write_deliveries(transaction, key, delivery)

        databases.commit.submit_lazily(write)

    def _correct_deliveries(self, state: _Queue, at: PhysicalQueue, sequence: int) -> None:
        """A delivery that has not happened must not count after a restart either: it may have been the last but one."""
        databases, key, deliveries = state.databases, at.key(sequence), at.leases.deliveries[sequence]
        if deliveries:
            databases.commit.submit_lazily(lambda transaction: databases.write_deliveries(transaction, key, deliveries))

    def _wake_at(self, state: _Queue, at: PhysicalQueue, deadline_s: float) -> None:
        """Looks after leases when the first of them may end: whoever waits for messages is told."""
        if deadline_s < at.wakes_at_s:
            at.wakes_at_s = deadline_s
            self._loop.call_at(deadline_s, self._on_deadline, state, at, deadline_s)

    def _on_deadline(self, state: _Queue, at: PhysicalQueue, deadline_s: float) -> None:
        if deadline_s != at.wakes_at_s:  # an earlier one has come in between, and looks after this one too
            return
        at.wakes_at_s = float("inf")
        if at.leases.expire(self._loop.time()):
            self._tell(state, at)
        next_s = at.leases.next_deadline_s
        if next_s < float("inf"):
            self._wake_at(state, at, next_s)

    def _tell(self, state: _Queue, at: PhysicalQueue) -> None:
        if state.on_ready is not None and at.waiting:
            state.on_ready(at.number, at.waiting)

    def _walk(
        self, state: _Queue, at: PhysicalQueue, start: int, stop: int, messages_max: int
    ) -> Iterator[tuple[int, bytes]]:
        databases = state.databases
        with databases.commit.reading() as transaction:
            cursor = transaction.cursor(db=databases.messages)
            is_there = cursor.set_range(at.key(max(0, start)))
            end = at.key(max(0, stop))
            for _ in range(messages_max):
                if not is_there or key_of(cursor) >= end:
                    return
                yield sequence_of(key_of(cursor)), value_of(cursor)
                is_there = cursor.next()

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


def _cancel_again(cancelled: asyncio.CancelledError) -> None:
    """Puts off a cancellation to the next wait; counted once, and with the message by which its owner knows it."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    task.cancel(*cancelled.args)


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


def _write_identities(
    transaction: lmdb.Transaction, databases: Databases, key: bytes, identities: bytes, prefix: bytes, below: bytes
) -> None:
    """Keeps what a commit brings, and drops what is too old to matter."""
    cursor = transaction.cursor(db=databases.identities)
    is_there = cursor.set_range(prefix)
    while is_there and key_of(cursor) < below:
        is_there = delete_here(cursor)
    cursor.put(key, identities)


def _read_identities(
    transaction: lmdb.Transaction, databases: Databases, prefix: bytes, since_s: float
) -> dict[bytes, float]:
    found: dict[bytes, float] = {}
    cursor = transaction.cursor(db=databases.identities)
    is_there = cursor.set_range(prefix)
    while is_there and key_of(cursor).startswith(prefix):
        came_s = IDENTITY_KEY.unpack(key_of(cursor))[2] / 1000
        digests = value_of(cursor)
        if came_s >= since_s:
            for start in range(0, len(digests), IDENTITY_BYTES):
                found[digests[start : start + IDENTITY_BYTES]] = came_s
        is_there = cursor.next()
    return found
