"""Pressure: how close a queue is to its bound, and whether it holds back the publishers of notifications for it.

    calm ──full──► holding back ──nothing stored for block_s──► overflowing ──a whole batch fits──► calm
                        └────────────stores something────────────► calm

A full queue holds back its publishers: their acknowledgements wait. After it has stored nothing for `block_s`, it
overflows: no publisher waits, and notifications that do not fit are refused or dropped at once. The queue's settings
decide which.

A state machine without a clock. The queue feeder reports the store's answers, and a periodic check reports the fill
ratio. Changes are logged, so that an operator learns about a filling queue before it holds back publishers.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

NEAR_RATIO: Final = 0.8
# With a single threshold, a queue whose level varies around it would raise the alarm again and again.
CALM_RATIO: Final = 0.7
# A queue with slow consumers becomes full many times a second; the log reports it at most once in this time.
LOG_AGAIN_S: Final = 30.0


@dataclass(slots=True)
class Pressure:
    """The pressure on one logical queue, as this broker sees it. `notifications_refused` and `notifications_dropped`
    count what the queue did not store after `block_s`; `held_back_s` adds up how long publishers were held back."""

    name: str
    fill_ratio: float = 0.0
    is_near: bool = False
    is_overflowing: bool = False
    notifications_refused: int = 0
    notifications_dropped: int = 0
    held_back_s: float = 0.0
    _full_since_s: float | None = None
    _full_logged_s: float = -math.inf
    _is_full_logged: bool = False
    _overflow_logged_s: float = -math.inf
    _is_overflow_logged: bool = False

    @property
    def is_holding_back(self) -> bool:
        return self._full_since_s is not None and not self.is_overflowing

    def holding_back_s(self, now_s: float) -> float:
        """Returns how long the queue has been holding back its publishers; 0 if it does not."""
        return now_s - self._full_since_s if self._full_since_s is not None and not self.is_overflowing else 0.0

    def on_full(self, now_s: float, block_s: float) -> bool:
        """Handles a store that has no room for a single notification. Returns whether publishers have waited long
        enough."""
        self.fill_ratio = max(self.fill_ratio, 1.0)  # until the next measurement
        if self.is_overflowing:
            return True
        if self._full_since_s is None:
            self._full_since_s = now_s
            self._is_full_logged = block_s > 0 and now_s - self._full_logged_s >= LOG_AGAIN_S
            if self._is_full_logged:
                self._full_logged_s = now_s
                log.warning("queue %r is full and holds back its publishers, for up to %g s", self.name, block_s)
        full_s = now_s - self._full_since_s
        if full_s < block_s:
            return False
        self.held_back_s += full_s
        self.is_overflowing = True
        self._is_overflow_logged = now_s - self._overflow_logged_s >= LOG_AGAIN_S
        if self._is_overflow_logged:
            self._overflow_logged_s = now_s
            log.error("queue %r has stored nothing for %.1f s: it refuses or drops notifications", self.name, full_s)
        return True

    def on_stored(self, now_s: float) -> None:
        """Handles a store that has stored some notifications: publishers are no longer held back."""
        # An overflow ends only with `on_caught_up`, and not whenever there is room for a single notification.
        if self.is_overflowing or self._full_since_s is None:
            return
        self.held_back_s += now_s - self._full_since_s
        self._full_since_s = None
        if self._is_full_logged:
            self._is_full_logged = False
            log.warning("queue %r has room again and no longer holds back its publishers", self.name)

    def on_overflow(self, count: int, *, is_refused: bool) -> None:
        """Counts notifications that did not fit and were refused or dropped."""
        if is_refused:
            self.notifications_refused += count
        else:
            self.notifications_dropped += count

    def on_caught_up(self) -> None:
        """Ends an overflow because a whole batch fitted, or the queue has room again. When it is full the next time, it
        holds back its publishers first."""
        if not self.is_overflowing:
            return
        self.is_overflowing = False
        self._full_since_s = None
        if self._is_overflow_logged:
            log.warning(
                "queue %r has room again; in all it refused %d notifications and dropped %d",
                self.name,
                self.notifications_refused,
                self.notifications_dropped,
            )

    def on_fill(self, ratio: float, *, is_ring: bool = False) -> None:
        """Handles a new fill ratio: the used part of the bound, by messages or by bytes, whichever is higher. A ring
        drops its oldest message for every new one, so it is meant to be full and never near its bound."""
        self.fill_ratio = ratio
        if is_ring:
            self.is_near = False
        elif ratio >= NEAR_RATIO and not self.is_near:
            self.is_near = True
            log.warning("queue %r is %.0f %% full: its consumers are slow, or it has none", self.name, 100 * ratio)
        elif ratio < CALM_RATIO and self.is_near:
            self.is_near = False
            log.warning("queue %r is down to %.0f %% full", self.name, 100 * ratio)
        if ratio < CALM_RATIO:
            self.on_caught_up()
