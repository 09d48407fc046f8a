"""A plan is compared with its own beginning, not with what earlier plans have cost."""

from __future__ import annotations

import msgspec
import numpy as np

from tidegate.filters import Filter
from tidegate.index import SubscriptionIndex
from tidegate.index.planning import FILTERS_MIN, SCANNED_MIN, WINDOW


def _match(index: SubscriptionIndex, name: str) -> float:
    """Matches a window of notifications. Returns how many entries each of them has scanned."""
    one = msgspec.msgpack.encode({name: 1})
    before = index.statistics().scanned
    index.match_maps(one * WINDOW, np.arange(WINDOW, dtype=np.int64) * len(one))
    return (index.statistics().scanned - before) / WINDOW


def test_notifications_that_cost_more_than_in_the_first_window_of_a_plan_lead_to_a_new_one() -> None:
    index = SubscriptionIndex(seed=1)
    for number in range(FILTERS_MIN):
        index.add(number, Filter.parse(f"busy;!quiet{number % 50};!other{number // 50}"))
    while index.maintain():
        pass
    assert _match(index, "busy") > 8 * SCANNED_MIN
    index.plan()
    while index.maintain():
        pass
    plans = index.statistics().plans
    assert _match(index, "unknown") == 0
    assert not index.maintain(), "the first window of the plan"
    _match(index, "busy")
    index.maintain()
    assert index.statistics().plans == plans + 1
