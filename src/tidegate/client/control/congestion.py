"""When is the broker congested? Three levels of demand on the response time, and what each needs to know.

    rigorous    equation (6): the time in queues is a small share of the processing time
    mediate     the broker says which delay D^br it holds for stable
    light       equation (7): not far above the client's own average

A response time runs from the sending of a request, not from its wait inside the client. A refusal or a timeout is
congestion whatever the level, and no sample of any average.

What may go wrong: hints are missing or lies. A processing time or a delay that is no time, or longer than the client
would ever wait, counts as missing; rigorous and mediate then use the delay of the settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tidegate.errors import ConfigError

AVERAGE_CREEP: Final = 1.005
"""The average grows so with each congested sample: a permanent change is learnt, a passing one is not."""
DELAY_S_MAX: Final = 60.0
"""A broker that advertises more than this has no limit of its own."""


class Detection(StrEnum):
    RIGOROUS = "rigorous"
    """With the processing time of this very request, which the broker tells."""
    RIGOROUS_MEAN = "rigorous by the mean"
    """As printed, with the mean processing time: takes every long query for congestion."""
    MEDIATE = "mediate"
    LIGHT = "light"
    """With an average of uncongested samples. It does not see a congestion that was there before it."""
    LIGHT_PRINTED = "light as printed"
    """With an average of all samples: learns congestion as the normal state."""


@dataclass(frozen=True)
class DetectionSettings:
    detection: Detection = Detection.MEDIATE
    network_s: float = 0.01
    """T^net, there and back."""
    delay_s_default: float = 0.06
    """D^br of a broker that does not tell it."""
    queue_share: float = 0.5
    """Rigorous: the time in queues, as a share of the processing time. The papers call it beta, as the factor of the
    backoff, which is another parameter."""
    average_weight: float = 0.9
    """Gamma of equation (7): how much of the average is kept."""
    average_factor: float = 2.0
    """Light: a response time above so many averages is congestion."""

    def __post_init__(self) -> None:
        if not 0 <= self.network_s < math.inf:
            raise _wrong("the network's time", self.network_s, "use seconds, 0 or more")
        if not 0 < self.delay_s_default <= DELAY_S_MAX:
            raise _wrong("the default delay", self.delay_s_default, f"use more than 0 and at most {DELAY_S_MAX:g} s")
        if not 0 < self.queue_share < 1:
            raise _wrong("the share in queues", self.queue_share, "use more than 0 and less than 1")
        if not 0 <= self.average_weight < 1:
            raise _wrong("the weight of the average", self.average_weight, "use 0 or more and less than 1")
        if not 1 <= self.average_factor < math.inf:
            raise _wrong("the factor of the average", self.average_factor, "use 1 or more, such as 2")


class CongestionDetector:
    """One client's view of the broker. `average_s` is 0 before the first sample."""

    def __init__(self, settings: DetectionSettings) -> None:
        self.average_s = 0.0
        self.detections = 0
        self._settings = settings
        self._processing_s = 0.0
        self._delay_s = settings.delay_s_default
        self._threshold_s = settings.delay_s_default + settings.network_s

    def on_response(self, response_s: float, processing_s: float | None, delay_s: float | None) -> bool:
        """Tells whether it shows congestion; the broker's hints may be missing."""
        self._threshold_s = self._new_threshold_s(
            response_s,
            processing_s if is_time(processing_s, response_s) else None,
            delay_s if is_time(delay_s, DELAY_S_MAX) else None,
        )
        is_congested = response_s > self._threshold_s
        self._learn(response_s, is_congested)
        self.detections += is_congested
        return is_congested

    def on_failure(self) -> None:
        """A refusal or a timeout."""
        self.detections += 1

    def excess_s(self, response_s: float) -> float:
        """By how much it is above what counts as congestion, which is the time that the backlog needs to drain."""
        return max(0.0, response_s - self._threshold_s)

    def _new_threshold_s(self, response_s: float, processing_s: float | None, delay_s: float | None) -> float:
        settings = self._settings
        if delay_s is not None:
            self._delay_s = delay_s
        if settings.detection in (Detection.LIGHT, Detection.LIGHT_PRINTED):
            return settings.average_factor * (self.average_s or response_s)
        if settings.detection is Detection.MEDIATE or processing_s is None:
            return self._delay_s + settings.network_s
        if settings.detection is Detection.RIGOROUS_MEAN:
            before_s = self._processing_s or processing_s
            processing_s = self._processing_s = before_s + (1.0 - settings.average_weight) * (processing_s - before_s)
        return (1.0 + settings.queue_share) * processing_s + settings.network_s

    def _learn(self, response_s: float, is_congested: bool) -> None:
        weight = self._settings.average_weight
        if self.average_s == 0.0:
            self.average_s = response_s
        elif not is_congested or self._settings.detection is Detection.LIGHT_PRINTED:
            self.average_s = weight * self.average_s + (1.0 - weight) * response_s
        else:
            self.average_s *= AVERAGE_CREEP


def is_time(hint_s: float | None, hint_s_max: float) -> bool:
    """A hint that can be used: neither missing, NaN, negative nor absurdly long."""
    return hint_s is not None and 0.0 <= hint_s <= hint_s_max


def _wrong(what: str, value: float, remedy: str) -> ConfigError:
    return ConfigError("C462", f"{what} of the detection of congestion is {value:g}", remedy)
