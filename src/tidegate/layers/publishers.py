"""Publishers as a Connection Point knows them: what each has sent, what is acknowledged, what is under way.

A publisher numbers its notifications 1, 2, 3 … A number that was accepted before is a retry: it is not sent again,
and it is acknowledged when the original is. Acknowledgements to a publisher are cumulative, so they are given out
in its order even when the batches finish in another.

The memory of an idle publisher is dropped when the table is full, the longest idle first; a publisher that comes
back after that must use a new name (its client does).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from tidegate.errors import Overloaded

NOBODY: Final = 0


class Publisher:
    """Invariant: acknowledged <= accepted; every number between them belongs to a batch that is under way."""

    __slots__ = ("_done", "_under_way", "accepted", "acknowledged", "bytes_under_way", "name", "session")

    def __init__(self, name: str) -> None:
        self.name = name
        self.session = NOBODY
        self.accepted = 0
        self.acknowledged = 0
        self.bytes_under_way = 0
        self._under_way: deque[tuple[int, int]] = deque()
        self._done: set[int] = set()

    @property
    def is_idle(self) -> bool:
        return self.session == NOBODY and not self._under_way

    def accept(self, last: int, size_bytes: int) -> None:
        """Numbers up to `last` are under way."""
        assert last > self.accepted, (last, self.accepted)
        self.accepted = last
        self.bytes_under_way += size_bytes
        self._under_way.append((last, size_bytes))

    def finish(self, last: int) -> int:
        """The batch that ends with `last` is done; returns how many bytes are no longer under way."""
        self._done.add(last)
        released = 0
        while self._under_way and self._under_way[0][0] in self._done:
            done, size_bytes = self._under_way.popleft()
            self._done.discard(done)
            self.acknowledged = done
            released += size_bytes
        self.bytes_under_way -= released
        return released


class Publishers:
    """The table, bounded by `publishers_max`."""

    def __init__(self, publishers_max: int) -> None:
        self._max = publishers_max
        self._table: OrderedDict[str, Publisher] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def get(self, name: str) -> Publisher:
        """The publisher, as the most recently seen one; Overloaded when the table is full of busy publishers."""
        publisher = self._table.get(name)
        if publisher is None:
            if len(self._table) >= self._max:
                self._forget_longest_idle()
            publisher = self._table[name] = Publisher(name)
        else:
            self._table.move_to_end(name)
        return publisher

    def known(self, name: str) -> Publisher | None:
        return self._table.get(name)

    def _forget_longest_idle(self) -> None:
        for name, publisher in self._table.items():
            if publisher.is_idle:
                del self._table[name]
                return
        raise Overloaded(
            "L604",
            f"{self._max} publishers are connected or have notifications under way",
            "come back later, or raise publishers_max",
            retry_after_s=5.0,
        )


class HighWaterMarks:
    """The last sequence delivered here of each publisher: what comes again after a recovery is delivered once.

    One number a publisher suffices, since every stream that reaches a Connection Point is in publisher order."""

    def __init__(self, publishers_max: int) -> None:
        self._max = publishers_max
        self._last: OrderedDict[str, int] = OrderedDict()

    def last(self, publisher: str) -> int:
        return self._last.get(publisher, 0)

    def advance(self, publisher: str, last: int) -> None:
        assert last > self.last(publisher)
        self._last[publisher] = last
        self._last.move_to_end(publisher)
        if len(self._last) > self._max:
            self._last.popitem(last=False)
