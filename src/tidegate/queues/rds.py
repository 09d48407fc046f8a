"""Retry dequeue-request scheduling: a request that missed is held, and tried again after a sleep.

Section 3.3.2 of the paper. The consumer does not ask again in the meantime, so misses become rare and hits return more
messages. The sleep time is decisive, and no fixed value suits every deployment: one that is too short is worse than
none, and one that is too long delays messages. `adaptive` sleeps longer after misses and small hits, and half as long
after full ones.
"""

from __future__ import annotations

from typing import Final

from tidegate.queues.conventional import Conventional
from tidegate.queues.method import REPLY, TRIES_MAX, Park, Request, Step, Try

SLEEP_S_MIN: Final = 0.01
_LONGER_AFTER_MISS: Final = 1.5
_LONGER_AFTER_SMALL_HIT: Final = 1.2
_SHORTER_AFTER_FULL_HIT: Final = 0.5
# A hit is small if it returned less than this part of what was requested.
_SMALL: Final = 0.25


class RetryScheduling(Conventional):
    """With `parks_on_first_miss` a request sleeps after the first empty physical queue, as in the paper; otherwise only
    after all its tries were empty."""

    def __init__(
        self, physical_queues: int, start: int, sleep_s: float, *, is_adaptive: bool, parks_on_first_miss: bool
    ) -> None:
        super().__init__(physical_queues, start)
        self._sleep_s_max = max(sleep_s, SLEEP_S_MIN)
        self._is_adaptive = is_adaptive
        self._parks_on_first_miss = parks_on_first_miss
        self.sleep_s = sleep_s

    def on_result(self, request: Request, physical: int, got: int, waiting: int, now_s: float) -> Step:
        is_last = request.tries >= min(TRIES_MAX, self._tries_max)
        if request.wants <= 0 or (request.got and is_last):
            self._adapt(_SHORTER_AFTER_FULL_HIT if request.wants <= 0 else self._after_hit(request))
            return REPLY
        if request.got or not (self._parks_on_first_miss or is_last):
            return Try(self._order.next())
        self._adapt(_LONGER_AFTER_MISS)
        if now_s >= request.deadline_s:
            return REPLY
        request.tries = 0
        return Park(min(now_s + self.sleep_s, request.deadline_s))

    def on_time(self, request: Request, now_s: float) -> Step:
        return Try(self._order.next())

    def _after_hit(self, request: Request) -> float:
        return _LONGER_AFTER_SMALL_HIT if request.got < _SMALL * request.max else 1.0

    def _adapt(self, factor: float) -> None:
        if self._is_adaptive:
            self.sleep_s = min(max(self.sleep_s * factor, SLEEP_S_MIN), self._sleep_s_max)
