"""The long-run behaviour of an adaptive strategy as formulas, and the estimates of one client about its losses.

The strategy divides its check interval by alpha if a check found losses, and adds delta to it otherwise. Losses come in
episodes; a burst that one check finds is one episode. In the long run:

    T    the mean interval before a decrease, that is before a check that finds losses
    N    the mean number of growths between two decreases
    K    the mean number of losses that the decreasing check finds: near 1 for single losses, far above for bursts
    tau  the mean interval of all checks, so that m clients together check m / tau times a second

The papers use T, N and K and refer to earlier work for the formulas; the ones here were derived independently. With X
the interval at a decrease, X² is a sum of exponential variables whose weights shrink by 1/alpha² a step, which gives T
for random losses. The formulas agree with direct simulation within 3 % as long as delta is well below T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from statistics import fmean, pvariance
from typing import Final

from tidegate.errors import ConfigError

ALPHA_MIN: Final = 1.01
"""With an alpha nearer to 1 the interval hardly decreases, and c(alpha) is a product of too many factors."""
ALPHA_MAX: Final = 1000.0


class LossFlow(StrEnum):
    """How episodes of losses follow each other."""

    RANDOM = "random"
    REGULAR = "regular"


def decrease_constant(alpha: float) -> float:
    """Returns c(alpha). T of random losses is c(alpha) · √(2 delta / rate), minus a correction for whole steps."""
    check_alpha(alpha)
    return _decrease_constant(alpha)


@cache
def _decrease_constant(alpha: float) -> float:
    q = alpha**-2.0
    product, power = math.gamma(1.5), q
    while power > 1e-17:
        product *= (1 - power * math.sqrt(q)) / (1 - power)
        power *= q
    return product


def interval_before_decrease_s(
    episodes_per_s: float, alpha: float, delta_s: float, flow: LossFlow = LossFlow.RANDOM
) -> float:
    """Returns T, or 0 if delta is so large that the formula for random losses does not apply."""
    _check_positive("the rate of loss episodes", episodes_per_s)
    check_delta(delta_s)
    if flow is LossFlow.RANDOM:
        return expect_interval_s(episodes_per_s, decrease_constant(alpha), alpha, delta_s)
    check_alpha(alpha)
    a = (alpha * alpha - 1) / (2 * alpha * alpha * delta_s)
    b = (alpha + 1) / (2 * alpha)
    return (math.sqrt(b * b + 4 * a / episodes_per_s) - b) / (2 * a)


def expect_interval_s(episodes_per_s: float, constant: float, alpha: float, delta_s: float) -> float:
    """Returns T of random losses, given c(alpha)."""
    smooth_s = constant * math.sqrt(2 * delta_s / episodes_per_s)
    return max(0.0, smooth_s - delta_s * alpha / (2 * (alpha * alpha - 1)))


def growths_before_decrease(interval_s: float, alpha: float, delta_s: float) -> float:
    """Returns N for the interval T. It is exact for any flow of losses."""
    check_alpha(alpha)
    check_delta(delta_s)
    return expect_growths(interval_s, alpha, delta_s)


def expect_growths(interval_s: float, alpha: float, delta_s: float) -> float:
    return interval_s * (1 - 1 / alpha) / delta_s


def losses_found(
    episodes_per_s: float, interval_s: float, flow: LossFlow = LossFlow.RANDOM, losses_per_episode: float = 1.0
) -> float:
    """Returns K for the interval T."""
    _check_positive("the rate of loss episodes", episodes_per_s)
    _check_positive("the interval", interval_s)
    expected = episodes_per_s * interval_s
    episodes = max(1.0, expected) if flow is LossFlow.REGULAR else expected / -math.expm1(-expected)
    return losses_per_episode * episodes


def mean_interval_s(episodes_per_s: float, alpha: float, delta_s: float, flow: LossFlow = LossFlow.RANDOM) -> float:
    """Returns tau."""
    before_s = interval_before_decrease_s(episodes_per_s, alpha, delta_s, flow)
    cycle_s = 1 / episodes_per_s + (before_s / 2 if flow is LossFlow.RANDOM else 0.0)
    return cycle_s / (growths_before_decrease(before_s, alpha, delta_s) + 1)


def delta_for_load_s(clients: int, episodes_per_s: float, alpha: float, served_per_s: float, share: float) -> float:
    """Returns the smallest delta with which the checks of all clients take at most this share of the broker's capacity.

    The formula assumes a small delta, where tau is nearly 1 / (rate N). With a larger delta the checks take somewhat
    more; `mean_interval_s` computes how much."""
    _check_positive("the number of clients", clients)
    _check_positive("the rate of loss episodes", episodes_per_s)
    _check_positive("the rate of service", served_per_s)
    _check_positive("the share for checks", share)
    root = clients * decrease_constant(alpha) * (1 - 1 / alpha) / (share * served_per_s)
    return 2 * episodes_per_s * root * root


def overload_probability(requests_mean: float, requests_max: int) -> float:
    """Returns the probability that a Poisson flow with this mean brings `requests_max` requests or more.

    Synchronised clients are no Poisson flow: their index of dispersion is far above 1 (see `index_of_dispersion`), and
    they overload a broker much more often."""
    if not 0 <= requests_mean < math.inf:
        raise _wrong("the mean number of requests", requests_mean, "use 0 or more")
    if requests_max <= 0:
        return 1.0
    if requests_mean == 0:
        return 0.0
    # Sum the smaller tail, from its largest term outwards: 1 minus the larger one would lose its digits.
    if requests_max > requests_mean:
        return _sum_of_terms(requests_mean, requests_max, 1)
    return 1.0 - _sum_of_terms(requests_mean, requests_max - 1, -1)


def _sum_of_terms(mean: float, first: int, step: int) -> float:
    count, total = first, 0.0
    term = math.exp(first * math.log(mean) - mean - math.lgamma(first + 1))
    while term > total * 1e-17 and count >= 0:
        total += term
        term *= mean / (count + 1) if step > 0 else count / mean
        count += step
    return min(1.0, total)


def index_of_dispersion(counts: Sequence[int]) -> float:
    """Returns variance over mean of the requests in equal spans of time: 1 for a Poisson flow, more for bursts, NaN if
    there was no request."""
    mean = fmean(counts) if counts else 0.0
    return pvariance(counts, mean) / mean if mean > 0 else math.nan


class LossEstimates:
    """One client's estimates of its losses. Observations are forgotten exponentially, and a prior counts like `prior_s`
    seconds of them.

    T is computed from the rate of episodes, never as a mean of the client's own past intervals. A strategy that is
    capped at T never waits longer than T, so such a mean could only fall."""

    __slots__ = ("_elapsed_s", "_episodes", "_forgetting_s", "_losses", "_prior_episodes", "_prior_s")

    def __init__(self, forgetting_s: float, prior_episodes_per_s: float, prior_s: float) -> None:
        self._forgetting_s = forgetting_s
        self._prior_episodes = prior_episodes_per_s * prior_s
        self._prior_s = prior_s
        self._episodes = self._losses = self._elapsed_s = 0.0

    def on_check(self, losses: int, elapsed_s: float) -> None:
        kept = math.exp(-elapsed_s / self._forgetting_s)
        self._episodes = self._episodes * kept + (1.0 if losses > 0 else 0.0)
        self._losses = self._losses * kept + losses
        self._elapsed_s = self._elapsed_s * kept + elapsed_s

    @property
    def episodes_per_s(self) -> float:
        return (self._episodes + self._prior_episodes) / (self._elapsed_s + self._prior_s)

    @property
    def losses_per_episode(self) -> float:
        """The estimate of K; 0 before the first episode."""
        return self._losses / self._episodes if self._episodes > 0 else 0.0


def check_alpha(alpha: float) -> None:
    if not ALPHA_MIN <= alpha <= ALPHA_MAX:
        raise _wrong("alpha", alpha, f"use {ALPHA_MIN:g} to {ALPHA_MAX:g}, such as 2: intervals are divided by it")


def check_delta(delta_s: float) -> None:
    if not 0 < delta_s < math.inf:
        raise _wrong("delta", delta_s, "use seconds above 0, such as 0.5: intervals grow by it")


def _check_positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise _wrong(what, value, "use more than 0")


def _wrong(what: str, value: float, remedy: str) -> ConfigError:
    return ConfigError("C460", f"{what} is {value:g}", remedy)
