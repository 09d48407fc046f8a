"""AST, the adaptive strategy timeout: how long a client waits until it checks again for updates that it missed.

A client that found losses checks sooner, one that found none checks later (equation (3) of the papers). With the
estimates T and N of its losses it grows in one step to where losses are expected (Algorithm 2). Steps 1 and 2 of the
papers, no checks and checks at fixed intervals, are here too, and so is a rate that follows the response time as TCP
Vegas does, to compare with.

What may go wrong: losses that are caused by overload shorten the interval, which is more load. So a check that was
congested itself does not shorten it, unless that is switched off.
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
from tidegate.client.control.variation import Uniform
from tidegate.errors import ConfigError

# Gradient: how a rate follows the shortest response time over this one.
GRADIENT_TOLERANCE: Final = 1.5
GRADIENT_MIN: Final = 0.5
GRADIENT_WEIGHT: Final = 0.2
GRADIENT_GROWTH_PER_S: Final = 0.02
GRADIENT_AFTER_FAILURE: Final = 0.7


class Strategy(StrEnum):
    """What decides the interval between two checks."""

    NONE = "none"
    """Step 1: never checks; what is lost stays lost until the next notification."""
    FIXED = "fixed"
    """Step 2: the first interval for ever."""
    RANDOM = "random"
    """Step 2, drawn anew each time, from half to one and a half of the first interval."""
    ADAPTIVE = "adaptive"
    """Step 3: equation (3)."""
    ESTIMATES_PRINTED = "estimates as printed"
    """Step 3: Algorithm 2 as printed. With true estimates it stays at T / alpha for ever: the jump from there ends at
    T, and the printed condition takes it back."""
    ESTIMATES = "estimates"
    """Step 3: Algorithm 2 whose jump ends at T; above T it grows by delta, up to 2 T."""
    GRADIENT = "gradient"
    """Checks less often as responses take longer than the shortest one; losses do not matter to it."""


@dataclass(frozen=True)
class IntervalSettings:
    strategy: Strategy = Strategy.ADAPTIVE
    first_s: float = 4.0
    interval_s_min: float = 0.25
    interval_s_max: float = 30.0
    """The worst staleness that the application accepts. No hint of a broker makes the client wait longer."""
    alpha: float = 2.0
    delta_s: float = 0.5
    is_frozen_by_congestion: bool = True
    forgetting_s: float = 170.0
    """Of the estimates: after this time without losses, a third of an episode is left."""
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
    """What a check has shown. `response_s` is None when no response came."""

    losses: int
    elapsed_s: float
    is_congested: bool
    response_s: float | None


class Interval(Protocol):
    """`interval_s` is the AST."""

    interval_s: float

    def on_check(self, check: Check, draw: Uniform) -> float:
        """Returns how long to wait for the next one."""

    def on_notified(self, losses: int, elapsed_s: float) -> float:
        """Notifications have come instead of a check; with the losses that they have shown they count as one."""


class FixedInterval:
    """Steps 1 and 2."""

    def __init__(self, settings: IntervalSettings) -> None:
        self.interval_s = math.inf if settings.strategy is Strategy.NONE else settings.first_s
        self._is_random = settings.strategy is Strategy.RANDOM

    def on_check(self, check: Check, draw: Uniform) -> float:
        return self.interval_s * (0.5 + draw()) if self._is_random else self.interval_s

    def on_notified(self, losses: int, elapsed_s: float) -> float:
        return self.interval_s


class AdaptiveInterval:
    """Step 3: shorter by the factor alpha after losses, longer by delta, or as the estimates tell, without."""

    def __init__(self, settings: IntervalSettings) -> None:
        self.interval_s = settings.first_s
        self.estimates = LossEstimates(settings.forgetting_s, settings.prior_episodes_per_s, settings.prior_s)
        self._settings = settings

    def on_check(self, check: Check, draw: Uniform) -> float:
        self.estimates.on_check(check.losses, check.elapsed_s)
        if check.losses == 0:
            self._grow()
        elif not (check.is_congested and self._settings.is_frozen_by_congestion):
            self.interval_s /= self._settings.alpha
        self.interval_s = self._settings.clamp_s(self.interval_s)
        return self.interval_s

    def on_notified(self, losses: int, elapsed_s: float) -> float:
        return self.on_check(Check(losses, elapsed_s, is_congested=False, response_s=None), draw=float)

    def _grow(self) -> None:
        settings = self._settings
        if settings.strategy is Strategy.ADAPTIVE:
            self.interval_s += settings.delta_s
            return
        expected_s = interval_before_decrease_s(self.estimates.episodes_per_s, settings.alpha, settings.delta_s)
        expected_s = max(settings.interval_s_min, expected_s)
        growths = max(1.0, growths_before_decrease(expected_s, settings.alpha, settings.delta_s))
        grown_s = self.interval_s + growths * settings.delta_s
        if settings.strategy is Strategy.ESTIMATES_PRINTED:
            if expected_s - grown_s > 0:
                self.interval_s = grown_s
        elif self.interval_s < expected_s:
            self.interval_s = min(grown_s, expected_s)
        else:
            # Without intervals above T the estimate of the rate of losses would never be put to the test.
            self.interval_s = min(self.interval_s + settings.delta_s, 2 * expected_s)


class GradientInterval:
    """A rate of checks that shrinks with the shortest response time over this one, and grows while that is near 1."""

    def __init__(self, settings: IntervalSettings) -> None:
        self.interval_s = settings.first_s
        self._shortest_s = math.inf
        self._settings = settings

    def on_check(self, check: Check, draw: Uniform) -> float:
        rate_per_s = 1.0 / self.interval_s
        if check.response_s is None:
            rate_per_s *= GRADIENT_AFTER_FAILURE
        else:
            self._shortest_s = min(self._shortest_s, check.response_s)
            gradient = GRADIENT_TOLERANCE * self._shortest_s / max(check.response_s, 1e-9)
            gradient = max(GRADIENT_MIN, min(1.0, gradient))
            growth_per_s = GRADIENT_GROWTH_PER_S if gradient >= 1.0 else 0.0
            rate_per_s += GRADIENT_WEIGHT * (rate_per_s * (gradient - 1.0) + growth_per_s)
        self.interval_s = self._settings.clamp_s(1.0 / rate_per_s)
        return self.interval_s * (0.75 + 0.5 * draw())

    def on_notified(self, losses: int, elapsed_s: float) -> float:
        return self.interval_s


def new_interval(settings: IntervalSettings) -> Interval:
    if settings.strategy in (Strategy.NONE, Strategy.FIXED, Strategy.RANDOM):
        return FixedInterval(settings)
    if settings.strategy is Strategy.GRADIENT:
        return GradientInterval(settings)
    return AdaptiveInterval(settings)
