"""RBT, the random backoff timeout: how much longer a client waits because the broker is congested.

A collision is a request that met congestion. The first one sets a first value, and each further one multiplies it by
beta, up to a bound. A response without congestion resets it. The actual wait is drawn at random around that value, so
that clients that collided do not collide again.

The papers' Algorithm 3 sets one variable and multiplies another, which is 0: taken literally, it never backs off.
`PRINTED` reads both as one variable, as was probably meant.

What may go wrong: the bound is too low. The papers' bound of five average durations is milliseconds, but queues need
seconds to drain. Twice the time in which the broker serves every client once is enough. Brokers may advertise it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from tidegate.client.control.hints import MISSING
from tidegate.client.control.variation import DEVIATION, Uniform, Variation, to_normal, vary_s
from tidegate.errors import ConfigError

PRINTED_DURATIONS_MAX: Final = 5.0
PACES_MAX: Final = 2.0
"""The longest backoff, as a multiple of the pace that the broker advertises."""
ATTEMPTS_MAX: Final = 20


class BackoffKind(StrEnum):
    NONE = "none"
    PRINTED = "as printed"
    REPAIRED = "repaired"
    FULL_JITTER = "full jitter"
    """Random from 0 to a span that doubles with each collision, as large cloud services advise their clients."""


class FirstValue(StrEnum):
    """The source of the first value after a response without congestion."""

    MINIMUM = "minimum"
    INTERVALS = "history of intervals"
    """The interval before the last response without congestion, minus the current one."""
    SUCCESS = "history of success"
    """The backoffs that ended earlier congestion: the mean of the last one and the remembered value."""
    RATE = "rate of the broker"
    """The interval that the broker asks for, minus the current one."""
    EXCESS = "excess delay"
    """Twice the excess of the response time. The excess is the time that the backlog needs to drain."""


# The places of the members in `FirstValue`. The laws below take these numbers, because they are also compiled.
MINIMUM, INTERVALS, SUCCESS, RATE, EXCESS = range(len(FirstValue))


@dataclass(frozen=True)
class BackoffSettings:
    kind: BackoffKind = BackoffKind.REPAIRED
    first_value: FirstValue = FirstValue.EXCESS
    variation: Variation = Variation.UNIFORM
    beta: float = 2.0
    backoff_s_min: float = 0.1
    backoff_s_max: float = 5.0
    """The bound until the broker advertises its pace."""

    def __post_init__(self) -> None:
        if not 1 < self.beta < math.inf:
            raise _wrong("beta", self.beta, "use more than 1, such as 2: backoffs are multiplied by it")
        if not 0 < self.backoff_s_min < math.inf:
            raise _wrong("the shortest backoff", self.backoff_s_min, "use seconds above 0, such as 0.1")
        if not self.backoff_s_min <= self.backoff_s_max < math.inf:
            raise _wrong(
                "the longest backoff", self.backoff_s_max, f"use {self.backoff_s_min:g} s, the shortest, or more"
            )


@dataclass(frozen=True)
class Collision:
    """What a client knows about a request that met congestion."""

    interval_s: float
    """How long the client waited before the request."""
    adaptive_s: float
    """The AST after the request."""
    excess_s: float
    average_s: float
    pace_s: float = MISSING
    """The interval that the broker asks each client to keep."""


class Backoff(Protocol):
    """Computes backoffs. `backoff_s` is the RBT before its random variation; 0 without congestion."""

    backoff_s: float

    def on_calm(self, interval_s: float) -> None:
        """Resets the backoff after a response without congestion. `interval_s` is the wait before the request."""

    def on_collision(self, collision: Collision, draw: Uniform) -> float:
        """Returns how long to back off after a collision."""


class NoBackoff:
    backoff_s = 0.0

    def on_calm(self, interval_s: float) -> None:
        pass

    def on_collision(self, collision: Collision, draw: Uniform) -> float:
        return 0.0


class PrintedBackoff:
    """Algorithm 3 as printed, with its two variables read as one. The first value is beta times the minimum, and the
    bound is five average durations. The normal variation remains in the variable."""

    def __init__(self, settings: BackoffSettings) -> None:
        self.backoff_s = 0.0
        self._settings = settings

    def on_calm(self, interval_s: float) -> None:
        self.backoff_s = 0.0

    def on_collision(self, collision: Collision, draw: Uniform) -> float:
        settings, normal = self._settings, to_normal(draw(), draw())
        self.backoff_s = printed_backoff_s(
            self.backoff_s, collision.average_s, normal, settings.beta, settings.backoff_s_min, settings.backoff_s_max
        )
        return self.backoff_s


class RandomBackoff:
    """Algorithm 3 repaired: one variable, which grows from the second collision on. Random draws do not change it."""

    def __init__(self, settings: BackoffSettings) -> None:
        self.backoff_s = 0.0
        self._settings = settings
        self._first_value = list(FirstValue).index(settings.first_value)
        self._calm_interval_s = 0.0
        self._success_s = 0.0

    def on_calm(self, interval_s: float) -> None:
        self._success_s = learn_success_s(self._success_s, self.backoff_s)
        self._calm_interval_s = interval_s
        self.backoff_s = 0.0

    def on_collision(self, collision: Collision, draw: Uniform) -> float:
        settings = self._settings
        wanted_s = repaired_backoff_s(
            self._first_value,
            self.backoff_s,
            self._calm_interval_s,
            self._success_s,
            collision.adaptive_s,
            collision.excess_s,
            collision.pace_s,
            settings.beta,
            settings.backoff_s_min,
        )
        longest_s = longest_backoff_s(collision.pace_s, settings.backoff_s_min, settings.backoff_s_max)
        self.backoff_s = min(wanted_s, longest_s)
        return vary_s(self.backoff_s, settings.variation, draw)


class FullJitter:
    def __init__(self, settings: BackoffSettings) -> None:
        self.backoff_s = 0.0
        self._attempts = 0
        self._settings = settings

    def on_calm(self, interval_s: float) -> None:
        self.backoff_s = 0.0
        self._attempts = 0

    def on_collision(self, collision: Collision, draw: Uniform) -> float:
        settings = self._settings
        self._attempts = min(self._attempts + 1, ATTEMPTS_MAX)
        longest_s = longest_backoff_s(collision.pace_s, settings.backoff_s_min, settings.backoff_s_max)
        span_s = min(settings.backoff_s_min * float(1 << self._attempts), longest_s)
        self.backoff_s = 0.5 * span_s
        return span_s * draw()


def new_backoff(settings: BackoffSettings) -> Backoff:
    match settings.kind:
        case BackoffKind.NONE:
            return NoBackoff()
        case BackoffKind.PRINTED:
            return PrintedBackoff(settings)
        case BackoffKind.REPAIRED:
            return RandomBackoff(settings)
        case BackoffKind.FULL_JITTER:
            return FullJitter(settings)


def longest_backoff_s(pace_s: float, backoff_s_min: float, backoff_s_max: float) -> float:
    """Returns the bound of a backoff. `pace_s` is MISSING if the broker does not advertise it."""
    return backoff_s_max if pace_s < 0.0 else max(backoff_s_min, PACES_MAX * pace_s)


def printed_backoff_s(
    backoff_s: float, average_s: float, normal: float, beta: float, backoff_s_min: float, backoff_s_max: float
) -> float:
    """Returns the next backoff of Algorithm 3 as printed, from a draw of the normal distribution."""
    before_s = backoff_s if backoff_s != 0.0 else backoff_s_min
    # Before the first response there is no average, and a bound of 0 would mean to retry at once.
    longest_s = PRINTED_DURATIONS_MAX * average_s if average_s != 0.0 else backoff_s_max
    bounded_s = min(before_s * beta, longest_s)
    return max(0.0, bounded_s + bounded_s * DEVIATION * normal)


def repaired_backoff_s(
    first_value: int,
    backoff_s: float,
    calm_interval_s: float,
    success_s: float,
    adaptive_s: float,
    excess_s: float,
    pace_s: float,
    beta: float,
    backoff_s_min: float,
) -> float:
    """Returns the next backoff of Algorithm 3 repaired, before its upper bound and its variation.

    Without knowledge the first value is too low or negative, and the minimum applies."""
    if backoff_s > 0.0:
        return max(backoff_s * beta, 2.0 * excess_s) if first_value == EXCESS else backoff_s * beta
    first_s = 0.0
    if first_value == INTERVALS:
        first_s = calm_interval_s - adaptive_s
    elif first_value == SUCCESS:
        first_s = success_s
    elif first_value == RATE:
        first_s = max(0.0, pace_s) - adaptive_s
    elif first_value == EXCESS:
        first_s = 2.0 * excess_s
    return max(backoff_s_min, first_s)


def learn_success_s(success_s: float, backoff_s: float) -> float:
    """Returns the history of success after a backoff that ended congestion; 0 stands for none."""
    if backoff_s == 0.0:
        return success_s
    return 0.5 * (success_s + backoff_s) if success_s > 0.0 else backoff_s


def _wrong(what: str, value: float, remedy: str) -> ConfigError:
    return ConfigError("C463", f"{what} of the backoff is {value:g}", remedy)
