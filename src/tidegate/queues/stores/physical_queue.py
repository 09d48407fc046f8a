"""A physical queue of the LMDB store, as the broker's process knows it: counts, leases, and the read position.

The messages are on the disk. Memory holds only what is needed without reading the disk:

- how many messages there are, and the next sequence;
- the first message that was never taken (`cursor`), and the leases;
- recent identities, the cover of each publisher, and the progress of producers of numbered batches.

So a million waiting messages cost no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import lmdb

from tidegate.queues.covers import FILTERS_MAX, FormerFilter, Run, covered
from tidegate.queues.definition import QueueSettings
from tidegate.queues.leases import Leases
from tidegate.queues.records import enqueued_at, group_of, has_group
from tidegate.queues.store import PRODUCERS_MAX, Entry, is_alone
from tidegate.queues.stores.cover_table import CoverTable
from tidegate.queues.stores.inspection import PhysicalCount
from tidegate.queues.stores.layout import KEY, PREFIX, Counters, sequence_of

# A lease skips and remembers at most this many messages behind held groups before it stops searching.
BEHIND_MAX = 10_000
# Messages past their lifetime that one lease removes at most.
EXPIRED_MAX = 1000
# Runs that are logged on the disk before a commit folds them into the covers. Without the log, many publishers with a
# few notifications each would cost a search and a write each in every commit.
LOGGED_RUNS_MAX = 20_000


@dataclass(slots=True)
class Mark:
    """The number of a producer's last batch here. Until it is durable, the batch is on its way to the disk, and a
    sender that repeats the batch has to wait for the result."""

    number: int
    is_durable: bool = False


@dataclass(slots=True)
class PhysicalQueue:
    """`messages` of `size_bytes` are on the disk; those in `removing` are being removed. `next` includes messages on
    their way to the disk. `unreachable` messages are in the disk's counters but were not found there; `messages` does
    not include them."""

    queue: int
    number: int
    leases: Leases = field(default_factory=Leases)
    next: int = 1
    committed_below: int = 1
    cursor: int = 1
    messages: int = 0
    size_bytes: int = 0
    removing: set[int] = field(default_factory=set)
    identities: dict[bytes, float] = field(default_factory=dict)
    marks: dict[bytes, Mark] = field(default_factory=dict)
    covers: CoverTable = field(default_factory=CoverTable)
    filters: dict[bytes, str] = field(default_factory=dict)
    # Runs that are logged on the disk and not folded into its covers yet.
    logged_runs: int = 0
    wakes_at_s: float = float("inf")
    unreachable: int = 0
    checked_at_s: float = float("-inf")

    @property
    def prefix(self) -> bytes:
        return PREFIX.pack(self.queue, self.number)

    @property
    def waiting(self) -> int:
        return max(0, self.messages - len(self.removing) - self.leases.unavailable)

    def key(self, sequence: int) -> bytes:
        return KEY.pack(self.queue, self.number, sequence)

    def load(self, counters: Counters, deliveries: dict[int, int], found: PhysicalCount | None = None) -> None:
        """Sets the state from the disk. `found` counts the reachable messages, if the pages were checked."""
        self.next = self.committed_below = counters.next
        self.messages, self.size_bytes = counters.messages, counters.size_bytes
        if found is not None:
            self.next = self.committed_below = max(counters.next, found.last + 1)
            self.messages, self.size_bytes, self.unreachable = found.reached, found.reached_bytes, found.unreachable
        self.leases.delivered_below = counters.delivered_below
        self.leases.deliveries = deliveries

    def assign_sequences(self, entries: list[Entry]) -> tuple[list[tuple[bytes, bytes]], int]:
        """Returns the keys and values of new entries, and their size."""
        first = self.next
        self.next += len(entries)
        items = [(self.key(sequence), entry.sealed) for sequence, entry in enumerate(entries, first)]
        return items, sum(len(entry.sealed) for entry in entries)

    def add(self, items: list[tuple[bytes, bytes]], size_bytes: int) -> None:
        """Counts entries that are on the disk now."""
        self.messages += len(items)
        self.size_bytes += size_bytes
        self.committed_below = max(self.committed_below, sequence_of(items[-1][0]) + 1)

    def subtract(self, messages: int, size_bytes: int) -> None:
        """Stops counting messages that are no longer on the disk."""
        self.messages -= messages
        self.size_bytes -= size_bytes

    def end_removal(self, sequences: Sequence[int], freed: tuple[int, int] | None) -> None:
        """Ends a removal that has freed so many messages and bytes. If it has failed (None), the messages are delivered
        again."""
        self.removing.difference_update(sequences)
        if freed is not None:
            self.subtract(*freed)
            return
        for sequence in sequences:
            self.leases.defer(sequence)

    def miss(self, messages: int, size_bytes: int) -> None:
        """Stops counting messages that cannot be reached."""
        self.unreachable += messages
        self.subtract(min(messages, self.messages), min(size_bytes, self.size_bytes))

    def forget_identities(self, before_s: float, count_max: int) -> None:
        """Forgets identities that are too old or too many, oldest first."""
        surplus = len(self.identities) - count_max
        old: list[bytes] = []
        for identity, came_s in self.identities.items():
            if came_s >= before_s and len(old) >= surplus:
                break
            old.append(identity)
        for identity in old:
            del self.identities[identity]

    def set_mark(self, producer: bytes, mark: Mark) -> list[bytes]:
        """Sets the mark of a producer and makes it the most recent one. Returns the producers that are forgotten."""
        self.marks.pop(producer, None)
        self.marks[producer] = mark
        forgotten = list(itertools.islice(self.marks, max(0, len(self.marks) - PRODUCERS_MAX)))
        for each in forgotten:
            del self.marks[each]
        return forgotten

    def take_old(
        self, found: Iterator[tuple[int, bytes]], before_s: float, messages_max: int
    ) -> list[tuple[int, int, bytes]]:
        """Takes messages that came before a time and are not leased; `found` yields them from the oldest on. Returns
        them as (sequence, deliveries, sealed record). They are not leased from now on."""
        old: list[tuple[int, int, bytes]] = []
        for sequence, sealed in found:
            if sequence in self.removing or self.leases.is_taken(sequence):
                continue
            came_at = enqueued_at(sealed)
            if came_at is None or came_at >= before_s or len(old) == messages_max:
                break
            old.append((sequence, self.leases.next_delivery(sequence) - 1, sealed))
        for sequence, _deliveries, _sealed in old:
            self.leases.forget(sequence)
            self.removing.add(sequence)
            self.cursor = max(self.cursor, sequence + 1)
        return old

    def stored_before(self, run: Run) -> list[bool] | None:
        """Returns which entries of a run are in the queue, by its covers; None if none is."""
        before = covered(self.covers.get(run.key), run.places)
        if run.filter and len(self.filters) > (run.tag in self.filters):
            for tag, text in self.filters.items():
                if tag != run.tag:
                    before = self._stored_under(tag, text, run, before)
        return before

    def _stored_under(self, tag: bytes, text: str, run: Run, before: list[bool] | None) -> list[bool] | None:
        """Extends `before` by the entries that were stored under another filter: those in its cover that it matches."""
        among = covered(self.covers.get(tag + run.publisher), run.places)
        if among is None or (before is not None and all(before)):
            return before
        matches = run.matches.get(tag)
        if matches is None:
            raise FormerFilter(text)
        known = before or [False] * len(among)
        return [
            is_known or (is_in and is_match) for is_known, is_in, is_match in zip(known, among, matches, strict=True)
        ]

    def is_fold_due(self, runs: int) -> bool:
        """Counts `runs` more logged runs. Returns whether the commit should fold all of them into the covers."""
        self.logged_runs += runs
        is_due = self.logged_runs > LOGGED_RUNS_MAX
        if is_due:
            self.logged_runs = 0
        return is_due

    @property
    def surplus_filters(self) -> list[bytes]:
        """The tags of the oldest filters, which are forgotten when a new filter is added."""
        return list(self.filters)[: max(0, len(self.filters) + 1 - FILTERS_MAX)]

    def add_filter(self, tag: bytes, text: str) -> None:
        """Remembers a filter under which notifications were fed."""
        for each in self.surplus_filters:
            del self.filters[each]
        self.filters[tag] = text

    def candidates(self, cursor: lmdb.Cursor) -> Iterator[tuple[int, bytes, bool]]:
        """Yields (sequence, sealed record, whether it waits to be delivered again) in the order of delivery."""
        while (sequence := self.leases.pop_again()) is not None:
            try:
                sealed = cast("bytes | None", cursor.get(self.key(sequence)))
            except lmdb.Error:
                # It is on a damaged page: the caller's next attempt must not fail on it again.
                self.leases.forget(sequence)
                raise
            if sealed is None:
                self.leases.forget(sequence)
            else:
                yield sequence, sealed, True
        # Keys sort by queue first, so that all keys from the cursor to below the end belong to this queue.
        end = self.key(self.committed_below)
        is_there = cursor.set_range(self.key(self.cursor))
        while is_there:
            key, sealed = cast("tuple[bytes, bytes]", cursor.item())
            if key >= end:
                return
            yield sequence_of(key), sealed, False
            is_there = cursor.next()


@dataclass(slots=True)
class Selection:
    """The messages that one lease takes, as (sequence, delivery, sealed record): those to grant, those delivered too
    often, and those too old. One lease may take several messages of a group, but not while another lease holds one.
    `has_seen_all` is true if the lease has reached the end of the queue, and nothing that it has seen still waits."""

    queue: PhysicalQueue
    settings: QueueSettings
    messages_max: int
    bytes_max: int
    deadline_s: float
    at: float
    granted: list[tuple[int, int, bytes]] = field(default_factory=list)
    dead: list[tuple[int, int, bytes]] = field(default_factory=list)
    expired: list[tuple[int, int, bytes]] = field(default_factory=list)
    has_seen_all: bool = False
    _size_bytes: int = 0
    _groups: set[str] = field(default_factory=set)
    _deferred: list[int] = field(default_factory=list)

    @property
    def has_found(self) -> bool:
        return bool(self.granted or self.dead or self.expired)

    def take(self, cursor: lmdb.Cursor) -> None:
        """Chooses and grants messages by the rules of `queues.store`."""
        self.messages_max = min(self.messages_max, self.settings.leased_max - self.queue.leases.held)
        queue, leases = self.queue, self.queue.leases
        plain: list[int] = []
        candidates = queue.candidates(cursor)
        if self.settings.lifetime_s is not None:
            candidates = self._skip_old(candidates, self.at - self.settings.lifetime_s)
        try:
            for sequence, sealed, is_again in candidates:
                # Nearly all messages are new and have no group: the only question is whether there is room.
                if is_again or has_group(sealed) or leases.next_delivery(sequence) > 1:
                    if not self._consider(sequence, sealed, is_again):
                        break
                elif self._is_full(len(sealed)):
                    break
                else:
                    queue.cursor = sequence + 1
                    self._size_bytes += len(sealed)
                    self.granted.append((sequence, 1, sealed))
                    plain.append(sequence)
            else:
                self.has_seen_all = not self._deferred
        finally:
            leases.grant_first(plain, self.deadline_s)
            for sequence in self._deferred:
                leases.defer(sequence)

    def _skip_old(
        self, candidates: Iterator[tuple[int, bytes, bool]], since: float
    ) -> Iterator[tuple[int, bytes, bool]]:
        """Skips messages that are too old, up to a bound; the next lease continues there."""
        for sequence, sealed, is_again in candidates:
            came_at = enqueued_at(sealed)
            if came_at is None or came_at >= since:
                yield sequence, sealed, is_again
                continue
            if not is_again:
                self.queue.cursor = sequence + 1
            self.expired.append((sequence, self.queue.leases.next_delivery(sequence) - 1, sealed))
            self.queue.leases.forget(sequence)
            if len(self.expired) == EXPIRED_MAX:
                return

    def _consider(self, sequence: int, sealed: bytes, is_again: bool) -> bool:
        """Handles one candidate. Returns false if the lease must take no more messages."""
        leases = self.queue.leases
        group = group_of(sealed)
        if group and leases.is_group_held(group) and group not in self._groups:
            return self._set_behind(sequence, group, is_again)
        delivery = leases.next_delivery(sequence)
        is_dead = must_be_alone = False
        if delivery > 1:
            is_dead = 0 < self.settings.max_deliveries < delivery
            must_be_alone = is_alone(delivery, self.settings.max_deliveries)
        if not is_dead and (self._is_full(len(sealed)) or (must_be_alone and self.granted)):
            if is_again:
                self._deferred.append(sequence)
            return False
        if not is_again:
            self.queue.cursor = sequence + 1
        if is_dead:
            leases.forget(sequence)
            self.dead.append((sequence, delivery - 1, sealed))
            return True
        leases.grant(sequence, group, self.deadline_s)
        if group:
            self._groups.add(group)
        self._size_bytes += len(sealed)
        self.granted.append((sequence, delivery, sealed))
        return not must_be_alone

    def _is_full(self, size_bytes: int) -> bool:
        if len(self.granted) >= self.messages_max:
            return True
        return bool(self.granted) and self._size_bytes + size_bytes > self.bytes_max

    def _set_behind(self, sequence: int, group: str, is_again: bool) -> bool:
        """Sets aside a message whose group is held by another lease. Returns false if too many are set aside."""
        if is_again:
            self._deferred.append(sequence)
        elif self.queue.leases.behind < BEHIND_MAX:
            self.queue.leases.set_behind(sequence, group)
            self.queue.cursor = sequence + 1
        else:
            return False
        return True
