"""A clock for entries that are remembered for a limited time. It continues from the newest stamp in a store, and never
jumps.

Inside a process it follows the monotonic clock. The time in which no process ran does not count. So a queue does not
forget when the system clock is set forward, and does not remember for ever when it is set back.
"""

from __future__ import annotations

from collections.abc import Callable


class SteadyClock:
    """Follows the clock `monotonic`, starting at `newest_s`, the newest stamp that such a clock has made."""

    def __init__(self, monotonic: Callable[[], float], newest_s: float) -> None:
        self._monotonic = monotonic
        self._offset_s = newest_s - monotonic()

    def now_s(self) -> float:
        return self._monotonic() + self._offset_s
