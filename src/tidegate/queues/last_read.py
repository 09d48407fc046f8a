"""When a queue was last read, and whether it has been unread for so long that it is dropped.

The time is kept in the store, so that it survives restarts and other brokers see it. How often it is written depends on
how long the queue may stay unread. Two clocks must agree before a queue is dropped. By the wall clock it has been
unread for `expires_s`. By a clock that does not jump, this process has seen it unread for as long, or for an hour. So a
reader that is about to return loses its queue neither to a broker that was down for a week nor to a clock that jumps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NOTE_S_MAX: Final = 60.0
WATCH_S_MAX: Final = 3600.0


@dataclass(slots=True)
class LastRead:
    """`at` is the last read in seconds since 1970, 0 while unknown, and `noted_at` is the value in the store. `seen_s`,
    by a monotonic clock, is when this process started watching or last saw a reader."""

    seen_s: float
    at: float = 0.0
    noted_at: float = 0.0
    is_known: bool = False

    def on_read(self, at: float, now_s: float) -> None:
        """Records that a consumer reads the queue through this broker."""
        self.at = max(self.at, at)
        self.seen_s = now_s

    def on_noted(self, noted_at: float | None, at: float) -> None:
        """Takes over the value from the store. A queue that was never read counts as read now, at `at`."""
        self.is_known = True
        if noted_at is None:
            self.at = self.at or at
        else:
            self.noted_at = noted_at
            self.at = max(self.at, noted_at)

    def must_be_noted(self, expires_s: float) -> bool:
        return self.at - self.noted_at >= note_period_s(expires_s)

    def has_expired(self, expires_s: float, at: float, now_s: float) -> bool:
        """Returns whether the queue has been unread for too long. Another broker may not have stored its latest read
        yet, so two of its periods are added."""
        unread_s = at - self.at - 2 * note_period_s(expires_s)
        return unread_s >= expires_s and now_s - self.seen_s >= min(expires_s, WATCH_S_MAX)


def note_period_s(expires_s: float) -> float:
    return min(NOTE_S_MAX, expires_s / 10)
