"""Active control: clients pace their checks to keep the broker healthy.

A persistent query regularly checks for updates that it missed. It waits t = AST + RBT between checks: the adaptive
strategy timeout follows losses, the random backoff timeout follows congestion. The modules are pure state machines;
time and randomness are arguments. The design is after A. S. Vdovenko et al., whose algorithms as printed are included
for comparison. docs/active-control.md explains which setting to change when.
"""

from tidegate.client.control.active_control import (
    NO_HINTS,
    ActiveControl,
    Control,
    ControlStatistics,
    Hints,
    SequenceGaps,
)
from tidegate.client.control.adaptive import IntervalSettings, Strategy
from tidegate.client.control.backoff import BackoffKind, BackoffSettings, FirstValue
from tidegate.client.control.congestion import Detection, DetectionSettings
from tidegate.client.control.retry import RetryPace
from tidegate.client.control.variation import Variation

__all__ = [
    "NO_HINTS",
    "ActiveControl",
    "BackoffKind",
    "BackoffSettings",
    "Control",
    "ControlStatistics",
    "Detection",
    "DetectionSettings",
    "FirstValue",
    "Hints",
    "IntervalSettings",
    "RetryPace",
    "SequenceGaps",
    "Strategy",
    "Variation",
]
