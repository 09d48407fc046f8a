"""Retries: never earlier than the broker allows, later after each refusal, and not of all clients at the same time."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tidegate.client.control import BackoffSettings, RetryPace
from tidegate.client.control.retry import RETRY_AFTER_S_MAX

LONGEST_S = 2.0 * BackoffSettings().backoff_s_max
ANY = st.none() | st.floats()


@given(st.lists(ANY, max_size=40), st.integers())
def test_a_wait_is_at_least_what_the_broker_asks_for_and_has_a_bound(told: list[float | None], seed: int) -> None:
    pace = RetryPace(Random(seed).random)
    for retry_after_s in told:
        wait_s = pace.on_refusal(retry_after_s)
        is_sane = retry_after_s is not None and 0 <= retry_after_s < math.inf
        assert wait_s >= (min(retry_after_s or 0.0, RETRY_AFTER_S_MAX) if is_sane else 0.0)
        assert wait_s <= RETRY_AFTER_S_MAX + LONGEST_S
    assert pace.refusals == len(told)


def test_refusals_in_a_row_wait_longer_and_a_success_forgets_them() -> None:
    pace = RetryPace(lambda: 0.5)
    waits = [pace.on_refusal(1.0) for _ in range(10)]
    assert waits == sorted(waits)
    assert waits[0] < 1.2
    assert waits[-1] == 1.0 + BackoffSettings().backoff_s_max
    pace.on_success()
    assert pace.on_refusal(1.0) == waits[0]


def test_those_who_are_told_the_same_time_come_back_apart() -> None:
    waits = sorted(RetryPace(Random(seed).random).on_refusal(1.0) for seed in range(100))
    assert waits[-1] - waits[0] > 0.15
    assert max(later - sooner for sooner, later in pairwise(waits)) < 0.05
