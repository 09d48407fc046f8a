"""RBT, the random backoff timeout: how much longer a client waits because the broker is congested.

The first collision gives a first value; each further one multiplies it by beta, up to a bound; a calm response resets
it. What is waited is drawn around that value, so that clients which collided do not collide again.

The papers' Algorithm 3 sets one variable and multiplies another, which is 0: taken by the letter it never backs off.
`PRINTED` is its charitable reading, with one variable.

What may go wrong: a bound that is too low. The papers' five average durations are milliseconds where queues need
seconds to drain; twice the time in which the broker serves everybody once is enough, and brokers advertise it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from tidegate.client.control.variation import DEVIATION, Uniform, Variation, draw_normal, vary_s
from tidegate.errors import ConfigError

PRINTED_DURATIONS_MAX: Final = 5.0
PACES_MAX: Final = 2.0
"""The longest backoff, in paces of the broker."""
ATTEMPTS_MAX: Final = 20


class BackoffKind(StrEnum):
    NONE = "none"
    PRINTED = "as printed"
    REPAIRED = "repaired"
    FULL_JITTER = "full jitter"
    """Drawn from 0 to a span that doubles with each collision, as large cloud services advise their clients."""


class FirstValue(StrEnum):
    """Where the first value after calm comes from."""

    MINIMUM = "minimum"
    INTERVALS = "history of intervals"
    """The interval before the last calm response, less the current one."""
    SUCCESS = "history of success"
    """The backoffs that ended congestion before: the mean of the last and the one remembered."""
    RATE = "rate of the broker"
    """The interval that the broker wishes, less the current one."""
    EXCESS = "excess delay"
    """Twice the time by which the response was late, as that is the time the backlog needs to drain."""


@dataclass(frozen=True)
class BackoffSettings:
    kind: BackoffKind = BackoffKind.REPAIRED
    first_value: FirstValue = FirstValue.EXCESS
    variation: Variation = Variation.UNIFORM
    beta: float = 2.0
    backoff_s_min: float = 0.1
    backoff_s_max: float = 5.0
    """Until the broker advertises its pace."""

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
    """What is known of a request that was congested, or of one that was not."""

    interval_s: float
    """How long the client had waited before it."""
    adaptive_s: float
    """The AST that follows it."""
    excess_s: float
    average_s: float
    pace_s: float | None
    """The interval that the broker wishes each client to keep."""


class Backoff(Protocol):
    """`backoff_s` is the RBT before it is varied; 0 in calm."""

    backoff_s: float

    def on_calm(self, interval_s: float) -> None:
        """A response in time, after so long a wait."""

    def on_collision(self, collision: Collision, draw: Uniform) -> float:
        """Returns how long to back off."""


class NoBackoff:
    backoff_s = 0.0

    def on_calm(self, interval_s: float) -> None:
        pass

    def on_collision(self, collision: Collision, draw: Uniform) -> float:
        return 0.0


class PrintedBackoff:
    """Algorithm 3, its two variables read as one: the first value is beta times the minimum, bounded by five average
    durations; the normal variation stays in the variable."""

    def __init__(self, settings: BackoffSettings) -> None:
        self.backoff_s = 0.0
        self._settings = settings

    def on_calm(self, interval_s: float) -> None:
        self.backoff_s = 0.0

    def on_collision(self, collision: Collision, draw: Uniform) -> float:
        before_s = self.backoff_s or self._settings.backoff_s_min
        # Before the first response there is no average, and 0 would be to ask again at once.
        longest_s = PRINTED_DURATIONS_MAX * collision.average_s or self._settings.backoff_s_max
        bounded_s = min(before_s * self._settings.beta, longest_s)
        self.backoff_s = max(0.0, bounded_s + bounded_s * DEVIATION * draw_normal(draw))
        return self.backoff_s


class RandomBackoff:
    """Algorithm 3 repaired: one variable, grown from the second collision on, and drawn from without being changed."""

    def __init__(self, settings: BackoffSettings) -> None:
        self.backoff_s = 0.0
        self._settings = settings
        self._calm_interval_s = 0.0
        self._success_s = 0.0

    def on_calm(self, interval_s: float) -> None:
        if self.backoff_s > 0:
            self._success_s = 0.5 * (self._success_s + self.backoff_s) if self._success_s > 0 else self.backoff_s
        self._calm_interval_s = interval_s
        self.backoff_s = 0.0

    def on_collision(self, collision: Collision, draw: Uniform) -> float:
        settings = self._settings
        if self.backoff_s == 0:
            wanted_s = max(settings.backoff_s_min, self._first_value_s(collision))
        else:
            wanted_s = self.backoff_s * settings.beta
            if settings.first_value is FirstValue.EXCESS:
                wanted_s = max(wanted_s, 2.0 * collision.excess_s)
        self.backoff_s = min(wanted_s, longest_backoff_s(settings, collision.pace_s))
        return vary_s(self.backoff_s, settings.variation, draw)

    def _first_value_s(self, collision: Collision) -> float:
        """Below the minimum, or negative, where it knows nothing."""
        match self._settings.first_value:
            case FirstValue.INTERVALS:
                return self._calm_interval_s - collision.adaptive_s
            case FirstValue.SUCCESS:
                return self._success_s
            case FirstValue.RATE:
                return (collision.pace_s or 0.0) - collision.adaptive_s
            case FirstValue.EXCESS:
                return 2.0 * collision.excess_s
            case FirstValue.MINIMUM:
                return 0.0


class FullJitter:
    def __init__(self, settings: BackoffSettings) -> None:
        self.backoff_s = 0.0
        self._attempts = 0
        self._settings = settings

    def on_calm(self, interval_s: float) -> None:
        self.backoff_s = 0.0
        self._attempts = 0

    def on_collision(self, collision: Collision, draw: Uniform) -> float:
        self._attempts = min(self._attempts + 1, ATTEMPTS_MAX)
        span_s = self._settings.backoff_s_min * float(2**self._attempts)
        span_s = min(span_s, longest_backoff_s(self._settings, collision.pace_s))
        self.backoff_s = 0.5 * span_s
        return span_s * draw()


def longest_backoff_s(settings: BackoffSettings, pace_s: float | None) -> float:
    return settings.backoff_s_max if pace_s is None else max(settings.backoff_s_min, PACES_MAX * pace_s)


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


def _wrong(what: str, value: float, remedy: str) -> ConfigError:
    return ConfigError("C463", f"{what} of the backoff is {value:g}", remedy)
