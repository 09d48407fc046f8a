"""How many notifications came and went a second, lately: what a page that is opened now shows of the time before.

One look a second, ten minutes of them, in memory. A broker that was too busy to look at its clock has fewer and longer
ones; each is divided by the time that it really took.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

LOOK_EVERY_S: Final = 1.0
LOOKS_MAX: Final = 600


class Rate(NamedTuple):
    """`at` is the Unix time of the look's end; the others are notifications a second since the look before."""

    at: float
    accepted: float
    delivered: float


class RecentRates:
    """Told the counts of the edge, which begin with 0, whenever it `is_due`; `recent` has the newest last."""

    def __init__(self, now_s: float) -> None:
        self.recent: deque[Rate] = deque(maxlen=LOOKS_MAX)
        self._looked = (now_s, 0, 0)

    def is_due(self, now_s: float) -> bool:
        return now_s - self._looked[0] >= LOOK_EVERY_S

    def observe(self, now_s: float, at: float, accepted: int, delivered: int) -> None:
        """The counts at a time of a clock that never goes back, and of the one that people read."""
        assert self.is_due(now_s)
        then_s, accepted_then, delivered_then = self._looked
        passed_s, come, gone = now_s - then_s, accepted - accepted_then, delivered - delivered_then
        self.recent.append(Rate(round(at, 3), round(come / passed_s, 2), round(gone / passed_s, 2)))
        self._looked = (now_s, accepted, delivered)
