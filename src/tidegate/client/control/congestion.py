"""Detects whether the broker is congested, from the response time. Three levels differ in what they require:

    rigorous    equation (6): the time in queues is a small share of the processing time
    mediate     the response time is below D^br, the largest delay that the broker considers healthy
    light       equation (7): the response time is not far above the client's own average

A response time starts when the request is sent; waiting inside the client does not count. At every level a refusal or
a timeout is congestion, and is not a sample of any average.

What may go wrong: hints are missing or wrong. An invalid processing time or delay, or one that is longer than the
client would ever wait, counts as missing. Rigorous and mediate then use the last valid delay. Before the first one they
use the default of the settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tidegate.client.control.hints import MISSING, is_time
from tidegate.errors import ConfigError

AVERAGE_CREEP: Final = 1.005
"""The average grows by this factor with each congested sample. So it learns a permanent change, but not a short one."""
DELAY_S_MAX: Final = 60.0
"""A longer delay is not believed: a broker that advertises it has no useful limit."""


class Detection(StrEnum):
    RIGOROUS = "rigorous"
    """Uses the processing time of the same request, which the broker must send."""
    RIGOROUS_MEAN = "rigorous by the mean"
    """As printed: uses the mean processing time, and so takes every long query for congestion."""
    MEDIATE = "mediate"
    LIGHT = "light"
    """Uses the average of uncongested samples. It cannot detect congestion that existed when the client started."""
    LIGHT_PRINTED = "light as printed"
    """As printed: uses the average of all samples, and so learns congestion as the normal state."""


# The places of the levels in `Detection`. The laws below take these numbers, because they are also compiled.
RIGOROUS, RIGOROUS_MEAN, MEDIATE, LIGHT, LIGHT_PRINTED = range(len(Detection))


@dataclass(frozen=True)
class DetectionSettings:
    detection: Detection = Detection.MEDIATE
    network_s: float = 0.01
    """T^net, the round trip of the network."""
    delay_s_default: float = 0.06
    """D^br for a broker that does not send it."""
    queue_share: float = 0.5
    """Rigorous: the largest time in queues, as a share of the processing time. The papers call it beta, like the factor
    of the backoff, which is a different parameter."""
    average_weight: float = 0.9
    """Gamma of equation (7): the weight of the old average."""
    average_factor: float = 2.0
    """Light: a response time above this many averages is congestion."""

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
    """Judges the broker from the responses to one client. `average_s` is 0 before the first sample."""

    def __init__(self, settings: DetectionSettings) -> None:
        self.average_s = 0.0
        self.detections = 0
        self._settings = settings
        self._level = list(Detection).index(settings.detection)
        self._processing_s = 0.0
        self._delay_s = settings.delay_s_default
        self._threshold_s = settings.delay_s_default + settings.network_s

    def on_response(self, response_s: float, processing_s: float | None, delay_s: float | None) -> bool:
        """Returns whether a response time shows congestion. The broker's hints may be missing."""
        settings, level = self._settings, self._level
        if is_time(delay_s, DELAY_S_MAX):
            self._delay_s = delay_s
        if not is_time(processing_s, response_s):
            processing_s = MISSING
        elif level == RIGOROUS_MEAN:
            processing_s = self._processing_s = learn_processing_s(
                self._processing_s, processing_s, settings.average_weight
            )
        self._threshold_s = find_threshold_s(
            level,
            response_s,
            processing_s,
            self._delay_s,
            self.average_s,
            settings.network_s,
            settings.queue_share,
            settings.average_factor,
        )
        is_congested = response_s > self._threshold_s
        self.average_s = learn_average_s(level, self.average_s, response_s, is_congested, settings.average_weight)
        self.detections += is_congested
        return is_congested

    def on_failure(self) -> None:
        """Counts a refusal or a timeout as congestion."""
        self.detections += 1

    def excess_s(self, response_s: float) -> float:
        """Returns how far a response time is above the threshold. The broker's backlog needs this time to drain."""
        return max(0.0, response_s - self._threshold_s)


def find_threshold_s(
    level: int,
    response_s: float,
    processing_s: float,
    delay_s: float,
    average_s: float,
    network_s: float,
    queue_share: float,
    average_factor: float,
) -> float:
    """Returns the longest response time without congestion. `processing_s` is MISSING if it is not known."""
    # Not `in`: a search of the tuple, compiled, was slower for AST, though faster for other policies.
    if level == LIGHT or level == LIGHT_PRINTED:  # noqa: SIM109
        return average_factor * (average_s if average_s != 0.0 else response_s)
    if level == MEDIATE or processing_s < 0.0:
        return delay_s + network_s
    return (1.0 + queue_share) * processing_s + network_s


def learn_average_s(level: int, average_s: float, response_s: float, is_congested: bool, weight: float) -> float:
    """Returns the average response time with a new sample. 0 means that there is no average yet."""
    if average_s == 0.0:
        return response_s
    if not is_congested or level == LIGHT_PRINTED:
        return weight * average_s + (1.0 - weight) * response_s
    return average_s * AVERAGE_CREEP


def learn_processing_s(mean_s: float, processing_s: float, weight: float) -> float:
    """Returns the mean processing time with a new sample. 0 means that there is no mean yet."""
    before_s = mean_s if mean_s != 0.0 else processing_s
    return before_s + (1.0 - weight) * (processing_s - before_s)


def _wrong(what: str, value: float, remedy: str) -> ConfigError:
    return ConfigError("C462", f"{what} for detecting congestion is {value:g}", remedy)
