"""A connection publishes no more than its rate on average, and at most one second's worth at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.listeners.rate import RateLimit


@given(st.floats(1, 1000), st.lists(st.tuples(st.integers(1, 500), st.floats(0, 2)), max_size=50))
def test_whoever_waits_as_told_stays_within_the_rate(rate_s: float, batches: list[tuple[int, float]]) -> None:
    limit = RateLimit(rate_s)
    now_s, taken, largest = 0.0, 0, 0
    for notifications, pause_s in batches:
        now_s += pause_s
        wait_s = limit.take(notifications, now_s)
        taken, largest = taken + notifications, max(largest, notifications)
        assert taken <= rate_s * (now_s + 1) + largest + 1e-6
        assert limit.is_exhausted(now_s) == (wait_s > 0)
        now_s += wait_s


@given(st.lists(st.integers(1, 10_000)))
def test_no_limit_never_waits(batches: list[int]) -> None:
    limit = RateLimit(0)
    assert all(limit.take(notifications, 0.0) == 0 for notifications in batches)
    assert not limit.is_exhausted(0.0)
