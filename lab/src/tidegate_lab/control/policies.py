"""The policies that the evaluation compares: how clients are paced, and how the broker helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tidegate.client.control import (
    BackoffKind,
    BackoffSettings,
    Control,
    Detection,
    DetectionSettings,
    FirstValue,
    IntervalSettings,
    Strategy,
)
from tidegate_lab.control.request_pool import Parameters


@dataclass(frozen=True, eq=False)
class Policy:
    """How clients are paced and how the broker helps, and the policy's name in the report."""

    name: str
    control: Control
    broker: Mapping[str, Any] = field(default_factory=dict)


def printed(strategy: Strategy = Strategy.ADAPTIVE) -> Control:
    """Returns the control of the papers, without backoff."""
    return Control(
        IntervalSettings(strategy, is_frozen_by_congestion=False),
        DetectionSettings(network_s=Parameters.round_trip_s),
        BackoffSettings(BackoffKind.NONE),
        is_restarted_by_notifications=False,
        is_backoff_alone_after_failure=False,
    )


def repaired(
    detection: Detection = Detection.MEDIATE,
    first_value: FirstValue = FirstValue.EXCESS,
    kind: BackoffKind = BackoffKind.REPAIRED,
) -> Control:
    """Returns the repaired step 4: a congested check does not shorten the interval, and after a failure a client waits
    only for the backoff."""
    return Control(
        IntervalSettings(),
        DetectionSettings(detection, network_s=Parameters.round_trip_s),
        BackoffSettings(kind, first_value),
        is_restarted_by_notifications=False,
    )


def _printed_backoff() -> Control:
    detection = DetectionSettings(Detection.LIGHT_PRINTED, network_s=Parameters.round_trip_s, average_factor=1.0)
    return replace(printed(), detection=detection, backoff=BackoffSettings(BackoffKind.PRINTED))


RESTARTED = replace(repaired(), is_restarted_by_notifications=True)
DESIGN = {
    "is_giving_slots": True,
    "is_giving_spread": True,
    "is_conflating": True,
    "notifications_per_request": 12,
}
CODEL = {"codel_target_s": 0.05}

NONE = Policy("none", printed(Strategy.NONE))
FIXED = Policy("basic, fixed", printed(Strategy.FIXED))
RANDOM = Policy("basic, random", printed(Strategy.RANDOM))
AST = Policy("AST", printed())
ALG2_PRINTED = Policy("AST, Alg. 2 printed", printed(Strategy.ESTIMATES_PRINTED))
ALG2 = Policy("AST, Alg. 2 repaired", printed(Strategy.ESTIMATES))
RBT_PRINTED = Policy("AST+RBT as printed", _printed_backoff())
RBT = Policy("AST+RBT mediate", repaired())
RIGOROUS = Policy("AST+RBT rigorous", repaired(Detection.RIGOROUS))
RIGOROUS_MEAN = Policy("AST+RBT rigorous, mean", repaired(Detection.RIGOROUS_MEAN))
LIGHT = Policy("AST+RBT light", repaired(Detection.LIGHT))
FIRST_VALUES = [
    Policy(f"first value: {first_value}", repaired(first_value=first_value))
    for first_value in FirstValue
    if first_value is not FirstValue.EXCESS
]
JITTER = Policy("full jitter", repaired(kind=BackoffKind.FULL_JITTER))
GRADIENT = Policy("gradient", printed(Strategy.GRADIENT))
TOKENS = Policy("AST, token bucket", printed(), {"token_every_s": 4.0})
CODEL_AST = Policy("AST, CoDel", printed(), CODEL)
CODEL_SUM = Policy("RBT+CoDel, sum", replace(repaired(), is_backoff_alone_after_failure=False), CODEL)
CODEL_RBT = Policy("RBT+CoDel", repaired(), CODEL)
SLOTS = Policy("AST, slots", printed(), {"is_giving_slots": True})
SPREAD = Policy("AST, spread", printed(), {"is_giving_spread": True})
CONFLATION = Policy("AST, conflation", printed(), {"is_conflating": True})
NO_HINTS = Policy("client only, no hints", RESTARTED, {"is_hinting": False})
FULL_WITHOUT_RBT = Policy("full without RBT", replace(RESTARTED, backoff=BackoffSettings(BackoffKind.NONE)), DESIGN)
FULL_DESIGN = Policy("full design", RESTARTED, DESIGN)
