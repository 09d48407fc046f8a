"""Decides when the index needs a new plan, and learns the domains for it.

A plan holds the choices that decide where a filter is filed: the domain of each attribute's numbers, and the order of
each filter's constraints, most selective first. It is made from the filters and notifications known at that moment, so
it may turn out to be wrong. A wrong plan costs time, never correctness.

A new plan is due when it is likely to be much better than the current one:

- there are many more filters than when the plan was made;
- enough notifications have been sampled for the first time, or a notification costs more than it used to;
- many bounds of filters lie outside the learned domains;
- most nodes of the tree have been created and freed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tidegate.index import subscription_kernel
from tidegate.index import tables as t
from tidegate.index.estimate_kernel import ENOUGH_EVENTS

FILTERS_MIN: Final = 2048  # with fewer filters, any plan is good enough
SCANNED_MIN: Final = 64  # an increase of this many entries per notification is harmless
WINDOW: Final = 1 << 14  # notifications over which the cost is averaged
BOUNDS_SAMPLED: Final = 1 << 18
BOUNDS_MIN: Final = 8  # an attribute with fewer bounds gets no learned domain


@dataclass
class Plan:
    """What was known when the plan was made, and what matching has cost since."""

    filters: int = 0
    events: int = 0  # sampled notifications
    # Totals at the start of the current window: notifications matched, and entries scanned for them, by any plan.
    notifications: int = 0
    scanned: int = 0
    scanned_per_notification: float | None = None  # entries scanned per notification in the first window

    def is_outdated(self, filters: int, events: int, tree: t.Tree) -> bool:
        state = tree.state
        # The bits for kinds of routes and sizes of patterns are never cleared, so churn makes matching look for more
        # and more routes that no longer exist. Only a new tree gets rid of them (decision 009).
        if state[t.NODES_FREED] > 4 * state[t.COUNTED] + 8 * FILTERS_MIN:
            return True
        if filters < FILTERS_MIN:
            return False
        return bool(
            filters >= 8 * self.filters
            or state[t.BOUNDS_OUTSIDE_DOMAIN] > max(FILTERS_MIN, filters // 2)
            or (events >= ENOUGH_EVENTS and events >= 64 * self.events)
        )

    def begin_window(self, notifications: int, scanned: int) -> None:
        self.notifications, self.scanned = notifications, scanned

    def has_become_expensive(self, notifications: int, scanned: int) -> bool:
        """Returns whether notifications now meet far more entries than in the first window of this plan."""
        if notifications < self.notifications + WINDOW:
            return False
        each = (scanned - self.scanned) / (notifications - self.notifications)
        self.begin_window(notifications, scanned)
        if self.scanned_per_notification is None:
            self.scanned_per_notification = each
        return each > 2 * self.scanned_per_notification + SCANNED_MIN


def learn_domains(filters: t.Filters, attributes: int) -> tuple[t.F64, t.I64]:
    """Learns the domains from the bounds of intervals: numbers are quantised more finely where there are many bounds.

    Returns the domains, and the attributes that have a learned one, those with the most bounds first."""
    step = max(1, int(filters.state[t.COUNTED]) * 4 // BOUNDS_SAMPLED)
    bound_attributes, bounds = np.zeros(BOUNDS_SAMPLED, np.int64), np.zeros(BOUNDS_SAMPLED)
    found = int(subscription_kernel.sample_bounds(filters, step, bound_attributes, bounds))
    order = np.argsort(bound_attributes[:found], kind="stable")
    bound_attributes, bounds = bound_attributes[:found][order], bounds[:found][order]
    domains = np.zeros((attributes, t.DOMAIN_COLUMNS))
    numbers, starts, counts = np.unique(bound_attributes, return_index=True, return_counts=True)
    for attribute, start, count in zip(numbers, starts, counts, strict=True):
        if count >= BOUNDS_MIN:
            domains[attribute] = _learn_domain(bounds[start : start + count])
    learned = counts >= BOUNDS_MIN
    return domains, numbers[learned][np.argsort(-counts[learned], kind="stable")]


def _learn_domain(bounds: t.F64) -> t.F64:
    knots = np.quantile(bounds, np.linspace(0, 1, t.SEGMENTS + 1))
    # The outermost segments are made twice as wide, so that numbers just outside all bounds still get distinct places.
    below, above = knots[1] - knots[0], knots[-1] - knots[-2]
    least = 0.0 if knots[-1] > knots[0] else max(abs(knots[0]), 1.0)
    knots[0] = max(knots[0] - max(below, least), -_LARGEST)
    knots[-1] = min(knots[-1] + max(above, least), _LARGEST)
    # Equal quantiles give a segment without width. Its scale is 0: all its numbers share one place.
    with np.errstate(divide="ignore", over="ignore"):
        scales = t.SEGMENT_PLACES / np.diff(knots)
    scales[~np.isfinite(scales)] = 0.0
    return np.concatenate(([1.0], knots[:-1], scales, knots[-1:]))


_LARGEST: Final = float(np.finfo(np.float64).max)
