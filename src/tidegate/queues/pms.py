"""Periodical monitoring and scheduling: counts the physical queues periodically, and tries the fullest ones first.

Section 3.3.1 of the paper. A request does not try queues that were empty at the last count, so a miss costs nothing.
There are two weaknesses: several controllers that see the same counts all try the same queues, and messages that
arrived after the count are not seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.queues.conventional import Conventional
from tidegate.queues.method import REPLY, Request, Step, Try


class PeriodicalMonitoring(Conventional):
    def __init__(self, physical_queues: int, start: int, monitor_period_s: float) -> None:
        super().__init__(physical_queues, start)
        self.monitor_period_s = monitor_period_s
        self._counts = [0] * physical_queues

    def on_counts(self, counts: Sequence[int], now_s: float) -> None:
        self._counts = list(counts)

    def on_request(self, request: Request, now_s: float) -> Step:
        return self._try_fullest()

    def on_result(self, request: Request, physical: int, got: int, waiting: int, now_s: float) -> Step:
        self._counts[physical] = waiting
        if request.wants <= 0 or request.tries >= self._tries_max:
            return REPLY
        return self._try_fullest()

    def _try_fullest(self) -> Step:
        fullest = max(range(len(self._counts)), key=self._counts.__getitem__)
        return Try(fullest) if self._counts[fullest] else REPLY
