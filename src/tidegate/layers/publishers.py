"""Publishers of a Connection Point: what each has sent, what is acknowledged, and what is in flight.

A publisher numbers its notifications 1, 2, 3 … A number that was accepted before is a retry: it does not enter the
layers again, and is acknowledged when the original is. Acknowledgements to a publisher are cumulative, so they are
sent in its order even when the batches finish in another.

When the table is full, by number or by bytes, the publishers that were idle longest are forgotten. A publisher that
returns after that must use a new name (its client does). An idle publisher keeps only its numbers: the structures that
track its batches are created when it sends, and released when it has left and nothing is in flight.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from typing import Final

from tidegate.errors import Overloaded
from tidegate.layers.frames import Refused

NO_SESSION: Final = 0
# Ranges of refused notifications that are kept per publisher, so that they can be reported after a lost connection.
REFUSED_RANGES_MAX: Final = 64
# Measured memory of an idle publisher besides its name, in the table of publishers and in the high-water marks.
PUBLISHER_BYTES: Final = 320
MARK_BYTES: Final = 160


class Publisher:
    """Invariant: acknowledged <= accepted; every number between them belongs to a batch that is in flight."""

    __slots__ = ("_done", "_refused", "_under_way", "accepted", "acknowledged", "bytes_under_way", "name", "session")

    def __init__(self, name: str) -> None:
        self.name = name
        self.session = NO_SESSION
        self.accepted = 0
        self.acknowledged = 0
        self.bytes_under_way = 0
        self._under_way: deque[tuple[int, int]] | None = None
        self._done: set[int] | None = None
        self._refused: list[Refused] | None = None

    @property
    def is_idle(self) -> bool:
        return self.session == NO_SESSION and not self._under_way

    def detach(self) -> None:
        """Detaches the publisher from its session."""
        self.session = NO_SESSION
        self._release()

    def accept(self, last: int, size_bytes: int) -> None:
        """Records that the numbers up to `last` are in flight."""
        assert last > self.accepted, (last, self.accepted)
        self.accepted = last
        self.bytes_under_way += size_bytes
        if self._under_way is None:
            self._under_way = deque()
        self._under_way.append((last, size_bytes))

    def finish(self, last: int) -> int:
        """Records that the batch ending with `last` is done. Returns how many bytes are no longer in flight: none
        while an earlier batch is unfinished, since acknowledgements are cumulative."""
        if self._done is None:
            self._done = set()
        self._done.add(last)
        released = 0
        while self._under_way and self._under_way[0][0] in self._done:
            done, size_bytes = self._under_way.popleft()
            self._done.discard(done)
            self.acknowledged = done
            released += size_bytes
        self.bytes_under_way -= released
        self._release()
        return released

    def refuse(self, refused: list[Refused]) -> None:
        """Records ranges that queues have refused. Adjacent ranges become one; beyond the bound, the oldest are
        forgotten."""
        known = self._refused = self._refused or []
        for each in refused:
            for place in range(len(known) - 1, -1, -1):
                other = known[place]
                if other.queue == each.queue and other.first <= each.last + 1 and each.first <= other.last + 1:
                    known[place] = Refused(each.queue, min(other.first, each.first), max(other.last, each.last))
                    break
            else:
                known.append(each)
        del known[:-REFUSED_RANGES_MAX]

    def refused(self, first: int, last: int) -> list[Refused]:
        """Returns the recorded refusals of notifications from `first` to `last`."""
        return [
            Refused(each.queue, max(first, each.first), min(last, each.last))
            for each in self._refused or ()
            if each.first <= last and first <= each.last
        ]

    def _release(self) -> None:
        if self.is_idle:
            self._under_way = self._done = None


class Publishers:
    """The table of publishers, bounded by `publishers_max` and, since names may be long, by `bytes_max`."""

    def __init__(self, publishers_max: int, bytes_max: int) -> None:
        self._max = publishers_max
        self._bytes_max = bytes_max
        self._table: OrderedDict[str, Publisher] = OrderedDict()
        self.bytes = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._table)

    def get(self, name: str) -> Publisher:
        """Returns the publisher, creating it if needed, and marks it as the most recently seen. Raises Overloaded when
        the table is full of busy publishers."""
        publisher = self._table.get(name)
        if publisher is None:
            size_bytes = PUBLISHER_BYTES + sys.getsizeof(name)
            while len(self._table) >= self._max or (self._table and self.bytes + size_bytes > self._bytes_max):
                self._forget_longest_idle()
            publisher = self._table[name] = Publisher(name)
            self.bytes += size_bytes
        else:
            self._table.move_to_end(name)
        return publisher

    def known(self, name: str) -> Publisher | None:
        return self._table.get(name)

    def _forget_longest_idle(self) -> None:
        for name, publisher in self._table.items():
            if publisher.is_idle:
                del self._table[name]
                self.bytes -= PUBLISHER_BYTES + sys.getsizeof(publisher.name)
                self.forgotten += 1
                return
        raise Overloaded(
            "L604",
            f"{len(self._table)} publishers, {self.bytes} bytes, are connected or have notifications in flight",
            f"the maximum is {self._max} and {self._bytes_max}: retry later, or raise publishers_max and "
            "publishers_bytes_max",
            retry_after_s=5.0,
        )


class HighWaterMarks:
    """The last sequence of each publisher that was delivered here, so that a batch sent again after a recovery is
    delivered once.

    One number per publisher suffices, since every stream that reaches a Connection Point is in publisher order."""

    def __init__(self, publishers_max: int, bytes_max: int) -> None:
        self._max = publishers_max
        self._bytes_max = bytes_max
        self._last: OrderedDict[str, int] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._last)

    def last(self, publisher: str) -> int:
        return self._last.get(publisher, 0)

    def advance(self, publisher: str, last: int) -> None:
        before = self.last(publisher)
        assert last > before
        self._last[publisher] = last
        if before:
            self._last.move_to_end(publisher)
            return
        self.bytes += MARK_BYTES + sys.getsizeof(publisher)
        while len(self._last) > self._max or (len(self._last) > 1 and self.bytes > self._bytes_max):
            forgotten, _last = self._last.popitem(last=False)
            self.bytes -= MARK_BYTES + sys.getsizeof(forgotten)
