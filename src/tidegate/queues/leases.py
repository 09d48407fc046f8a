"""Leases of one physical queue: which messages are leased until when, and which ones must be delivered again.

A state machine without clock or disk; the LMDB store drives it. A message that was taken is *held* until it is deleted
or released, or until its deadline passes. Then it waits to be delivered *again*, lowest sequence first. A release with
a delay is a lease without an owner: its receipt is stale, and its deadline is the end of the delay.

While a message of a group is held, the store sets later messages of that group *behind* it when it finds them.
Invariant: a sequence is in at most one of held, again and behind. A sequence in none of them was never taken from the
queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

NEVER: Final = float("inf")
DEADLINES_KEPT: Final = 1024


class _Lease(msgspec.Struct, gc=False):
    delivery: int
    deadline_s: float
    is_owned: bool = True


@dataclass(slots=True)
class Leases:
    """`deliveries` maps each message that was delivered and still exists to its number of deliveries. Messages below
    `delivered_below` that have no entry there were delivered once before the broker's last start."""

    deliveries: dict[int, int] = field(default_factory=dict)
    delivered_below: int = 0
    expired: int = 0
    _held: dict[int, _Lease] = field(default_factory=dict)
    _deadlines: list[tuple[float, int]] = field(default_factory=list)
    _again: list[int] = field(default_factory=list)
    _waiting_again: set[int] = field(default_factory=set)
    _groups: dict[int, str] = field(default_factory=dict)
    _held_of_group: dict[str, int] = field(default_factory=dict)
    _behind: dict[str, list[int]] = field(default_factory=dict)
    _behind_count: int = 0

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def unavailable(self) -> int:
        """The number of messages that cannot be leased now."""
        return len(self._held) + self._behind_count

    @property
    def behind(self) -> int:
        return self._behind_count

    @property
    def next_deadline_s(self) -> float:
        """The time at which the next lease may end. Reading it discards deadlines of leases that ended early."""
        while self._deadlines:
            deadline_s, sequence = self._deadlines[0]
            lease = self._held.get(sequence)
            if lease is not None and lease.deadline_s == deadline_s:
                return deadline_s
            heapq.heappop(self._deadlines)
        return NEVER

    def expire(self, now_s: float) -> int:
        """Ends the leases whose deadline has passed. Returns how many messages became available again."""
        count = 0
        while self._held and self.next_deadline_s <= now_s:
            _, sequence = heapq.heappop(self._deadlines)
            # A delayed release has no owner: its end is not an expired lease.
            self.expired += self._held[sequence].is_owned
            self._put_again(sequence)
            count += 1
        return count

    def expire_all(self) -> int:
        """Ends every lease and every delay, as if its deadline had passed."""
        return self.expire(NEVER)

    def pop_again(self) -> int | None:
        """Returns the lowest message that must be delivered again. The caller must grant, defer or forget it."""
        while self._again:
            sequence = heapq.heappop(self._again)
            if sequence in self._waiting_again:
                self._waiting_again.discard(sequence)
                return sequence
        return None

    def defer(self, sequence: int) -> None:
        """Puts back a message that was popped but cannot be leased now."""
        self._waiting_again.add(sequence)
        heapq.heappush(self._again, sequence)

    def is_group_held(self, group: str) -> bool:
        return group in self._held_of_group

    def set_behind(self, sequence: int, group: str) -> None:
        """Makes a message wait until no message of its group is held."""
        self._behind.setdefault(group, []).append(sequence)
        self._groups[sequence] = group
        self._behind_count += 1

    def next_delivery(self, sequence: int) -> int:
        return self.deliveries.get(sequence, int(sequence < self.delivered_below)) + 1

    def grant(self, sequence: int, group: str, deadline_s: float) -> int:
        """Leases a message. Returns the number of this delivery."""
        assert sequence not in self._held, sequence
        delivery = self.deliveries[sequence] = self.next_delivery(sequence)
        self._held[sequence] = _Lease(delivery, deadline_s)
        self._remember_deadline(sequence, deadline_s)
        if group:
            self._groups[sequence] = group
            self._held_of_group[group] = self._held_of_group.get(group, 0) + 1
        return delivery

    def grant_first(self, sequences: Sequence[int], deadline_s: float) -> None:
        """Leases messages without groups for the first time: `grant` for all of them at once."""
        assert self._held.keys().isdisjoint(sequences)
        self.deliveries.update(dict.fromkeys(sequences, 1))
        self._held.update({sequence: _Lease(1, deadline_s) for sequence in sequences})
        for sequence in sequences:
            heapq.heappush(self._deadlines, (deadline_s, sequence))
        self._tidy_deadlines()

    def is_held(self, sequence: int, delivery: int) -> bool:
        """Returns whether a receipt is valid."""
        lease = self._held.get(sequence)
        return lease is not None and lease.delivery == delivery and lease.is_owned

    def is_taken(self, sequence: int) -> bool:
        """Returns whether a message is leased, or its release is delayed."""
        return sequence in self._held

    def extend(self, sequence: int, deadline_s: float) -> None:
        lease = self._held[sequence]
        lease.deadline_s = deadline_s
        self._remember_deadline(sequence, deadline_s)

    def release(self, sequence: int, now_s: float, delay_s: float) -> None:
        if delay_s > 0:
            self._held[sequence].is_owned = False
            self.extend(sequence, now_s + delay_s)
        else:
            self._put_again(sequence)

    def give_back(self, sequence: int) -> None:
        """Undoes a delivery that did not reach its consumer: it does not count."""
        self.deliveries[sequence] -= 1
        self._put_again(sequence)

    def forget(self, sequence: int) -> None:
        """Removes every trace of a message that has left the queue, whatever its state was."""
        self.deliveries.pop(sequence, None)
        self._waiting_again.discard(sequence)
        if sequence in self._held:
            self._end(sequence)
        elif sequence in self._groups:
            self._remove_behind(sequence)

    def forget_below(self, sequence: int) -> None:
        """Removes every trace of the messages below a sequence, which have left the queue."""
        known = self._held.keys() | self._waiting_again | self.deliveries.keys() | self._groups.keys()
        for gone in sorted(known_sequence for known_sequence in known if known_sequence < sequence):
            self.forget(gone)

    def _remember_deadline(self, sequence: int, deadline_s: float) -> None:
        heapq.heappush(self._deadlines, (deadline_s, sequence))
        self._tidy_deadlines()

    def _tidy_deadlines(self) -> None:
        """Rebuilds the heap when it holds mostly old deadlines. Most leases end long before their deadlines, which stay
        in the heap."""
        if len(self._deadlines) > 2 * len(self._held) + DEADLINES_KEPT:
            self._deadlines = [(lease.deadline_s, sequence) for sequence, lease in self._held.items()]
            heapq.heapify(self._deadlines)

    def _put_again(self, sequence: int) -> None:
        self._waiting_again.add(sequence)
        heapq.heappush(self._again, sequence)
        self._end(sequence)

    def _end(self, sequence: int) -> None:
        del self._held[sequence]
        group = self._groups.pop(sequence, "")
        if not group:
            return
        self._held_of_group[group] -= 1
        if not self._held_of_group[group]:
            del self._held_of_group[group]
            # No message of the group is held any more, so those behind it become available.
            behind = self._behind.pop(group, [])
            self._behind_count -= len(behind)
            for waiting in behind:
                del self._groups[waiting]
                self.defer(waiting)

    def _remove_behind(self, sequence: int) -> None:
        group = self._groups.pop(sequence)
        self._behind[group].remove(sequence)
        self._behind_count -= 1
        if not self._behind[group]:
            del self._behind[group]
