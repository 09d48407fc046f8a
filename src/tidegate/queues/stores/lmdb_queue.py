"""A logical queue in LMDB: its physical queues, and every step that changes or reads them.

Each step decides from the state of `PhysicalQueue` and waits, if it must, for one commit. The state in memory changes
when the commit has succeeded. What a step promises before its commit (a number, room, a message that is leaving) is
counted separately, and taken back if the commit fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import lmdb

from tidegate.errors import Overloaded, TidegateError
from tidegate.messages import PAGE_BYTES_MAX, Level
from tidegate.queues.dead_letters import from_dead_letter, to_dead_letter
from tidegate.queues.definition import DEAD, Definition, QueueSettings
from tidegate.queues.records import decode_record, unseal
from tidegate.queues.steady_clock import SteadyClock
from tidegate.queues.store import (
    Batches,
    Entry,
    Granted,
    Numbered,
    OnReady,
    Receipt,
    Runs,
    SealedPage,
    StoreCounts,
    queue_full,
    store_failed,
)
from tidegate.queues.stores.cover_table import CoverBudget, CoverTable
from tidegate.queues.stores.deduplication import Deduplication
from tidegate.queues.stores.group_commit import Write, until_done
from tidegate.queues.stores.inspection import PhysicalCount
from tidegate.queues.stores.layout import IDENTITY_KEY, Databases, sequence_of
from tidegate.queues.stores.physical_queue import Mark, PhysicalQueue, Selection
from tidegate.queues.stores.queue_reader import SKIPS_MAX, QueueReader

log = logging.getLogger(__name__)

# By physical queue: the messages to remove, each with whether it was redelivered; and how many messages and bytes a
# removal has freed.
Gone: TypeAlias = dict[int, list[tuple[int, bool]]]
Freed: TypeAlias = dict[int, tuple[int, int]]


class Shared(NamedTuple):
    """What the queues of a store share. `registry` has their definitions, and `find` returns another queue by its name.
    `epoch` identifies this start of the process in receipts; `clock` is monotonic."""

    registry: Databases
    find: Callable[[str], LmdbQueue]
    epoch: str
    clock: Callable[[], float]
    covers: CoverBudget


class LmdbQueue:
    """`reserved_*` counts entries on their way to the disk, less the messages that are being dropped for them."""

    def __init__(
        self,
        definition: Definition,
        number: int,
        databases: Databases,
        shared: Shared,
        counts: Mapping[bytes, PhysicalCount] = MappingProxyType({}),
    ) -> None:
        """`counts` are by the prefix of a physical queue, as `inspection` has found them."""
        self.definition = definition
        self.number = number
        self.databases = databases
        self.physical = [
            PhysicalQueue(number, i, covers=CoverTable(shared.covers))
            for i in range(definition.settings.physical_queues)
        ]
        self._counts = StoreCounts()
        self.on_ready: OnReady | None = None
        self.reserved_messages = 0
        self.reserved_bytes = 0
        self._reader = QueueReader(definition.name, databases)
        self._shared = shared
        self._epoch = shared.epoch
        self._loop = asyncio.get_running_loop()
        # The number of commits of entries that have failed.
        self._failures = 0
        self._deduplication = Deduplication(databases, self.physical, self._counts)
        self._load(shared.clock, counts)

    @property
    def settings(self) -> QueueSettings:
        return self.definition.settings

    @property
    def messages(self) -> int:
        return self.reserved_messages + sum(at.messages for at in self.physical)

    @property
    def size_bytes(self) -> int:
        return self.reserved_bytes + sum(at.size_bytes for at in self.physical)

    async def enqueue(
        self,
        batches: Batches,
        *,
        make_room: bool = False,
        numbered: Numbered | None = None,
        runs: Runs | None = None,
    ) -> int:
        if numbered is not None:
            return await self._enqueue_numbered(batches, numbered)
        now_s, failures = self._clock.now_s(), self._failures
        fresh = self._deduplication.without_duplicates(batches, runs or {}, self.settings, now_s)
        count = sum(len(entries) for entries in fresh.batches.values())
        size_bytes = sum(len(entry.sealed) for entries in fresh.batches.values() for entry in entries)
        try:
            if make_room:
                self._drop_oldest(count, size_bytes)
            self._check_room(count, size_bytes)
            also = self._deduplication.write_covers(fresh, now_s)
            await self._commit_entries(fresh.batches, size_bytes, now_s, fresh.identities, also)
        except TidegateError as error:
            self._deduplication.take_back(fresh)
            if not isinstance(error, Overloaded):
                self._failures += 1
            raise
        self._deduplication.keep(fresh)
        # A duplicate may repeat an entry that was not on the disk yet, and whose commit has failed since.
        if fresh.duplicates and self._failures != failures:
            raise store_failed("the original of a repeated message was not stored")
        self._counts.enqueued += count
        self._counts.duplicates += fresh.duplicates
        return fresh.duplicates

    async def _enqueue_numbered(self, batches: Batches, numbered: Numbered) -> int:
        """Enqueues a numbered batch. It has no identities; its marks are written in the commit of its messages."""
        producer, number = numbered
        before = {physical: self.physical[physical].marks.get(producer) for physical in batches}
        repeated = {physical: mark for physical, mark in before.items() if mark is not None and mark.number >= number}
        fresh = {physical: entries for physical, entries in batches.items() if physical not in repeated}
        count = sum(len(entries) for entries in fresh.values())
        size_bytes = sum(len(entry.sealed) for entries in fresh.values() for entry in entries)
        self._check_room(count, size_bytes)
        now_s, mark = self._clock.now_s(), Mark(number)
        marked = [self.physical[physical] for physical in fresh]
        forgotten = [at.prefix + each for at in marked for each in at.set_mark(producer, mark)]

        def write_marks(transaction: lmdb.Transaction) -> None:
            for at in marked:
                self.databases.write_mark(transaction, at.prefix + producer, number, now_s)
            for key in forgotten:
                self.databases.forget_mark(transaction, key)

        try:
            await self._commit_entries(fresh, size_bytes, now_s, {}, write_marks)
        except TidegateError:
            self._restore_marks(marked, producer, mark)
            raise
        mark.is_durable = True
        # This commit came after that of the original batch, so the original is durable by now, or has failed.
        if not all(each.is_durable for each in repeated.values()):
            raise store_failed("the original of this repeated batch was not stored")
        duplicates = sum(len(batches[physical]) for physical in repeated)
        self._counts.enqueued += count
        self._counts.duplicates += duplicates
        return duplicates

    async def has(self, batches: Batches, runs: Runs | None = None) -> bool:
        return self._deduplication.has(batches, runs or {}, self._clock.now_s() - self.settings.deduplication_s)

    async def lease(self, physical: int, messages_max: int, bytes_max: int, visibility_s: float) -> Granted:
        """Leases messages. The consumer does not wait for the removal of messages that were delivered too often, or are
        too old."""
        at = self.physical[physical]
        now_s = self._loop.time()
        at.leases.expire(now_s)
        deadline_s = now_s + visibility_s
        for _ in range(SKIPS_MAX):
            taken = Selection(at, self.settings, messages_max, bytes_max, deadline_s, time.time())
            try:
                with self.databases.commit.reading() as transaction:
                    taken.take(transaction.cursor(db=self.databases.messages))
                break
            except lmdb.Error as error:
                # The error has ended the transaction. A lease that has found messages returns them; otherwise it tries
                # again after the damage.
                at.cursor = self._reader.step_over(at, at.cursor, at.committed_below, error)
                if taken.has_found:
                    break
        if at.waiting and not taken.has_found and taken.has_seen_all:
            self._reader.count_again(at, now_s)
        at.removing.update(sequence for sequence, _times, _sealed in taken.dead + taken.expired)
        if taken.dead:
            self.databases.commit.start(self._bury(physical, taken.dead))
        if taken.expired:
            self.databases.commit.start(self._remove_expired(physical, taken.expired))
        self._remember_deliveries(at, taken.granted)
        self._wake_at(at, deadline_s)
        return Granted.of(physical, self._epoch, taken.granted, at.waiting)

    async def delete(self, receipts: list[str]) -> int:
        gone: Gone = {}
        for at, receipt in self._valid_receipts(receipts):
            gone.setdefault(at.number, []).append((receipt.sequence, receipt.delivery > 1))
            at.leases.forget(receipt.sequence)
        count = sum(len(sequences) for sequences in gone.values())
        if gone:
            await self._remove(gone)
            self._counts.deleted += count
        return count

    async def extend(self, receipts: list[str], visibility_s: float) -> int:
        deadline_s = self._loop.time() + visibility_s
        count = 0
        for at, receipt in self._valid_receipts(receipts):
            at.leases.extend(receipt.sequence, deadline_s)
            self._wake_at(at, deadline_s)
            count += 1
        return count

    async def release(self, receipts: list[str], delay_s: float) -> int:
        now_s = self._loop.time()

        def release(at: PhysicalQueue, sequence: int) -> None:
            at.leases.release(sequence, now_s, delay_s)
            if delay_s > 0:
                self._wake_at(at, now_s + delay_s)

        return self._put_back(receipts, release)

    async def give_back(self, receipts: list[str]) -> int:

        def give_back(at: PhysicalQueue, sequence: int) -> None:
            at.leases.give_back(sequence)
            self._correct_deliveries(at, sequence)

        return self._put_back(receipts, give_back)

    async def end_leases(self) -> int:
        count = 0
        for at in self.physical:
            count += at.leases.expire_all()
            self._report_ready(at)
        return count

    async def read(
        self, physical: int, start: int, stop: int, messages_max: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> SealedPage:
        return self._reader.read(self.physical[physical], start, stop, messages_max, bytes_max)

    async def delete_below(self, physical: int, sequence: int) -> int:
        at = self.physical[physical]
        below = min(sequence, at.committed_below)
        at.cursor = max(at.cursor, below)
        at.leases.forget_below(below)
        databases = self.databases

        def write(transaction: lmdb.Transaction) -> tuple[int, int]:
            count, size_bytes = databases.remove_below(transaction, at.prefix, at.key(below))
            databases.add_to_counters(transaction, at.prefix, -count, -size_bytes, 0, at.cursor)
            return count, size_bytes

        count, size_bytes = await databases.commit.commit(write)
        at.subtract(count, size_bytes)
        self._counts.deleted += count
        self._report_ready(at)  # a group may have become free
        return count

    async def expire(self, before_s: float, messages_max: int) -> int:
        count = 0
        for at in self.physical:
            walk = self._reader.walk(at, 1, at.committed_below, 2 * messages_max)
            if old := at.take_old(walk, before_s, messages_max):
                await self._remove_expired(at.number, old)
                count += len(old)
        return count

    async def note_read(self, at: float) -> None:
        registry, name = self._shared.registry, self.definition.name
        await registry.commit.commit(lambda transaction: registry.write_read(transaction, name, at))

    async def last_read(self) -> float | None:
        registry = self._shared.registry
        with registry.commit.reading() as transaction:
            return registry.last_read(transaction, self.definition.name)

    async def set_aside(self, physical: int, sequence: int) -> None:
        at = self.physical[physical]
        at.leases.forget(sequence)
        databases, key = self.databases, at.key(sequence)

        def write(transaction: lmdb.Transaction) -> tuple[int, int]:
            value = transaction.get(key, db=databases.messages)
            if value is not None:
                transaction.put(key, value, db=databases.aside)
            count, size_bytes = databases.remove_all(transaction, [(key, True)])
            databases.add_to_counters(transaction, at.prefix, -count, -size_bytes, 0, at.cursor)
            return count, size_bytes

        count, size_bytes = await databases.commit.commit(write)
        if count:
            at.subtract(count, size_bytes)
            self._counts.corrupt += 1
            log.error(
                "a corrupt record was set aside queue=%s physical=%d sequence=%d",
                self.definition.name,
                physical,
                sequence,
            )

    async def redrive(self, messages_max: int) -> int:
        grave = self._shared.find(self.definition.name + DEAD)
        moved = 0
        for at in grave.physical:
            found = list(grave._reader.walk(at, 1, at.committed_below, messages_max - moved))
            chosen = [(sequence, sealed) for sequence, sealed in found if not at.leases.is_taken(sequence)]
            entries = [Entry(from_dead_letter(sealed)) for _sequence, sealed in chosen]
            self._check_room(len(entries), sum(len(entry.sealed) for entry in entries))
            if chosen:
                await grave._move(at.number, [sequence for sequence, _ in chosen], self, entries)
                moved += len(chosen)
        return moved

    async def levels(self) -> list[Level]:
        now_s = self._loop.time()
        levels = []
        for at in self.physical:
            at.leases.expire(now_s)
            head = next(self._reader.walk(at, 1, at.committed_below, 1), None)
            # Not `at.next`: a reader that reads up to `next` must not skip messages that are still on their way to the
            # disk.
            first, oldest_at = at.committed_below, None
            if head is not None:
                first, body = head[0], unseal(head[1])
                oldest_at = decode_record(body).enqueued_at if body is not None else None
            counts = (at.messages, at.size_bytes, at.waiting, at.leases.held)
            levels.append(Level(*counts, oldest_at, first, at.committed_below, len(at.covers)))
        return levels

    def counts(self) -> StoreCounts:
        self._counts.expired = sum(at.leases.expired for at in self.physical)
        self._counts.unreachable = sum(at.unreachable for at in self.physical)
        return self._counts

    def watch(self, on_ready: OnReady) -> None:
        """Reports messages to `on_ready`, at once those that a former process has left."""
        self.on_ready = on_ready
        for at in self.physical:
            self._report_ready(at)

    def listen(self, *, is_on: bool) -> None:
        """Does nothing: this store always reports messages."""

    # Internals.

    def _load(self, clock: Callable[[], float], counts: Mapping[bytes, PhysicalCount]) -> None:
        """Loads what former processes have stored."""
        databases, settings = self.databases, self.settings
        with databases.commit.reading() as transaction:
            newest_s = max(databases.newest_s(transaction, at.prefix) for at in self.physical)
            self._clock = SteadyClock(clock, newest_s)
            since_s = newest_s - settings.deduplication_s
            for at in self.physical:
                counters = databases.read_counters(transaction, at.prefix)
                found = counts.get(at.prefix)
                at.load(counters, databases.read_deliveries(transaction, at.prefix), found)
                if found is not None and not found.is_consistent:
                    log.error(
                        "queue %s physical=%d should have %d messages, %d can be reached: run tidegate queue verify",
                        self.definition.name,
                        at.number,
                        counters.messages,
                        found.reached,
                    )
                at.identities = databases.read_identities(transaction, at.prefix, since_s)
                at.forget_identities(since_s, settings.deduplication_messages_max)
                at.covers.replace(databases.read_covers(transaction, at.prefix))
                at.logged_runs = databases.count_logged(transaction, at.prefix)
                at.filters = databases.read_filters(transaction, at.prefix)
                marks = databases.read_marks(transaction, at.prefix)
                at.marks = {producer: Mark(number, is_durable=True) for producer, number in marks.items()}

    def _restore_marks(self, marked: list[PhysicalQueue], producer: bytes, mark: Mark) -> None:
        """Restores the marks of a batch whose commit has failed to the values on the disk."""
        with self.databases.commit.reading() as transaction:
            for at in marked:
                if at.marks.get(producer) is mark:
                    kept = self.databases.read_mark(transaction, at.prefix + producer)
                    at.marks[producer] = Mark(kept, is_durable=True)

    def _check_room(self, messages: int, size_bytes: int) -> None:
        settings, name, everywhere = self.settings, self.definition.name, range(len(self.physical))
        if self.messages + messages > settings.messages_max:
            self._counts.refused += messages
            raise queue_full(
                name, f"it has {self.messages} of {settings.messages_max} messages", "messages_max", everywhere
            )
        if self.size_bytes + size_bytes > settings.bytes_max:
            self._counts.refused += messages
            raise queue_full(name, f"it has {self.size_bytes} of {settings.bytes_max} bytes", "bytes_max", everywhere)

    def _drop_oldest(self, messages: int, size_bytes: int) -> None:
        """Drops the oldest messages to make room for notifications, in a queue with the policy drop-oldest."""
        settings = self.settings
        surplus = self.messages + messages - settings.messages_max
        surplus_bytes = self.size_bytes + size_bytes - settings.bytes_max
        while surplus > 0 or surplus_bytes > 0:
            at = max(self.physical, key=lambda physical: physical.messages - len(physical.removing))
            head = self._oldest(at, surplus, surplus_bytes)
            if not head:
                return
            at.cursor = max(at.cursor, head[-1][0] + 1)
            for sequence, _size in head:
                at.leases.forget(sequence)
            self._drop(at, head)
            surplus -= len(head)
            surplus_bytes -= sum(size for _sequence, size in head)

    def _oldest(self, at: PhysicalQueue, surplus: int, surplus_bytes: int) -> list[tuple[int, int]]:
        """Returns the oldest unleased messages of a physical queue, as many as are needed for room, with their
        sizes."""
        found: list[tuple[int, int]] = []
        for sequence, sealed in self._reader.walk(at, 1, at.committed_below, at.messages):
            if surplus <= 0 and surplus_bytes <= 0:
                break
            if sequence not in at.removing and not at.leases.is_taken(sequence):
                found.append((sequence, len(sealed)))
                surplus -= 1
                surplus_bytes -= len(sealed)
        return found

    def _drop(self, at: PhysicalQueue, head: list[tuple[int, int]]) -> None:
        """Removes messages without waiting. They count until they are removed, but their room is free at once, for the
        entries of the same commit or the next one."""
        count, size_bytes = len(head), sum(size for _sequence, size in head)

        gone: Gone = {at.number: [(sequence, True) for sequence, _size in head]}

        def on_done(done: asyncio.Future[Freed]) -> None:
            self._end_removal(gone, done)
            self._reserve(count, size_bytes)
            if done.exception() is None:
                self._counts.dropped += done.result()[at.number][0]

        self._reserve(-count, -size_bytes)
        self._submit_removal(gone).add_done_callback(on_done)

    def _reserve(self, messages: int, size_bytes: int) -> None:
        self.reserved_messages += messages
        self.reserved_bytes += size_bytes

    async def _commit_entries(
        self, batches: Batches, size_bytes: int, now_s: float, identities: dict[int, list[bytes]], also: Write | None
    ) -> None:
        """Writes entries, the identities to remember for them, and the additional write `also`."""
        databases = self.databases
        numbered = [
            (self.physical[physical], *self.physical[physical].assign_sequences(entries))
            for physical, entries in batches.items()
            if entries
        ]
        count = sum(len(items) for _at, items, _size in numbered)
        self._reserve(count, size_bytes)
        forget_before_ms = int(1000 * max(0.0, now_s - self.settings.deduplication_s))

        def write(transaction: lmdb.Transaction) -> None:
            cursor = transaction.cursor(db=databases.messages)
            for at, items, size in numbered:
                cursor.putmulti(items)
                databases.add_to_counters(transaction, at.prefix, len(items), size, at.next, at.cursor)
                if at.number in identities:
                    key = IDENTITY_KEY.pack(at.queue, at.number, int(1000 * now_s), sequence_of(items[0][0]))
                    forget_below = IDENTITY_KEY.pack(at.queue, at.number, forget_before_ms, 0)
                    digests = b"".join(identities[at.number])
                    databases.write_identities(transaction, key, digests, at.prefix, forget_below)
            if also is not None:
                also(transaction)

        try:
            await databases.commit.commit(write, size_bytes, takes_room=True)
        finally:
            self._reserve(-count, -size_bytes)
        for at, items, size in numbered:
            at.add(items, size)
            self._report_ready(at)

    async def _remove(self, gone: Gone, also: Write | None = None) -> None:
        """Removes messages that are not leased any more, with the additional write `also`, in one commit."""
        done = self._submit_removal(gone, also)
        try:
            await until_done(done)
        finally:
            self._end_removal(gone, done)

    def _submit_removal(self, gone: Gone, also: Write | None = None) -> asyncio.Future[Freed]:
        """Submits a removal, to be followed by `_end_removal`. Messages that `delete_below` has removed in the meantime
        are not counted twice."""
        databases = self.databases

        def write(transaction: lmdb.Transaction) -> Freed:
            freed = {}
            for number, sequences in gone.items():
                at = self.physical[number]
                entries = [(at.key(sequence), was_redelivered) for sequence, was_redelivered in sequences]
                count, size_bytes = freed[number] = databases.remove_all(transaction, entries)
                databases.add_to_counters(transaction, at.prefix, -count, -size_bytes, 0, at.cursor)
            if also is not None:
                also(transaction)
            return freed

        done = databases.commit.submit(write)
        for number, sequences in gone.items():
            self.physical[number].removing.update(sequence for sequence, _was_redelivered in sequences)
        return done

    def _end_removal(self, gone: Gone, done: asyncio.Future[Freed]) -> None:
        """Stops counting messages whose removal is committed; delivers them again if it has failed."""
        freed = done.result() if done.exception() is None else {}
        for number, sequences in gone.items():
            at = self.physical[number]
            at.end_removal([sequence for sequence, _was_redelivered in sequences], freed.get(number))
            self._report_ready(at)  # a group may have become free

    async def _bury(self, physical: int, dead: list[tuple[int, int, bytes]], *, is_expired: bool = False) -> None:
        """Moves messages that were delivered too often, or are too old, to the dead-letter queue, with their history.
        They are (sequence, deliveries, sealed record)."""
        now_s, name = time.time(), self.definition.name
        entries = [
            Entry(to_dead_letter(sealed, name, sequence, times, now_s, is_expired=is_expired))
            for sequence, times, sealed in dead
        ]
        self._counts.dead_lettered += len(dead)
        grave = self._shared.find(self.definition.dead)
        await self._move(physical, [sequence for sequence, _times, _sealed in dead], grave, entries)

    async def _remove_expired(self, physical: int, old: list[tuple[int, int, bytes]]) -> None:
        """Deletes messages that are too old, or moves them to the dead-letter queue, according to the settings."""
        if self.settings.after_lifetime == "dead-letter":
            await self._bury(physical, old, is_expired=True)
        else:
            await self._remove({physical: [(sequence, True) for sequence, _deliveries, _sealed in old]})
        self._counts.expired_messages += len(old)

    async def _move(self, physical: int, sequences: list[int], target: LmdbQueue, entries: list[Entry]) -> None:
        """Moves messages from this queue to another, where they are new, in one commit."""
        databases, to = self.databases, target.physical[physical]
        items, size_bytes = to.assign_sequences(entries)
        for sequence in sequences:
            self.physical[physical].leases.forget(sequence)

        def put(transaction: lmdb.Transaction) -> None:
            transaction.cursor(db=databases.messages).putmulti(items)
            databases.add_to_counters(transaction, to.prefix, len(items), size_bytes, to.next, to.cursor)

        await self._remove({physical: [(sequence, True) for sequence in sequences]}, put)
        to.add(items, size_bytes)
        target._report_ready(to)

    def _valid_receipts(self, receipts: Iterable[str]) -> Iterator[tuple[PhysicalQueue, Receipt]]:
        """Yields the valid receipts with their physical queues; each is checked when its turn comes. All are parsed
        first, so that a malformed receipt does not interrupt a step halfway."""
        now_s = self._loop.time()
        expired: PhysicalQueue | None = None
        for receipt in [Receipt.parse(text) for text in receipts]:
            if receipt.epoch == self._epoch and 0 <= receipt.physical < len(self.physical):
                at = self.physical[receipt.physical]
                if at is not expired:
                    at.leases.expire(now_s)
                    expired = at
                if at.leases.is_held(receipt.sequence, receipt.delivery):
                    yield at, receipt

    def _put_back(self, receipts: list[str], put: Callable[[PhysicalQueue, int], None]) -> int:
        touched: dict[int, PhysicalQueue] = {}
        count = 0
        for at, receipt in self._valid_receipts(receipts):
            put(at, receipt.sequence)
            touched[at.number] = at
            count += 1
        for at in touched.values():
            self._report_ready(at)
        return count

    def _remember_deliveries(self, at: PhysicalQueue, granted: list[tuple[int, int, bytes]]) -> None:
        """Records with the next commit how far messages were delivered, and the delivery counts of those that were
        redelivered."""
        if not granted:
            return
        again = [(at.key(sequence), delivery) for sequence, delivery, _sealed in granted if delivery > 1]
        self._counts.redelivered += len(again)
        databases, cursor = self.databases, at.cursor

        def write(transaction: lmdb.Transaction) -> None:
            databases.add_to_counters(transaction, at.prefix, 0, 0, 0, cursor)
            for key, delivery in again:
                databases.write_deliveries(transaction, key, delivery)

        databases.commit.submit_lazily(write)

    def _correct_deliveries(self, at: PhysicalQueue, sequence: int) -> None:
        """Records that a delivery was undone. Without it, a restart would count the delivery, and it may have been the
        last but one."""
        databases, key, deliveries = self.databases, at.key(sequence), at.leases.deliveries[sequence]
        if deliveries:
            databases.commit.submit_lazily(lambda transaction: databases.write_deliveries(transaction, key, deliveries))

    def _wake_at(self, at: PhysicalQueue, deadline_s: float) -> None:
        """Schedules a check for when the first lease may end, so that waiting consumers are notified."""
        if deadline_s < at.wakes_at_s:
            at.wakes_at_s = deadline_s
            self._loop.call_at(deadline_s, self._on_deadline, at, deadline_s)

    def _on_deadline(self, at: PhysicalQueue, deadline_s: float) -> None:
        if deadline_s != at.wakes_at_s:  # an earlier check was scheduled since, and reschedules this one
            return
        at.wakes_at_s = float("inf")
        if at.leases.expire(self._loop.time()):
            self._report_ready(at)
        next_s = at.leases.next_deadline_s
        if next_s < float("inf"):
            self._wake_at(at, next_s)

    def _report_ready(self, at: PhysicalQueue) -> None:
        if self.on_ready is not None and at.waiting:
            self.on_ready(at.number, at.waiting)
