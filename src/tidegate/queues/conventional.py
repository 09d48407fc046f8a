"""The conventional method: round-robin over the physical queues, and an immediate answer, full or empty.

The baseline of the paper. A consumer that finds nothing asks again, and the broker pays for every miss.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.queues.method import REPLY, TRIES_MAX, Request, RoundRobin, Step, Try


class Conventional:
    monitor_period_s: float | None = None
    wants_wakeups = False
    sleep_s = 0.0

    def __init__(self, physical_queues: int, start: int) -> None:
        self._order = RoundRobin(physical_queues, start)
        self._tries_max = min(TRIES_MAX, physical_queues)

    def on_request(self, request: Request, now_s: float) -> Step:
        return Try(self._order.next())

    def on_result(self, request: Request, physical: int, got: int, waiting: int, now_s: float) -> Step:
        if request.wants <= 0 or request.tries >= self._tries_max:
            return REPLY
        return Try(self._order.next())

    def on_time(self, request: Request, now_s: float) -> Step:
        return REPLY

    def on_ready(self, physical: int, waiting: int, now_s: float) -> list[tuple[Request, float]]:
        return []

    def on_counts(self, counts: Sequence[int], now_s: float) -> None:
        """Ignores counts."""

    def on_gone(self, request: Request) -> list[tuple[Request, float]]:
        return []
