"""How a backoff varies around its mean. The result is never negative and keeps that mean.

The papers add a normal variable of undefined scale and seed it with the system time, which clients that start together
share. Here each client needs its own source of uniform numbers, such as `random.Random().random`, which the operating
system seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Final, TypeAlias

Uniform: TypeAlias = Callable[[], float]
"""Returns a random number from 0 to 1, excluding 1."""

DEVIATION: Final = 0.3
"""The standard deviation of the normal variation, as a share of the mean."""


class Variation(StrEnum):
    UNIFORM = "uniform"
    """From 0 to twice the mean, which spreads clients over the whole span."""
    NORMAL = "normal"
    """Normal, with a deviation of 0.3 of the mean, cut off below 0 and above twice the mean."""


def vary_s(mean_s: float, variation: Variation, draw: Uniform) -> float:
    if variation is Variation.UNIFORM:
        return 2.0 * mean_s * draw()
    while True:
        factor = 1.0 + DEVIATION * to_normal(draw(), draw())
        if 0.0 <= factor <= 2.0:
            return mean_s * factor


def to_normal(first: float, second: float) -> float:
    """Converts two uniform draws to one from the normal distribution with mean 0 and deviation 1 (Box and Muller)."""
    return math.sqrt(-2.0 * math.log(1.0 - first)) * math.cos(2.0 * math.pi * second)
