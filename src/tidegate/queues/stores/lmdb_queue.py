"""A logical queue in LMDB: its physical queues, and every step that changes or looks at them.

Each step decides from what `PhysicalQueue` knows, and waits, if it must, for one commit. What is known in memory
changes when the commit has succeeded; what a step has promised to somebody before that (a number, room, a message that
is leaving) is counted apart, and taken back when it fails.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import lmdb

from tidegate.errors import TidegateError
from tidegate.messages import Level
from tidegate.queues.dead_letters import from_dead_letter, to_dead_letter
from tidegate.queues.definition import Definition, QueueSettings
from tidegate.queues.records import decode_record, unseal
from tidegate.queues.store import (
    Entry,
    Grant,
    Granted,
    Numbered,
    OnReady,
    Receipt,
    SealedPage,
    StoreCounts,
    queue_full,
    store_failed,
)
from tidegate.queues.stores.group_commit import Write
from tidegate.queues.stores.layout import IDENTITY_KEY, KEY, Databases, key_of, sequence_of, value_of
from tidegate.queues.stores.physical_queue import Mark, PhysicalQueue, Selection

# Messages that a range read takes at once from the store, before it looks whether they are enough.
READ_STEP: Final = 256


class LmdbQueue:
    """`epoch` names this start of the process in receipts; `reserved_*` counts what is on its way to the disk."""

    def __init__(self, definition: Definition, number: int, databases: Databases, epoch: str) -> None:
        self.definition = definition
        self.number = number
        self.databases = databases
        self.physical = [PhysicalQueue(number, i) for i in range(definition.settings.physical_queues)]
        self.counts = StoreCounts()
        self.on_ready: OnReady | None = None
        self.reserved_messages = 0
        self.reserved_bytes = 0
        self._epoch = epoch
        self._loop = asyncio.get_running_loop()
        self._load()

    @property
    def settings(self) -> QueueSettings:
        return self.definition.settings

    @property
    def messages(self) -> int:
        return self.reserved_messages + sum(at.messages for at in self.physical)

    @property
    def size_bytes(self) -> int:
        return self.reserved_bytes + sum(at.size_bytes for at in self.physical)

    async def enqueue(self, batches: dict[int, list[Entry]], *, make_room: bool = False) -> int:
        now_s = time.time()
        fresh, repeated = self._without_duplicates(batches, now_s)
        count = sum(len(entries) for entries in fresh.values())
        size_bytes = sum(len(entry.sealed) for entries in fresh.values() for entry in entries)
        try:
            if make_room:
                self._drop_oldest(count, size_bytes)
            self._check_room(count, size_bytes)
            await self._commit_entries(fresh, size_bytes, now_s)
        except TidegateError:
            for physical, entries in fresh.items():
                for entry in entries:
                    self.physical[physical].identities.pop(entry.identity, None)
            raise
        # A duplicate of a message whose own commit has failed meanwhile is no duplicate.
        if any(identity not in self.physical[physical].identities for physical, identity in repeated):
            raise store_failed("the message that this one repeats was not kept")
        self.counts.enqueued += count
        self.counts.duplicates += len(repeated)
        return len(repeated)

    async def enqueue_numbered(self, batches: dict[int, list[Entry]], numbered: Numbered) -> int:
        """A numbered batch has no identities; its marks are written in the commit of its messages."""
        producer, number = numbered
        before = {physical: self.physical[physical].marks.get(producer) for physical in batches}
        repeated = {physical: mark for physical, mark in before.items() if mark is not None and mark.number >= number}
        fresh = {physical: entries for physical, entries in batches.items() if physical not in repeated}
        count = sum(len(entries) for entries in fresh.values())
        size_bytes = sum(len(entry.sealed) for entries in fresh.values() for entry in entries)
        self._check_room(count, size_bytes)
        now_s, mark = time.time(), Mark(number)
        marked = [self.physical[physical] for physical in fresh]
        forgotten = [at.prefix + each for at in marked for each in at.set_mark(producer, mark)]

        def write_marks(transaction: lmdb.Transaction) -> None:
            for at in marked:
                self.databases.write_mark(transaction, at.prefix + producer, number, now_s)
            for key in forgotten:
                self.databases.forget_mark(transaction, key)

        try:
            await self._commit_entries(fresh, size_bytes, now_s, write_marks)
        except TidegateError:
            self._take_back(marked, producer, mark)
            raise
        mark.is_durable = True
        # What it repeats was written before this, or has failed.
        if not all(each.is_durable for each in repeated.values()):
            raise store_failed("the batch that this one repeats was not kept")
        duplicates = sum(len(batches[physical]) for physical in repeated)
        self.counts.enqueued += count
        self.counts.duplicates += duplicates
        return duplicates

    def has(self, batches: dict[int, list[Entry]]) -> bool:
        since_s = time.time() - self.settings.deduplication_s
        return all(
            self.physical[physical].identities.get(entry.identity, 0.0) > since_s
            for physical, entries in batches.items()
            for entry in entries
        )

    def lease(
        self, physical: int, messages_max: int, bytes_max: int, visibility_s: float
    ) -> tuple[Granted, list[tuple[int, int, bytes]]]:
        """What is granted, and what was delivered too often: (sequence, deliveries, sealed record), for `bury`."""
        at = self.physical[physical]
        now_s = self._loop.time()
        at.leases.expire(now_s)
        deadline_s = now_s + visibility_s
        databases = self.databases
        with databases.commit.reading() as transaction:
            cursor = transaction.cursor(db=databases.messages)
            taken = Selection(at, self.settings, messages_max, bytes_max, deadline_s)
            taken.take(cursor)
        self._remember_deliveries(at, taken.granted)
        self._wake_at(at, deadline_s)
        grants = [
            Grant(sequence, delivery, f"{physical}.{sequence}.{delivery}.{self._epoch}", sealed)
            for sequence, delivery, sealed in taken.granted
        ]
        # Nothing although some wait: what waits cannot be given now, and whoever asks again at once would ask for ever.
        return Granted(grants, at.waiting if grants else 0), taken.dead

    async def delete(self, receipts: list[str]) -> int:
        gone: dict[int, list[tuple[int, bool]]] = {}
        for at, receipt in self._good(receipts):
            gone.setdefault(at.number, []).append((receipt.sequence, receipt.delivery > 1))
            at.leases.forget(receipt.sequence)
        count = sum(len(sequences) for sequences in gone.values())
        if gone:
            await self._remove(gone)
            self.counts.deleted += count
        return count

    def extend(self, receipts: list[str], visibility_s: float) -> int:
        deadline_s = self._loop.time() + visibility_s
        count = 0
        for at, receipt in self._good(receipts):
            at.leases.extend(receipt.sequence, deadline_s)
            self._wake_at(at, deadline_s)
            count += 1
        return count

    def release(self, receipts: list[str], delay_s: float) -> int:
        now_s = self._loop.time()

        def release(at: PhysicalQueue, sequence: int) -> None:
            at.leases.release(sequence, now_s, delay_s)
            if delay_s > 0:
                self._wake_at(at, now_s + delay_s)

        return self._put_back(receipts, release)

    def give_back(self, receipts: list[str]) -> int:

        def give_back(at: PhysicalQueue, sequence: int) -> None:
            at.leases.give_back(sequence)
            self._correct_deliveries(at, sequence)

        return self._put_back(receipts, give_back)

    def end_leases(self) -> int:
        count = 0
        for at in self.physical:
            count += at.leases.expire_all()
            self._tell(at)
        return count

    def read(self, physical: int, start: int, stop: int, messages_max: int, bytes_max: int) -> SealedPage:
        """From the mapped file straight into the page: this is how millions are read."""
        at = self.physical[physical]
        end = at.key(max(0, min(stop, at.committed_below)))
        keys: list[memoryview] = []
        views: list[memoryview] = []
        sizes: list[int] = []
        with self.databases.commit.viewing() as transaction:
            cursor = transaction.cursor(db=self.databases.messages)
            found = cursor.iternext() if cursor.set_range(at.key(max(0, start))) else iter(())
            while step := list(itertools.islice(found, min(READ_STEP, messages_max - len(keys)))):
                step_keys, step_views = zip(*step, strict=True)
                keys += step_keys
                views += step_views
                sizes += map(len, step_views)
                if sum(sizes) > bytes_max or bytes(keys[-1]) >= end:
                    break
            fitting = bisect.bisect_right(list(itertools.accumulate(sizes)), bytes_max)
            count = min(bisect.bisect_left(keys, end, key=bytes), max(1, fitting))
            sequences = [sequence for _queue, _physical, sequence in KEY.iter_unpack(b"".join(keys[:count]))]
            return SealedPage(sequences, sizes[:count], b"".join(views[:count]))

    async def delete_below(self, physical: int, sequence: int) -> int:
        at = self.physical[physical]
        below = min(sequence, at.committed_below)
        at.cursor = max(at.cursor, below)
        at.leases.forget_below(below)
        databases = self.databases
        removed = [0, 0]

        def write(transaction: lmdb.Transaction) -> None:
            removed[:] = databases.remove_below(transaction, at.prefix, at.key(below))
            databases.add_to_counters(transaction, at.prefix, -removed[0], -removed[1], 0, at.cursor)

        await databases.commit.commit(write)
        at.messages -= removed[0]
        at.size_bytes -= removed[1]
        self.counts.deleted += removed[0]
        self._tell(at)  # a group may have become free
        return removed[0]

    async def set_aside(self, physical: int, sequence: int) -> None:
        at = self.physical[physical]
        at.leases.forget(sequence)
        databases, key = self.databases, at.key(sequence)
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
            self.counts.corrupt += 1

    def levels(self) -> list[Level]:
        now_s = self._loop.time()
        levels = []
        for at in self.physical:
            at.leases.expire(now_s)
            head = next(self._walk(at, 1, at.committed_below, 1), None)
            # Not `at.next`: whoever reads up to `next` must not pass over what is on its way to the disk.
            first, oldest_at = at.committed_below, None
            if head is not None:
                first, body = head[0], unseal(head[1])
                oldest_at = decode_record(body).enqueued_at if body is not None else None
            levels.append(
                Level(at.messages, at.size_bytes, at.waiting, at.leases.held, oldest_at, first, at.committed_below)
            )
        return levels

    def count(self) -> StoreCounts:
        self.counts.expired = sum(at.leases.expired for at in self.physical)
        return self.counts

    def watch(self, on_ready: OnReady) -> None:
        """Tells at once of what a former process has left."""
        self.on_ready = on_ready
        for at in self.physical:
            self._tell(at)

    # Inside.

    def _load(self) -> None:
        """What former processes have left."""
        databases, settings = self.databases, self.settings
        since_s = time.time() - settings.deduplication_s
        with databases.commit.reading() as transaction:
            for at in self.physical:
                counters = databases.read_counters(transaction, at.prefix)
                at.load(counters, databases.read_deliveries(transaction, at.prefix))
                at.identities = databases.read_identities(transaction, at.prefix, since_s)
                at.forget_identities(since_s, settings.deduplication_messages_max)
                marks = databases.read_marks(transaction, at.prefix)
                at.marks = {producer: Mark(number, is_durable=True) for producer, number in marks.items()}

    def _take_back(self, marked: list[PhysicalQueue], producer: bytes, mark: Mark) -> None:
        """What was not committed is not marked: the disk knows what was before."""
        with self.databases.commit.reading() as transaction:
            for at in marked:
                if at.marks.get(producer) is mark:
                    kept = self.databases.read_mark(transaction, at.prefix + producer)
                    at.marks[producer] = Mark(kept, is_durable=True)

    def _without_duplicates(
        self, batches: dict[int, list[Entry]], now_s: float
    ) -> tuple[dict[int, list[Entry]], list[tuple[int, bytes]]]:
        """What is new, remembered as such; and what was there before, by physical queue and identity."""
        fresh: dict[int, list[Entry]] = {}
        repeated: list[tuple[int, bytes]] = []
        settings = self.settings
        for physical, entries in batches.items():
            identities = self.physical[physical].identities
            self.physical[physical].forget_identities(
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

    def _check_room(self, messages: int, size_bytes: int) -> None:
        settings, name = self.settings, self.definition.name
        if self.messages + messages > settings.messages_max:
            self.counts.refused += messages
            raise queue_full(name, f"it has {self.messages} of {settings.messages_max} messages", "messages_max")
        if self.size_bytes + size_bytes > settings.bytes_max:
            self.counts.refused += messages
            raise queue_full(name, f"it has {self.size_bytes} of {settings.bytes_max} bytes", "bytes_max")

    def _drop_oldest(self, messages: int, size_bytes: int) -> None:
        """Makes room for a bound notification whose queue was told to forget the oldest."""
        settings = self.settings
        surplus = self.messages + messages - settings.messages_max
        surplus_bytes = self.size_bytes + size_bytes - settings.bytes_max
        while surplus > 0 or surplus_bytes > 0:
            at = max(self.physical, key=lambda physical: physical.messages)
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
        """The oldest messages of a physical queue that nobody leases, as many as make room, with their sizes."""
        found: list[tuple[int, int]] = []
        for sequence, sealed in self._walk(at, 1, at.committed_below, at.messages + len(at.dropping)):
            if surplus <= 0 and surplus_bytes <= 0:
                break
            if sequence not in at.dropping and not at.leases.is_taken(sequence):
                found.append((sequence, len(sealed)))
                surplus -= 1
                surplus_bytes -= len(sealed)
        return found

    def _drop(self, at: PhysicalQueue, head: list[tuple[int, int]]) -> None:
        databases = self.databases
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
        self.counts.dropped += len(sequences)

    async def _commit_entries(
        self, batches: dict[int, list[Entry]], size_bytes: int, now_s: float, write_marks: Write | None = None
    ) -> None:
        databases = self.databases
        numbered = [self._number(self.physical[physical], entries) for physical, entries in batches.items()]
        count = sum(len(items) for _at, items, _identities, _size in numbered)
        self.reserved_messages += count
        self.reserved_bytes += size_bytes
        forget_before_ms = int(1000 * max(0.0, now_s - self.settings.deduplication_s))

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
                    databases.write_identities(transaction, key, identities, at.prefix, forget_below)
            if write_marks is not None:
                write_marks(transaction)

        try:
            await databases.commit.commit(write, size_bytes)
        finally:
            self.reserved_messages -= count
            self.reserved_bytes -= size_bytes
        for at, items, _identities, size in numbered:
            if items:
                at.messages += len(items)
                at.size_bytes += size
                at.committed_below = max(at.committed_below, sequence_of(items[-1][0]) + 1)
                self._tell(at)

    def _number(
        self, at: PhysicalQueue, entries: list[Entry]
    ) -> tuple[PhysicalQueue, list[tuple[bytes, bytes]], bytes, int]:
        """Gives entries their numbers: keys and values, what identifies them, and their size."""
        first = at.next
        at.next += len(entries)
        items = [(at.key(sequence), entry.sealed) for sequence, entry in enumerate(entries, first)]
        return at, items, b"".join(entry.identity for entry in entries), sum(len(entry.sealed) for entry in entries)

    async def _remove(self, gone: dict[int, list[tuple[int, bool]]]) -> None:
        """Takes messages that nobody leases any more off the disk; when that fails, they are delivered again."""
        databases = self.databases
        freed: dict[int, int] = {}

        def write(transaction: lmdb.Transaction) -> None:
            for number, sequences in gone.items():
                at = self.physical[number]
                entries = [(at.key(sequence), was_redelivered) for sequence, was_redelivered in sequences]
                freed[number] = databases.remove_all(transaction, entries)
                databases.add_to_counters(transaction, at.prefix, -len(sequences), -freed[number], 0, at.cursor)

        for number, sequences in gone.items():
            self.physical[number].leaving += len(sequences)
        try:
            await databases.commit.commit(write)
        except TidegateError:
            for number, sequences in gone.items():
                self.physical[number].leaving -= len(sequences)
                for sequence, _was_redelivered in sequences:
                    self.physical[number].leases.defer(sequence)
            raise
        for number, sequences in gone.items():
            at = self.physical[number]
            at.leaving -= len(sequences)
            at.messages -= len(sequences)
            at.size_bytes -= freed[number]
            self._tell(at)  # a group may have become free

    async def bury(self, physical: int, dead: list[tuple[int, int, bytes]], grave: LmdbQueue) -> None:
        """Moves messages that were delivered too often to the dead-letter queue, with their history."""
        now_s, name = time.time(), self.definition.name
        entries = [Entry(to_dead_letter(sealed, name, sequence, times, now_s)) for sequence, times, sealed in dead]
        self.counts.dead_lettered += len(dead)
        await self._move(physical, [sequence for sequence, _times, _sealed in dead], grave, entries)

    async def redrive(self, messages_max: int, target: LmdbQueue) -> int:
        """Moves dead letters back to where they came from; how many."""
        moved = 0
        for at in self.physical:
            found = list(self._walk(at, 1, at.committed_below, messages_max - moved))
            chosen = [(sequence, sealed) for sequence, sealed in found if not at.leases.is_taken(sequence)]
            entries = [Entry(from_dead_letter(sealed)) for _sequence, sealed in chosen]
            target._check_room(len(entries), sum(len(entry.sealed) for entry in entries))
            if chosen:
                await self._move(at.number, [sequence for sequence, _ in chosen], target, entries)
                moved += len(chosen)
        return moved

    async def _move(self, physical: int, sequences: list[int], target: LmdbQueue, entries: list[Entry]) -> None:
        """Messages leave this queue and are new in another, in one commit."""
        databases, at, to = self.databases, self.physical[physical], target.physical[physical]
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
            await databases.commit.commit(write)
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
        target._tell(to)

    def _good(self, receipts: Iterable[str]) -> Iterator[tuple[PhysicalQueue, Receipt]]:
        """The receipts that are not stale, with their queues; each is looked at when its turn comes. All are parsed
        first: one that is malformed must not end a step that is half done."""
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
        for at, receipt in self._good(receipts):
            put(at, receipt.sequence)
            touched[at.number] = at
            count += 1
        for at in touched.values():
            self._tell(at)
        return count

    def _remember_deliveries(self, at: PhysicalQueue, granted: list[tuple[int, int, bytes]]) -> None:
        """With the next commit: how far messages were given out, and how often those that were given out before."""
        if not granted:
            return
        again = [(at.key(sequence), delivery) for sequence, delivery, _sealed in granted if delivery > 1]
        self.counts.redelivered += len(again)
        databases, cursor = self.databases, at.cursor

        def write(transaction: lmdb.Transaction) -> None:
            databases.add_to_counters(transaction, at.prefix, 0, 0, 0, cursor)
            for key, delivery in again:
                databases.write_deliveries(transaction, key, delivery)

        databases.commit.submit_lazily(write)

    def _correct_deliveries(self, at: PhysicalQueue, sequence: int) -> None:
        """A delivery that has not happened must not count after a restart either: it may have been the last but one."""
        databases, key, deliveries = self.databases, at.key(sequence), at.leases.deliveries[sequence]
        if deliveries:
            databases.commit.submit_lazily(lambda transaction: databases.write_deliveries(transaction, key, deliveries))

    def _wake_at(self, at: PhysicalQueue, deadline_s: float) -> None:
        """Looks after leases when the first of them may end: whoever waits for messages is told."""
        if deadline_s < at.wakes_at_s:
            at.wakes_at_s = deadline_s
            self._loop.call_at(deadline_s, self._on_deadline, at, deadline_s)

    def _on_deadline(self, at: PhysicalQueue, deadline_s: float) -> None:
        if deadline_s != at.wakes_at_s:  # an earlier one has come in between, and looks after this one too
            return
        at.wakes_at_s = float("inf")
        if at.leases.expire(self._loop.time()):
            self._tell(at)
        next_s = at.leases.next_deadline_s
        if next_s < float("inf"):
            self._wake_at(at, next_s)

    def _tell(self, at: PhysicalQueue) -> None:
        if self.on_ready is not None and at.waiting:
            self.on_ready(at.number, at.waiting)

    def _walk(self, at: PhysicalQueue, start: int, stop: int, messages_max: int) -> Iterator[tuple[int, bytes]]:
        databases = self.databases
        with databases.commit.reading() as transaction:
            cursor = transaction.cursor(db=databases.messages)
            is_there = cursor.set_range(at.key(max(0, start)))
            end = at.key(max(0, stop))
            for _ in range(messages_max):
                if not is_there or key_of(cursor) >= end:
                    return
                yield sequence_of(key_of(cursor)), value_of(cursor)
                is_there = cursor.next()
