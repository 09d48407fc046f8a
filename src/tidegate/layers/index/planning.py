"""When the index is planned anew, and what is learned for it.

A plan is what filing depends on and what may prove wrong: the domain of each attribute's numbers, and the order of each
filter's constraints, most selective first. It is made from the filters and notifications of that moment. A new plan
is due when it could be much better: the filters have multiplied, notifications were seen for the first time or cost
more than they did, many bounds lie outside the domains, or most nodes of the tree have come and gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tidegate.layers.index import subscription_kernel
from tidegate.layers.index import tables as t
from tidegate.layers.index.estimate_kernel import ENOUGH_EVENTS

FILTERS_MIN: Final = 2048  # below, any plan is good enough
SCANNED_MIN: Final = 64  # entries a notification that are nothing to worry about
WINDOW: Final = 1 << 14  # notifications
BOUNDS_SAMPLED: Final = 1 << 18
BOUNDS_MIN: Final = 8


@dataclass
class Plan:
    """What was known when it was made."""

    filters: int = 0
    events: int = 0
    notifications: int = 0  # matched, and entries scanned for them, at the start of the present window
    scanned: int = 0
    scanned_each: float | None = None  # a notification, in the first window

    def is_outdated(self, filters: int, events: int, tree: t.Tree) -> bool:
        state = tree.state
        if state[t.NODES_FREED] > 4 * state[t.COUNTED] + 8 * FILTERS_MIN:
            return True
        if filters < FILTERS_MIN:
            return False
        return bool(
            filters >= 8 * self.filters
            or state[t.STRANGE_BOUNDS] > max(FILTERS_MIN, filters // 2)
            or (events >= ENOUGH_EVENTS and events >= 64 * self.events)
        )

    def has_become_dear(self, notifications: int, scanned: int) -> bool:
        """Do notifications meet far more entries than in the first window of this plan?"""
        if notifications < self.notifications + WINDOW:
            return False
        each = (scanned - self.scanned) / (notifications - self.notifications)
        self.notifications, self.scanned = notifications, scanned
        if self.scanned_each is None:
            self.scanned_each = each
        return each > 2 * self.scanned_each + SCANNED_MIN


def learn_domains(filters: t.Filters, attributes: int) -> t.F64:
    """From the bounds of intervals: where there are many of them, the places of numbers are finer."""
    step = max(1, int(filters.state[t.COUNTED]) * 4 // BOUNDS_SAMPLED)
    abouts, bounds = np.zeros(BOUNDS_SAMPLED, np.int64), np.zeros(BOUNDS_SAMPLED)
    found = int(subscription_kernel.sample_bounds(filters, step, abouts, bounds))
    order = np.argsort(abouts[:found], kind="stable")
    abouts, bounds = abouts[:found][order], bounds[:found][order]
    domains = np.zeros((attributes, t.DOMAIN_COLUMNS))
    for about, start, count in zip(*np.unique(abouts, return_index=True, return_counts=True), strict=True):
        if count >= BOUNDS_MIN:
            domains[about] = _learn_domain(bounds[start : start + count])
    return domains


def _learn_domain(bounds: t.F64) -> t.F64:
    knots = np.quantile(bounds, np.linspace(0, 1, t.SEGMENTS + 1))
    # The outermost segments are twice as wide: numbers a little outside of all bounds have places of their own.
    below, above = knots[1] - knots[0], knots[-1] - knots[-2]
    least = 0.0 if knots[-1] > knots[0] else max(abs(knots[0]), 1.0)
    knots[0] = max(knots[0] - max(below, least), -_LARGEST)
    knots[-1] = min(knots[-1] + max(above, least), _LARGEST)
    with np.errstate(divide="ignore", over="ignore"):
        scales = t.SEGMENT_PLACES / np.diff(knots)
    scales[~np.isfinite(scales)] = 0.0
    return np.concatenate(([1.0], knots[:-1], scales, knots[-1:]))


_LARGEST: Final = float(np.finfo(np.float64).max)
