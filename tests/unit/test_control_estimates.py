"""The formulas of active control agree with a direct simulation of the strategy, and with sums of all terms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.client.control.estimates import (
    LossEstimates,
    LossFlow,
    decrease_constant,
    delta_for_load_s,
    growths_before_decrease,
    index_of_dispersion,
    interval_before_decrease_s,
    losses_found,
    mean_interval_s,
    overload_probability,
)
from tidegate.errors import ConfigError

EPISODES = 40_000


@dataclass(frozen=True)
class LongRun:
    interval_before_decrease_s: float
    growths: float
    losses: float
    mean_interval_s: float


def simulate(flow: LossFlow, episodes_per_s: float, alpha: float, delta_s: float, burst: float = 1.0) -> LongRun:
    """Simulates the strategy check by check, with a recorded flow of losses."""
    rng = np.random.default_rng(5)
    gaps_s = np.full(EPISODES, 1.0) if flow is LossFlow.REGULAR else rng.exponential(size=EPISODES)
    lost_at_s = np.cumsum(gaps_s / episodes_per_s)
    sizes = rng.geometric(1 / burst, EPISODES) if burst > 1 else np.ones(EPISODES, int)
    found_in_all = np.concatenate([[0], np.cumsum(sizes)])
    now_s, interval_s, grown, checks, seen = 0.0, delta_s, 0, 0, 0
    decreases: list[tuple[float, int, int]] = []
    while seen < EPISODES:
        now_s += interval_s
        checks += 1
        found = int(np.searchsorted(lost_at_s, now_s, side="right"))
        if found > seen:
            decreases.append((interval_s, grown, int(found_in_all[found] - found_in_all[seen])))
            seen, grown, interval_s = found, 0, interval_s / alpha
        else:
            grown, interval_s = grown + 1, interval_s + delta_s
    means = np.mean(decreases, axis=0)
    return LongRun(float(means[0]), float(means[1]), float(means[2]), now_s / checks)


@pytest.mark.parametrize(
    ("episodes_per_s", "alpha", "delta_s"),
    [(0.01, 2, 0.5), (0.05, 2, 0.5), (0.2, 2, 0.5), (0.05, 1.5, 0.5), (0.05, 4, 0.5), (0.05, 2, 5.0)],
)
@pytest.mark.parametrize(("flow", "burst"), [(LossFlow.RANDOM, 1.0), (LossFlow.REGULAR, 1.0), (LossFlow.RANDOM, 8.0)])
def test_the_formulas_are_what_the_strategy_does(
    flow: LossFlow, burst: float, episodes_per_s: float, alpha: float, delta_s: float
) -> None:
    long_run = simulate(flow, episodes_per_s, alpha, delta_s, burst)
    before_s = interval_before_decrease_s(episodes_per_s, alpha, delta_s, flow)
    assert before_s == pytest.approx(long_run.interval_before_decrease_s, rel=0.04)
    assert growths_before_decrease(before_s, alpha, delta_s) == pytest.approx(long_run.growths, rel=0.04)
    assert losses_found(episodes_per_s, before_s, flow, burst) == pytest.approx(long_run.losses, rel=0.04)
    assert mean_interval_s(episodes_per_s, alpha, delta_s, flow) == pytest.approx(long_run.mean_interval_s, rel=0.04)


def test_the_constant_of_the_decrease() -> None:
    assert [round(decrease_constant(alpha), 3) for alpha in (1.5, 2, 4)] == [1.284, 1.080, 0.933]
    assert decrease_constant(1000) == pytest.approx(math.gamma(1.5), rel=1e-3), "only the last step counts"


def test_the_sizing_rule_keeps_the_checks_within_their_share() -> None:
    delta_s = delta_for_load_s(clients=2000, episodes_per_s=0.05, alpha=2, served_per_s=1000, share=0.5)
    assert delta_s == pytest.approx(0.47, abs=0.005)
    long_run = simulate(LossFlow.RANDOM, 0.05, 2, delta_s)
    assert 2000 / long_run.mean_interval_s == pytest.approx(500, rel=0.1)
    assert 2000 / simulate(LossFlow.RANDOM, 0.05, 2, delta_s / 4).mean_interval_s > 800


@given(st.floats(0.01, 300), st.integers(-2, 400))
def test_the_tail_is_the_sum_of_all_its_terms(mean: float, at_least: int) -> None:
    def term(number: int) -> float:
        return math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))

    tail = math.fsum(term(number) for number in range(max(0, at_least), 1200))
    assert overload_probability(mean, at_least) == pytest.approx(tail, rel=1e-9, abs=1e-12)


def test_the_tail_is_not_the_single_term_that_the_paper_prints() -> None:
    printed = math.exp(20 * math.log(40) - 40 - math.lgamma(21))
    assert overload_probability(40, 20) > 0.999
    assert printed < 0.001
    assert overload_probability(0, 1) == 0


def test_dispersion_is_that_of_the_flow() -> None:
    rng = np.random.default_rng(2)
    poisson = rng.poisson(40, 5000).tolist()
    assert index_of_dispersion(poisson) == pytest.approx(1, abs=0.1)
    assert index_of_dispersion([400 if number % 10 == 0 else 0 for number in range(1000)]) == pytest.approx(360)
    assert math.isnan(index_of_dispersion([]))
    assert math.isnan(index_of_dispersion([0, 0]))
    overloads = sum(number >= 60 for number in poisson) / len(poisson)
    assert overload_probability(40, 60) == pytest.approx(overloads, abs=0.002)


def test_estimates_find_the_rate_and_the_kind_of_losses() -> None:
    rng = np.random.default_rng(7)
    single, bursts = (LossEstimates(2000, 0.01, 10) for _ in range(2))
    for _ in range(20_000):
        is_lost = rng.random() < 1 - math.exp(-0.05 * 2)
        single.on_check(int(is_lost), 2.0)
        bursts.on_check(int(rng.geometric(1 / 8)) if is_lost else 0, 2.0)
    assert single.episodes_per_s == pytest.approx(0.05, rel=0.25)
    assert single.losses_per_episode == pytest.approx(1)
    assert bursts.losses_per_episode == pytest.approx(8, rel=0.25)


def test_estimates_forget_and_start_from_their_prior() -> None:
    estimates = LossEstimates(100, 0.2, 10)
    assert estimates.episodes_per_s == pytest.approx(0.2)
    assert estimates.losses_per_episode == 0
    for number in count():
        before = estimates.episodes_per_s
        estimates.on_check(0, 5.0)
        assert estimates.episodes_per_s < before
        if estimates.episodes_per_s < 0.05:
            break
        assert number < 100


@pytest.mark.parametrize("alpha", [1, 1.0001, 0, -2, math.nan, math.inf])
def test_an_alpha_that_decreases_nothing_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"C460: alpha is .*; use 1.01 to 1000, such as 2"):
        decrease_constant(alpha)


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
def test_what_is_not_positive_is_refused_by_name(wrong: float) -> None:
    with pytest.raises(ConfigError, match=r"C460: delta is"):
        interval_before_decrease_s(0.1, 2, wrong)
    with pytest.raises(ConfigError, match=r"C460: the rate of loss episodes is"):
        mean_interval_s(wrong, 2, 0.5)
    with pytest.raises(ConfigError, match=r"C460: the interval is"):
        losses_found(0.1, wrong)
    with pytest.raises(ConfigError, match=r"C460: the share for checks is"):
        delta_for_load_s(10, 0.1, 2, 100, wrong)


def test_a_flow_without_a_mean_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"C460: the mean number of requests is nan; use 0 or more"):
        overload_probability(math.nan, 3)
