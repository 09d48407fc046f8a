"""The recent rates, compared with known counts."""

from __future__ import annotations

import random

import pytest

from tidegate.listeners.http.rates import SAMPLE_INTERVAL_S, SAMPLES_MAX, RecentRates


@pytest.mark.parametrize("seed", range(20))
def test_rates_times_their_seconds_are_what_was_counted(seed: int) -> None:
    rng = random.Random(seed)
    now_s, accepted, delivered = 100.0, 0, 0
    rates = RecentRates(now_s)
    counted = {now_s + 1e9: (accepted, delivered)}
    for _ in range(rng.randrange(2, 300)):
        now_s += rng.choice([0.25, 0.26, 0.5, 3.0])
        accepted += rng.randrange(500)
        delivered += rng.randrange(5000)
        counted[round(now_s + 1e9, 3)] = (accepted, delivered)
        if rates.is_due(now_s):
            rates.observe(now_s, now_s + 1e9, accepted, delivered)
    before = 100.0 + 1e9
    came, went = map(float, counted[before])
    for rate in rates.recent:
        seconds = rate.at - before
        assert seconds >= SAMPLE_INTERVAL_S - 1e-3
        came, went, before = came + rate.accepted * seconds, went + rate.delivered * seconds, rate.at
        assert (came, went) == pytest.approx(counted[rate.at], abs=1 + 0.02 * len(counted))
    assert now_s + 1e9 - before < SAMPLE_INTERVAL_S + 1e-3


def test_only_the_last_minutes_are_kept() -> None:
    rates = RecentRates(0.0)
    for second in range(1, SAMPLES_MAX + 50):
        rates.observe(float(second), float(second), 10 * second, 0)
    assert [rate.at for rate in rates.recent] == [float(second) for second in range(50, SAMPLES_MAX + 50)]
    assert {rate.accepted for rate in rates.recent} == {10.0}
