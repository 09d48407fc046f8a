"""Hints of a broker: times that may be missing or invalid."""

from __future__ import annotations

import math
from typing import Final, TypeGuard

MISSING: Final = -1.0
"""Stands for a time that is not known where a law needs a number."""


def is_time(hint_s: float | None, hint_s_max: float) -> TypeGuard[float]:
    """Returns whether a hint is usable: not missing, NaN, negative or above `hint_s_max`."""
    return hint_s is not None and 0.0 <= hint_s <= hint_s_max


def bound_s(hint_s: float | None, hint_s_max: float) -> float:
    """Returns a usable hint, at most `hint_s_max`; MISSING if it is missing, NaN, negative or infinite."""
    if hint_s is None or not 0.0 <= hint_s < math.inf:
        return MISSING
    return min(hint_s, hint_s_max)
