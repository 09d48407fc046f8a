"""When to retry a request that a broker has refused: after the time that it asks for, plus a random backoff.

The backoff is the RBT that paces checks; there is no AST, because nothing is checked here. It grows with each refusal
and is random, so that clients that were refused together, with the same time, do not return together. An invalid time
counts as missing, and longer ones are cut to `RETRY_AFTER_S_MAX`.
"""

from __future__ import annotations

from random import Random
from typing import Final

from tidegate.client.control.backoff import BackoffSettings, Collision, FirstValue, new_backoff
from tidegate.client.control.hints import is_time
from tidegate.client.control.variation import Uniform

RETRY_AFTER_S_MAX: Final = 30.0
_DEFAULT_BACKOFF: Final = BackoffSettings(first_value=FirstValue.MINIMUM)


class RetryPace:
    """Paces the retries of one operation. By default it has its own random generator, so that it does not disturb the
    program's `random`, which may be seeded."""

    def __init__(self, draw: Uniform | None = None, settings: BackoffSettings = _DEFAULT_BACKOFF) -> None:
        self.refusals = 0
        self._draw = draw or Random().random  # noqa: S311
        self._backoff = new_backoff(settings)

    def on_refusal(self, retry_after_s: float | None) -> float:
        """Returns how long to wait before the next attempt."""
        self.refusals += 1
        told_s = 0.0
        if retry_after_s is not None and is_time(retry_after_s, float("inf")):
            told_s = min(retry_after_s, RETRY_AFTER_S_MAX)
        return told_s + self._backoff.on_collision(Collision(0.0, 0.0, told_s, 0.0), self._draw)

    def on_success(self) -> None:
        self._backoff.on_calm(0.0)
