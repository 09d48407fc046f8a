"""When to try again what a broker has refused: after the time that it asks for, and a backoff of one's own beside.

The same RBT that paces checks, alone, as nothing is checked here. It grows with each refusal and is varied: those who
were refused together, and told the same time, do not come back together. A time that is no time counts as missing, and
none is taken for more than `RETRY_AFTER_S_MAX`.
"""

from __future__ import annotations

from typing import Final

from tidegate.client.control.backoff import BackoffSettings, Collision, FirstValue, new_backoff
from tidegate.client.control.congestion import is_time
from tidegate.client.control.variation import Uniform

RETRY_AFTER_S_MAX: Final = 30.0
_AS_LITTLE_AS_POSSIBLE: Final = BackoffSettings(first_value=FirstValue.MINIMUM)


class RetryPace:
    """Of one thing that is tried again and again."""

    def __init__(self, draw: Uniform, settings: BackoffSettings = _AS_LITTLE_AS_POSSIBLE) -> None:
        self.refusals = 0
        self._draw = draw
        self._backoff = new_backoff(settings)

    def on_refusal(self, retry_after_s: float | None) -> float:
        """Returns how long to wait."""
        self.refusals += 1
        told_s = 0.0
        if retry_after_s is not None and is_time(retry_after_s, float("inf")):
            told_s = min(retry_after_s, RETRY_AFTER_S_MAX)
        return told_s + self._backoff.on_collision(Collision(0.0, 0.0, told_s, 0.0, None), self._draw)

    def on_success(self) -> None:
        self._backoff.on_calm(0.0)
