"""AST, the adaptive strategy timeout: how long a client waits before it checks again for updates that it missed.

A client that found losses checks sooner, one that found none checks later (equation (3) of the papers). With the
estimates T and N of its losses, the interval grows in one step to where losses are expected (Algorithm 2). Other
strategies serve for comparison: no checks (step 1 of the papers), checks at fixed intervals (step 2), and a rate that
follows the response time as TCP Vegas does.

What may go wrong: overload causes losses, losses shorten the interval, and shorter intervals add load. So a congested
check does not shorten the interval, unless that is switched off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from tidegate.client.control.estimates import (
    LossEstimates,
    check_alpha,
    check_delta,
    growths_before_decrease,
    interval_before_decrease_s,
)
from tidegate.client.control.hints import MISSING
from tidegate.client.control.variation import Uniform
from tidegate.errors import ConfigError

# The gradient is the shortest response time over the current one. The rate of checks follows it.
GRADIENT_TOLERANCE: Final = 1.5
GRADIENT_MIN: Final = 0.5
GRADIENT_WEIGHT: Final = 0.2
GRADIENT_GROWTH_PER_S: Final = 0.02
GRADIENT_AFTER_FAILURE: Final = 0.7
# The range of random intervals, as a share of their mean.
RANDOM_WIDTH: Final = 1.0
GRADIENT_WIDTH: Final = 0.5


class Strategy(StrEnum):
    """What decides the interval between two checks."""

    NONE = "none"
    """Step 1: never checks. A loss is noticed only with the next notification."""
    FIXED = "fixed"
    """Step 2: always the first interval."""
    RANDOM = "random"
    """Step 2, with a random interval each time, from half to one and a half of the first one."""
    ADAPTIVE = "adaptive"
    """Step 3: equation (3)."""
    ESTIMATES_PRINTED = "estimates as printed"
    """Step 3: Algorithm 2 as printed. With correct estimates the interval stays at T / alpha forever: the jump from
    there ends at T, and the printed condition rejects it."""
    ESTIMATES = "estimates"
    """Step 3: Algorithm 2 with a jump that ends at T. Above T the interval grows by delta, up to 2 T."""
    GRADIENT = "gradient"
    """Checks less often when responses take longer than the shortest one. It ignores losses."""


# The places of the strategies in `Strategy`. The laws below take these numbers, because they are also compiled.
NONE, FIXED, RANDOM, ADAPTIVE, ESTIMATES_PRINTED, ESTIMATES, GRADIENT = range(len(Strategy))


@dataclass(frozen=True)
class IntervalSettings:
    strategy: Strategy = Strategy.ADAPTIVE
    first_s: float = 4.0
    interval_s_min: float = 0.25
    interval_s_max: float = 30.0
    """The longest staleness that the application accepts. No hint of a broker makes the client wait longer."""
    alpha: float = 2.0
    delta_s: float = 0.5
    is_frozen_by_congestion: bool = True
    forgetting_s: float = 170.0
    """For the estimates: after this time, an episode counts about a third (1/e)."""
    prior_episodes_per_s: float = 0.01
    prior_s: float = 10.0

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        check_delta(self.delta_s)
        if not 0 < self.interval_s_min <= self.interval_s_max < math.inf:
            raise ConfigError(
                "C461",
                f"check intervals are from {self.interval_s_min:g} s to {self.interval_s_max:g} s",
                "use two times above 0, the shorter one first",
            )
        if not self.interval_s_min <= self.first_s <= self.interval_s_max:
            raise ConfigError(
                "C461",
                f"the first check interval is {self.first_s:g} s",
                f"use {self.interval_s_min:g} s to {self.interval_s_max:g} s, the shortest and the longest interval",
            )
        for name in ("forgetting_s", "prior_episodes_per_s", "prior_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError("C461", f"{name} is {value:g}", "use more than 0")

    def clamp_s(self, interval_s: float) -> float:
        return min(self.interval_s_max, max(self.interval_s_min, interval_s))


@dataclass(frozen=True)
class Check:
    """The outcome of a check. `response_s` is None if no response arrived."""

    losses: int
    elapsed_s: float
    is_congested: bool
    response_s: float | None


class Interval(Protocol):
    """A strategy for the interval between checks. `interval_s` is the AST."""

    interval_s: float

    def on_check(self, check: Check, draw: Uniform) -> float:
        """Returns how long to wait before the next check."""

    def on_notified(self, losses: int, elapsed_s: float) -> float:
        """Counts notifications that arrived since the last check as a check, with the losses that they revealed.
        Returns how long to wait before the next one."""


class FixedInterval:
    """Steps 1 and 2 of the papers: no checks, or checks at fixed or random intervals."""

    def __init__(self, settings: IntervalSettings) -> None:
        self.interval_s = math.inf if settings.strategy is Strategy.NONE else settings.first_s
        self._is_random = settings.strategy is Strategy.RANDOM

    def on_check(self, check: Check, draw: Uniform) -> float:
        return vary_interval_s(self.interval_s, RANDOM_WIDTH, draw()) if self._is_random else self.interval_s

    def on_notified(self, losses: int, elapsed_s: float) -> float:
        return self.interval_s


class AdaptiveInterval:
    """Step 3 of the papers. Losses divide the interval by alpha; otherwise it grows by delta or by the estimates."""

    def __init__(self, settings: IntervalSettings) -> None:
        self.interval_s = settings.first_s
        self.estimates = LossEstimates(settings.forgetting_s, settings.prior_episodes_per_s, settings.prior_s)
        self._settings = settings
        self._strategy = list(Strategy).index(settings.strategy)

    def on_check(self, check: Check, draw: Uniform) -> float:
        settings, strategy, losses = self._settings, self._strategy, check.losses
        alpha, delta_s, expected_s, growths = settings.alpha, settings.delta_s, 0.0, 0.0
        self.estimates.on_check(losses, check.elapsed_s)
        if strategy != ADAPTIVE:
            expected_s = interval_before_decrease_s(self.estimates.episodes_per_s, alpha, delta_s)
            expected_s = max(settings.interval_s_min, expected_s)
            growths = growths_before_decrease(expected_s, alpha, delta_s)
        is_frozen = check.is_congested and settings.is_frozen_by_congestion
        self.interval_s = settings.clamp_s(
            adapt_interval_s(strategy, self.interval_s, losses, is_frozen, expected_s, growths, alpha, delta_s)
        )
        return self.interval_s

    def on_notified(self, losses: int, elapsed_s: float) -> float:
        return self.on_check(Check(losses, elapsed_s, is_congested=False, response_s=None), draw=float)


class GradientInterval:
    """Lowers the rate of checks when responses are slower than the shortest one, and raises it otherwise."""

    def __init__(self, settings: IntervalSettings) -> None:
        self.interval_s = settings.first_s
        self._shortest_s = math.inf
        self._settings = settings

    def on_check(self, check: Check, draw: Uniform) -> float:
        response_s = MISSING
        if check.response_s is not None:
            response_s = check.response_s
            self._shortest_s = min(self._shortest_s, response_s)
        self.interval_s = self._settings.clamp_s(follow_gradient_s(self.interval_s, response_s, self._shortest_s))
        return vary_interval_s(self.interval_s, GRADIENT_WIDTH, draw())

    def on_notified(self, losses: int, elapsed_s: float) -> float:
        return self.interval_s


def new_interval(settings: IntervalSettings) -> Interval:
    if settings.strategy in (Strategy.NONE, Strategy.FIXED, Strategy.RANDOM):
        return FixedInterval(settings)
    if settings.strategy is Strategy.GRADIENT:
        return GradientInterval(settings)
    return AdaptiveInterval(settings)


def adapt_interval_s(
    strategy: int,
    interval_s: float,
    losses: int,
    is_frozen: bool,
    expected_s: float,
    growths: float,
    alpha: float,
    delta_s: float,
) -> float:
    """Returns the interval after a check that found these losses, before it is bounded.

    The estimates T and N are `expected_s` and `growths`; `ADAPTIVE` does not use them."""
    if losses > 0:
        return interval_s if is_frozen else interval_s / alpha
    if strategy == ADAPTIVE:
        return interval_s + delta_s
    jumped_s = interval_s + max(1.0, growths) * delta_s
    if strategy == ESTIMATES_PRINTED:
        return jumped_s if expected_s - jumped_s > 0 else interval_s
    if interval_s < expected_s:
        return min(jumped_s, expected_s)
    # Without intervals above T, nothing would ever contradict an estimated rate of losses that is too high.
    return min(interval_s + delta_s, 2 * expected_s)


def follow_gradient_s(interval_s: float, response_s: float, shortest_s: float) -> float:
    """Returns the interval after a response, or after a failure if `response_s` is MISSING, before it is bounded."""
    rate_per_s = 1.0 / interval_s
    if response_s < 0.0:
        return 1.0 / (rate_per_s * GRADIENT_AFTER_FAILURE)
    gradient = GRADIENT_TOLERANCE * shortest_s / max(response_s, 1e-9)
    gradient = max(GRADIENT_MIN, min(1.0, gradient))
    growth_per_s = GRADIENT_GROWTH_PER_S if gradient >= 1.0 else 0.0
    return 1.0 / (rate_per_s + GRADIENT_WEIGHT * (rate_per_s * (gradient - 1.0) + growth_per_s))


def vary_interval_s(mean_s: float, width: float, uniform: float) -> float:
    """Returns a random interval around its mean, from a uniform draw."""
    return mean_s * (1.0 - 0.5 * width + width * uniform)
