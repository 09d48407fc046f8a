"""Reads messages of physical queues from LMDB, and skips damage that occurs while the broker runs.

The start has checked every page (`inspection`). A page that becomes damaged later makes a transaction fail with an LMDB
error, or ends the process. After an error, reading continues at the first sequence after it that a search can reach.
The skipped messages are still counted on the disk. `count_again` finds the difference, reports it, and no longer counts
it as waiting.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Iterator
from typing import Final

import lmdb

from tidegate.queues.store import SealedPage
from tidegate.queues.stores.layout import KEY, Databases, sequence_of
from tidegate.queues.stores.physical_queue import PhysicalQueue
from tidegate.storage.lmdb_cursor import key_of, value_of

# Messages that a range read fetches from the store before it checks whether they are enough.
READ_STEP: Final = 256
# How often one lease skips a damaged place.
SKIPS_MAX: Final = 8
# The shortest time between two counts of a physical queue.
CHECK_EVERY_S: Final = 10.0

log = logging.getLogger(__name__)


class QueueReader:
    """Reads one logical queue, and logs the first damage that it finds."""

    def __init__(self, name: str, databases: Databases) -> None:
        self._name = name
        self._databases = databases
        self._is_reported = False

    def read(self, at: PhysicalQueue, start: int, stop: int, messages_max: int, bytes_max: int) -> SealedPage:
        try:
            return self._read_mapped(at, start, stop, messages_max, bytes_max)
        except lmdb.Error as error:
            self._report(at, start, error)
            return self._read_around_damage(at, start, stop, messages_max, bytes_max)

    def _read_mapped(self, at: PhysicalQueue, start: int, stop: int, messages_max: int, bytes_max: int) -> SealedPage:
        """Copies from the mapped file straight into the page: the fast path for reading millions of messages."""
        end = at.key(max(0, min(stop, at.committed_below)))
        keys: list[memoryview] = []
        views: list[memoryview] = []
        sizes: list[int] = []
        with self._databases.commit.viewing() as transaction:
            cursor = transaction.cursor(db=self._databases.messages)
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

    def _read_around_damage(
        self, at: PhysicalQueue, start: int, stop: int, messages_max: int, bytes_max: int
    ) -> SealedPage:
        sequences: list[int] = []
        records: list[bytes] = []
        size_bytes = 0
        for sequence, sealed in self.walk(at, start, min(stop, at.committed_below), messages_max):
            size_bytes += len(sealed)
            if records and size_bytes > bytes_max:
                break
            sequences.append(sequence)
            records.append(sealed)
        return SealedPage(sequences, [len(sealed) for sealed in records], b"".join(records))

    def walk(self, at: PhysicalQueue, start: int, stop: int, messages_max: int) -> Iterator[tuple[int, bytes]]:
        """Yields messages from `start` to below `stop`, without those on damaged pages."""
        for _ in range(messages_max + SKIPS_MAX):
            try:
                for sequence, sealed in self._walk_sound(at, start, stop, messages_max):
                    start, messages_max = sequence + 1, messages_max - 1
                    yield sequence, sealed
                return
            except lmdb.Error as error:
                start = self.step_over(at, start, stop, error)

    def _walk_sound(self, at: PhysicalQueue, start: int, stop: int, messages_max: int) -> Iterator[tuple[int, bytes]]:
        databases = self._databases
        with databases.commit.reading() as transaction:
            cursor = transaction.cursor(db=databases.messages)
            is_there = cursor.set_range(at.key(max(0, start)))
            end = at.key(max(0, stop))
            for _ in range(messages_max):
                if not is_there or key_of(cursor) >= end:
                    return
                yield sequence_of(key_of(cursor)), value_of(cursor)
                is_there = cursor.next()

    def _report(self, at: PhysicalQueue, sequence: int, error: lmdb.Error) -> None:
        if not self._is_reported:
            self._is_reported = True
            log.error(
                "queue %s is damaged near physical=%d sequence=%d: %s; run tidegate queue verify",
                self._name,
                at.number,
                sequence,
                error,
            )

    def step_over(self, at: PhysicalQueue, start: int, stop: int, error: lmdb.Error) -> int:
        """Reports damage, and returns the sequence at which reading continues."""
        self._report(at, start, error)
        return self._first_readable(at, start, stop)

    def _first_readable(self, at: PhysicalQueue, start: int, stop: int) -> int:
        """Returns the lowest sequence from `start` on that can be read, or `stop`. It searches ahead in steps that
        double, and then bisects the last step."""
        if self._is_readable(at, start):
            return start
        step = 1
        while start + step < stop and not self._is_readable(at, start + step):
            step *= 2
        low, high = start + step // 2, min(start + step, stop)
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_readable(at, middle):
                high = middle
            else:
                low = middle
        return high

    def _is_readable(self, at: PhysicalQueue, sequence: int) -> bool:
        """Returns whether a search for a sequence succeeds. It uses a transaction of its own, since an error ends the
        transaction."""
        try:
            with self._databases.commit.reading() as transaction:
                cursor = transaction.cursor(db=self._databases.messages)
                return not cursor.set_range(at.key(sequence)) or bool(cursor.item())
        except lmdb.Error:
            return False

    def count_again(self, at: PhysicalQueue, now_s: float) -> None:
        """Compares the counter on the disk with the reachable messages, if messages should wait but none was found.
        Counters that changed in between make the comparison invalid. Unreachable messages no longer count as
        waiting."""
        if now_s - at.checked_at_s < CHECK_EVERY_S:
            return
        at.checked_at_s = now_s
        reached = reached_bytes = 0
        with self._databases.commit.reading() as transaction:
            counters = self._databases.read_counters(transaction, at.prefix)
        for _sequence, sealed in self.walk(at, 0, 1 << 62, counters.messages):
            reached += 1
            reached_bytes += len(sealed)
        with self._databases.commit.reading() as transaction:
            if self._databases.read_counters(transaction, at.prefix) != counters:
                at.checked_at_s = float("-inf")  # a commit came in between
                return
        missing = counters.messages - reached - at.unreachable
        if missing > 0:
            at.miss(missing, max(0, counters.size_bytes - reached_bytes))
            log.error(
                "queue %s has %d messages that cannot be reached physical=%d: run tidegate queue verify",
                self._name,
                at.unreachable,
                at.number,
            )
