"""A physical queue of the LMDB store, as the broker's process knows it: counts, leases, and where reading stands.

The messages are on the disk; here is only what must not be asked of it: how many there are, which number comes next,
which message is the first that was never taken (`cursor`), who has leased what, which identities came lately, and how
far producers of numbered batches are. So a million messages that wait cost no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import lmdb

from tidegate.queues.definition import QueueSettings
from tidegate.queues.leases import Leases
from tidegate.queues.records import group_of, has_group
from tidegate.queues.store import PRODUCERS_MAX, is_alone
from tidegate.queues.stores.layout import KEY, PREFIX, Counters, sequence_of

# Messages behind a held group that are stepped over and remembered, before a lease stops looking further.
BEHIND_MAX = 10_000


@dataclass(slots=True)
class Mark:
    """The number of a producer's last batch here. Until it is durable the batch is on its way to the disk, and whoever
    sends it again has to wait for what becomes of it."""

    number: int
    is_durable: bool = False


@dataclass(slots=True)
class PhysicalQueue:
    """`messages` of `size_bytes` are on the disk, of which `leaving` are about to go; `next` counts what is on its way
    there too. `dropping` are those that make room, and are on the disk until the next commit."""

    queue: int
    number: int
    leases: Leases = field(default_factory=Leases)
    next: int = 1
    committed_below: int = 1
    cursor: int = 1
    messages: int = 0
    size_bytes: int = 0
    leaving: int = 0
    dropping: set[int] = field(default_factory=set)
    identities: dict[bytes, float] = field(default_factory=dict)
    marks: dict[bytes, Mark] = field(default_factory=dict)
    wakes_at_s: float = float("inf")

    @property
    def prefix(self) -> bytes:
        return PREFIX.pack(self.queue, self.number)

    @property
    def waiting(self) -> int:
        return max(0, self.messages - self.leaving - self.leases.unavailable)

    def key(self, sequence: int) -> bytes:
        return KEY.pack(self.queue, self.number, sequence)

    def load(self, counters: Counters, deliveries: dict[int, int]) -> None:
        self.next = self.committed_below = counters.next
        self.messages, self.size_bytes = counters.messages, counters.size_bytes
        self.leases.delivered_below = counters.delivered_below
        self.leases.deliveries = deliveries

    def forget_identities(self, before_s: float, count_max: int) -> None:
        """Those that are too old or too many, oldest first."""
        surplus = len(self.identities) - count_max
        old: list[bytes] = []
        for identity, came_s in self.identities.items():
            if came_s >= before_s and len(old) >= surplus:
                break
            old.append(identity)
        for identity in old:
            del self.identities[identity]

    def set_mark(self, producer: bytes, mark: Mark) -> list[bytes]:
        """The producer is the one that came last; those that are forgotten for it."""
        self.marks.pop(producer, None)
        self.marks[producer] = mark
        forgotten = list(itertools.islice(self.marks, max(0, len(self.marks) - PRODUCERS_MAX)))
        for each in forgotten:
            del self.marks[each]
        return forgotten

    def candidates(self, cursor: lmdb.Cursor) -> Iterator[tuple[int, bytes, bool]]:
        """(sequence, sealed record, whether it waits to be delivered again) in the order of delivery."""
        while (sequence := self.leases.pop_again()) is not None:
            sealed = cast("bytes | None", cursor.get(self.key(sequence)))
            if sealed is None:
                self.leases.forget(sequence)
            else:
                yield sequence, sealed, True
        # Keys sort by queue first, so that what lies below the end is of this queue.
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
    """What one lease takes of a queue, as (sequence, delivery, sealed record): messages to grant, and messages that
    have been delivered too often. Its messages of one group may follow each other; another's may not."""

    queue: PhysicalQueue
    settings: QueueSettings
    messages_max: int
    bytes_max: int
    deadline_s: float
    granted: list[tuple[int, int, bytes]] = field(default_factory=list)
    dead: list[tuple[int, int, bytes]] = field(default_factory=list)
    _size_bytes: int = 0
    _groups: set[str] = field(default_factory=set)
    _deferred: list[int] = field(default_factory=list)

    def take(self, cursor: lmdb.Cursor) -> None:
        """Chooses and grants messages by the rules of `queues.store`."""
        self.messages_max = min(self.messages_max, self.settings.leased_max - self.queue.leases.held)
        queue, leases = self.queue, self.queue.leases
        plain: list[int] = []
        try:
            for sequence, sealed, is_again in queue.candidates(cursor):
                # Nearly all messages are new and of no group: nothing is to be considered but whether there is room.
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
        finally:
            leases.grant_first(plain, self.deadline_s)
        for sequence in self._deferred:
            self.queue.leases.defer(sequence)

    def _consider(self, sequence: int, sealed: bytes, is_again: bool) -> bool:
        """False when nothing more is to be taken."""
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
        """Another lease holds a message of the same group."""
        if is_again:
            self._deferred.append(sequence)
        elif self.queue.leases.behind < BEHIND_MAX:
            self.queue.leases.set_behind(sequence, group)
            self.queue.cursor = sequence + 1
        else:
            return False
        return True
