"""How a backoff varies around its mean, from uniform draws: never negative, and with that mean.

The papers add a normal variable of undefined scale, seeded with the system's time, which clients that start together
have in common. A client here gets draws of its own; `random.Random().random`, seeded by the operating system, is one
such source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Final, TypeAlias

Uniform: TypeAlias = Callable[[], float]
"""Draws a number from 0 to 1, without 1."""

DEVIATION: Final = 0.3
"""Of the normal variation, as a share of the mean."""


class Variation(StrEnum):
    UNIFORM = "uniform"
    """From 0 to twice the mean: spreads clients over the whole span."""
    NORMAL = "normal"
    """Mean and a deviation of 0.3 of it, cut where it would be negative and likewise above."""


def vary_s(mean_s: float, variation: Variation, draw: Uniform) -> float:
    if variation is Variation.UNIFORM:
        return 2.0 * mean_s * draw()
    while True:
        factor = 1.0 + DEVIATION * draw_normal(draw)
        if 0.0 <= factor <= 2.0:
            return mean_s * factor


def draw_normal(draw: Uniform) -> float:
    """Of mean 0 and deviation 1, after Box and Muller."""
    radius = math.sqrt(-2.0 * math.log(1.0 - draw()))
    return radius * math.cos(2.0 * math.pi * draw())
