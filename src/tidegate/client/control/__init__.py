"""Active control: clients that keep the broker healthy. Pure state machines; time and chance are arguments.

A persistent query checks by itself for updates that it missed, and paces these checks by t = AST + RBT: the adaptive
strategy timeout follows losses, the random backoff timeout follows congestion. After A. S. Vdovenko et al.; their
algorithms as printed are here too, to compare with. docs/active-control.md tells which knob to turn when.
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
