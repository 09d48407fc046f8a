"""The covers of one physical queue of the LMDB store, in memory, and the budget that all physical queues share.

A cover records which numbers of a publisher the queue has (`queues.covers`). It is small, but a queue has one for each
publisher, a broker has many queues, and queues outlive the clients that filled them. So the covers of a store have a
budget in bytes, besides the bound of each physical queue.

What may go wrong: the budget is used up. Then a physical queue that grows, and uses more than an equal share of the
budget, forgets its least recently used covers until it is back at its share. What such a publisher sends again is
stored twice; the queue counts it as a forgotten publisher. A queue that does not grow keeps its covers. So a new queue
may use its share beyond the budget, up to twice the budget in total.
"""

from __future__ import annotations

import itertools
from typing import Final

from tidegate.queues.covers import PUBLISHERS_MAX, Bounds, Run, extend, touches

COVERS_BYTES_MAX: Final = 512 * 1024 * 1024
# Measured: a key, a list and its slot in a table; and the bounds of one interval.
COVER_BYTES: Final = 110
INTERVAL_BYTES: Final = 140


class CoverBudget:
    """Invariant: `bytes` is the sum over the tables that share the budget; `holders` counts the tables that are not
    empty."""

    def __init__(self, bytes_max: int = COVERS_BYTES_MAX) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self.holders = 0

    def surplus_bytes(self, size_bytes: int) -> int:
        """Returns how many bytes a table of this size should forget; none if the result is not positive."""
        above_share = size_bytes - self.bytes_max // max(1, self.holders)
        # The second term enforces twice the budget, even on a table within its share.
        return max(min(self.bytes - self.bytes_max, above_share), self.bytes - 2 * self.bytes_max)


class CoverTable:
    """Invariant: `bytes` is what its covers are charged. The least recently used cover comes first."""

    def __init__(self, budget: CoverBudget | None = None) -> None:
        self.bytes = 0
        self._budget = budget if budget is not None else CoverBudget()
        self._covers: dict[bytes, Bounds] = {}

    def __len__(self) -> int:
        return len(self._covers)

    def get(self, key: bytes) -> Bounds | None:
        return self._covers.get(key)

    def grow(self, run: Run) -> bool:
        """Covers a run that is on its way to the disk, and makes its cover the most recently used one. Returns whether
        the run extends an interval of the cover."""
        bounds = self._covers.pop(run.key, None)
        if bounds is None:
            self._covers[run.key] = [run.low, run.high]
            self._charge(COVER_BYTES + INTERVAL_BYTES)
            return False
        is_near, size = touches(bounds, run.low, run.high), len(bounds)
        extend(bounds, run.low, run.high)
        self._covers[run.key] = bounds
        if len(bounds) != size:
            self._charge((len(bounds) - size) // 2 * INTERVAL_BYTES)
        return is_near

    def forget_surplus(self) -> list[bytes]:
        """Forgets the least recently used covers above a bound. Returns their keys."""
        forgotten = list(itertools.islice(self._covers, max(0, len(self._covers) - PUBLISHERS_MAX)))
        surplus_bytes = self._budget.surplus_bytes(self.bytes) - sum(map(self._cost, forgotten))
        for key in itertools.islice(self._covers, len(forgotten), None):
            if surplus_bytes <= 0:
                break
            forgotten.append(key)
            surplus_bytes -= self._cost(key)
        for key in forgotten:
            self._charge(-self._cost(key))
            del self._covers[key]
        return forgotten

    def replace(self, covers: dict[bytes, Bounds]) -> None:
        """Replaces all covers, for example with those on the disk. An empty dictionary frees the whole charge."""
        self._covers = covers
        self._charge(sum(map(self._cost, covers)) - self.bytes)

    def _cost(self, key: bytes) -> int:
        return COVER_BYTES + len(self._covers[key]) // 2 * INTERVAL_BYTES

    def _charge(self, size_bytes: int) -> None:
        had_any = self.bytes > 0
        self.bytes += size_bytes
        self._budget.bytes += size_bytes
        self._budget.holders += (self.bytes > 0) - had_any
