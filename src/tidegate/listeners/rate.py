"""The rate limit of a connection or HTTP client: a token bucket that holds one second's worth of notifications."""

from __future__ import annotations


class RateLimit:
    """Allows `rate_s` notifications a second on average, and bursts of one second's worth; 0 means no limit.

    A batch is never split. It may overdraw the bucket, and the next batch waits until the debt is paid."""

    def __init__(self, rate_s: float) -> None:
        self._rate_s = rate_s
        self._tokens = rate_s
        self._filled_s: float | None = None

    def take(self, notifications: int, now_s: float) -> float:
        """Takes one token for each notification and returns how long to wait before the next batch."""
        if self._rate_s == 0:
            return 0.0
        self._fill(now_s)
        self._tokens -= notifications
        return max(0.0, -self._tokens / self._rate_s)

    def is_exhausted(self, now_s: float) -> bool:
        if self._rate_s == 0:
            return False
        self._fill(now_s)
        return self._tokens < 0

    def _fill(self, now_s: float) -> None:
        passed_s = 0.0 if self._filled_s is None else now_s - self._filled_s
        self._filled_s = now_s
        self._tokens = min(self._rate_s, self._tokens + passed_s * self._rate_s)
