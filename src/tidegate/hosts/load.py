"""Load: the report that every slice sends to the coordinator twice a second, and the rates between two reports.

A report has counters since the slice began, and the time by the slice's own clock. No two clocks are compared, and a
lost report costs nothing. The coordinator keeps the last report of each slice and sends them on request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tidegate.layers.access_point import AccessPoint
from tidegate.layers.autoscaler import Measurement, SliceLoad
from tidegate.layers.connection_point import ConnectionPoint
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import Load
from tidegate.layers.layer import Layer, layer_of
from tidegate.layers.matcher import Matcher
from tidegate.layers.slice import Slice

LOAD_S: Final = 0.5
# The steps of the delay histogram: each is a quarter longer than the one before, from 0.1 ms to more than a minute.
DELAYS_S: Final = tuple(0.0001 * 1.25**step for step in range(61))


class Delays:
    """A histogram of delays, in the steps of DELAYS_S."""

    def __init__(self) -> None:
        self._counts = [0] * (len(DELAYS_S) + 1)

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(DELAYS_S, seconds)] += 1

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self._counts)


def load_of(part: Slice, delays: Delays | None = None, address: str = "") -> Load:
    """Returns the load of a slice. The CPU time is that of the process, so the slice should be alone in it."""
    at_s, cpu_s = time.monotonic(), time.process_time()
    match part:
        case AccessPoint():
            entered = part.statistics()
            return Load(at_s, cpu_s, entered.notifications, unacknowledged_batches=entered.unacknowledged_batches)
        case Matcher():
            matched = part.statistics()
            return Load(
                at_s, cpu_s, matched.notifications, subscriptions=matched.subscriptions, moved_in=matched.moved_in
            )
        case ExitPoint():
            left = part.statistics()
            return Load(
                at_s,
                cpu_s,
                left.notifications,
                unacknowledged_batches=left.unacknowledged_batches,
                incomplete_batches=left.incomplete_batches,
            )
        case ConnectionPoint():
            edge = part.statistics()
            return Load(
                at_s,
                cpu_s,
                edge.accepted,
                deliveries=edge.delivered,
                subscriptions=edge.subscriptions,
                delays=delays.counts if delays is not None else (),
                address=address,
            )
        case _:
            raise TypeError(type(part).__name__)


class Rates(msgspec.Struct, frozen=True):
    """The rates of one slice between two of its reports."""

    busy_share: float
    notifications_per_s: float
    deliveries_per_s: float

    @classmethod
    def between(cls, before: Load, after: Load) -> Rates | None:
        """Returns the rates, or None if no time lies between the reports or the slice's process was restarted."""
        seconds = after.at_s - before.at_s
        if seconds <= 0 or after.notifications < before.notifications:
            return None
        return cls(
            (after.cpu_s - before.cpu_s) / seconds,
            (after.notifications - before.notifications) / seconds,
            (after.deliveries - before.deliveries) / seconds,
        )


def delay_percentile(before: Mapping[str, Load], after: Mapping[str, Load], share: float) -> float:
    """Returns a percentile of the delays, in seconds, of all batches that were acknowledged between the reports. It is
    NaN if there were none."""
    return _percentile(delay_counts(before, after), share)


def delay_counts(before: Mapping[str, Load], after: Mapping[str, Load]) -> list[int]:
    """Returns the histogram of the delays between the reports, with the steps of `Delays`."""
    counts = [0] * (len(DELAYS_S) + 1)
    for name, load in after.items():
        earlier = before[name].delays if name in before else ()
        for step, count in enumerate(load.delays):
            counts[step] += count - (earlier[step] if earlier else 0)
    return counts


def delay_summary(counts: Sequence[int]) -> dict[str, float] | None:
    """Returns p50 and p99 in ms, rounded for display; None if there were no delays."""
    if not any(counts):
        return None
    return {"p50": round(_percentile(counts, 0.5) * 1000, 2), "p99": round(_percentile(counts, 0.99) * 1000, 2)}


def measure(before: Mapping[str, Load], after: Mapping[str, Load], now_s: float) -> Measurement:
    """Returns the measurement for the autoscaler. A slice that has not reported twice is left out."""
    rates = {name: rate for name in after if name in before and (rate := Rates.between(before[name], after[name]))}
    edges = [rate for name, rate in rates.items() if layer_of(name) is None]
    incomplete = sum(load.incomplete_batches for load in after.values())
    unacknowledged = dict.fromkeys(Layer, 0)
    for name, load in after.items():
        layer = layer_of(name)
        if layer is not None:
            unacknowledged[layer] += load.unacknowledged_batches
    # Batches unknown to the Exit Points are in flight to them; their incomplete batches wait for Matchers.
    unheard = unacknowledged[Layer.ACCESS_POINT] - unacknowledged[Layer.EXIT_POINT] - incomplete
    waiting = {Layer.ACCESS_POINT: 0, Layer.MATCHER: incomplete, Layer.EXIT_POINT: max(0, unheard)}
    p99_s = delay_percentile(before, after, 0.99)
    return Measurement(
        now_s=now_s,
        notifications_per_s=sum(rate.notifications_per_s for rate in edges),
        deliveries_per_s=sum(rate.deliveries_per_s for rate in edges),
        p99_ms=p99_s * 1000 if p99_s == p99_s else 0.0,
        subscriptions=sum(load.subscriptions for name, load in after.items() if layer_of(name) is Layer.MATCHER),
        slices=tuple(
            SliceLoad(name, layer, rate.busy_share, rate.notifications_per_s, waiting[layer])
            for name, rate in sorted(rates.items())
            if (layer := layer_of(name)) is not None
        ),
    )


def _percentile(counts: Sequence[int], share: float) -> float:
    total, seen = sum(counts), 0
    for step, count in enumerate(counts):
        seen += count
        if count and seen >= share * total:
            return DELAYS_S[min(step, len(DELAYS_S) - 1)]
    return float("nan")
