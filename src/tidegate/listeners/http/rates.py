"""Recent rates: how many notifications the broker accepted and delivered per second. A page that is opened now shows
them for the time before.

There is one sample a second, and ten minutes of samples are kept in memory. A busy broker may take fewer samples over
longer intervals; each is divided by the time that has really passed.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

SAMPLE_INTERVAL_S: Final = 1.0
SAMPLES_MAX: Final = 600


class Rate(NamedTuple):
    """One sample. `at` is its Unix time; the others are notifications per second since the sample before."""

    at: float
    accepted: float
    delivered: float


class RecentRates:
    """Turns the edge's counters, which start at 0, into rates. Call `observe` whenever it `is_due`; `recent` has the
    newest sample last."""

    def __init__(self, now_s: float) -> None:
        self.recent: deque[Rate] = deque(maxlen=SAMPLES_MAX)
        self._last_sample = (now_s, 0, 0)

    def is_due(self, now_s: float) -> bool:
        return now_s - self._last_sample[0] >= SAMPLE_INTERVAL_S

    def observe(self, now_s: float, at: float, accepted: int, delivered: int) -> None:
        """Adds a sample of the counters. `now_s` is monotonic time, `at` is Unix time."""
        assert self.is_due(now_s)
        then_s, accepted_then, delivered_then = self._last_sample
        passed_s, come, gone = now_s - then_s, accepted - accepted_then, delivered - delivered_then
        self.recent.append(Rate(round(at, 3), round(come / passed_s, 2), round(gone / passed_s, 2)))
        self._last_sample = (now_s, accepted, delivered)
