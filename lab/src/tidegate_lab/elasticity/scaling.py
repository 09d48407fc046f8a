"""The chapter on scaling under load: what subscribers notice when 1-1-1 becomes 1-3-1, with both kinds of switch.

The buffered switch follows the steps of the paper: it holds notifications back until the old slices have finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.client import connect
from tidegate.cluster.cluster_layers import ClusterLayers
from tidegate.cluster.outcome import Outcome
from tidegate.cluster.planning import Wanted
from tidegate.cluster.probe import Probe
from tidegate.cluster.scaling import CALM_S, Scaling
from tidegate_lab import pictures
from tidegate_lab.elasticity.cluster_processes import ClusterProcesses, cluster_processes
from tidegate_lab.elasticity.load import Client, client, reading
from tidegate_lab.report import Chapter, Progress

CHANGE_S: Final = 300.0
BATCHES_S: Final = 100
BIN_S: Final = 0.1
ROW_S: Final = 0.02
SWITCHES: Final = ("epoch", "buffered")
# The limits that the epoch switch must meet. In the paper, notifications were held for 588 ms.
EXTRA_MS_MAX: Final = 100.0
PART_OF_BUFFERED_MAX: Final = 1 / 3
TOTAL_S_MAX: Final = 8.0


@dataclass(frozen=True)
class Extent:
    subscriptions: int
    notifications_s: int
    subscriptions_s: int
    calm_s: float
    repetitions: int


FULL = Extent(100_000, 2000, 1000, 5.0, 5)
SHORT = Extent(10_000, 2000, 200, 2.0, 1)


@dataclass(frozen=True)
class Change:
    """One change of the layers, as subscribers saw it. Times are relative to the request for the change."""

    switch: str
    outcome: Outcome
    sent_s: NDArray[np.float64]
    delays_ms: NDArray[np.float64]

    @property
    def before_ms(self) -> NDArray[np.float64]:
        """The delays of notifications that arrived before the change was requested."""
        return self.delays_ms[self.sent_s + self.delays_ms / 1000 < 0]

    @property
    def during_ms(self) -> NDArray[np.float64]:
        arrived_s = self.sent_s + self.delays_ms / 1000
        return self.delays_ms[(arrived_s >= 0) & (self.sent_s <= self.outcome.seconds)]

    @property
    def extra_ms(self) -> float:
        return p999(self.during_ms) - p999(self.before_ms)


def p999(delays_ms: NDArray[np.float64]) -> float:
    return float(np.percentile(delays_ms, 99.9))


def write_chapter(out: Path, extent: Extent) -> Chapter:
    chapter = Chapter(out, "Scaling under load")
    changes = asyncio.run(_measure_all(extent))
    chapter.say(
        f"1-1-1 becomes 1-3-1 with {extent.subscriptions:,} subscriptions, while {extent.notifications_s:,} "
        f"notifications/s are published and {extent.subscriptions_s:,} new subscriptions/s arrive. Each notification "
        "matches sixteen subscriptions, which are spread over all Matchers. Two spare slices wait, so that their start "
        f"is not measured. Both switches alternate, {extent.repetitions} times each, on one cluster, which is scaled "
        "back in between. The delay is the time from the publishing program to the last of the sixteen subscriptions. "
        "Lost, doubled and out of order are counted over all deliveries."
    )
    chapter.table(
        ("switch", "total s", "moved", "p99.9 before ms", "p99.9 during ms", "extra ms", "longest ms", "lost",
         "doubled", "out of order"),
        [_row(change) for change in changes],
    )  # fmt: skip
    _draw(chapter, changes)
    chapter.data("scaling", _as_table(changes), f"one for the notifications sent in each {ROW_S * 1000:g} ms of a run")
    _claim(chapter, changes)
    return chapter


def _row(change: Change) -> Sequence[str]:
    findings = change.outcome.findings
    assert findings is not None
    return (
        change.switch, f"{change.outcome.seconds:.2f}", f"{change.outcome.moved:,}", f"{p999(change.before_ms):.1f}",
        f"{p999(change.during_ms):.1f}", f"{change.extra_ms:.1f}", f"{change.during_ms.max():.1f}",
        str(findings.lost), str(findings.doubled), str(findings.disordered),
    )  # fmt: skip


def _claim(chapter: Chapter, changes: Sequence[Change]) -> None:
    extra = {switch: float(np.median([c.extra_ms for c in changes if c.switch == switch])) for switch in SWITCHES}
    chapter.claim(
        f"The epoch switch adds at most {EXTRA_MS_MAX:g} ms to the p99.9 of delivery delays (median of the runs)",
        extra["epoch"] <= EXTRA_MS_MAX,
        f"{extra['epoch']:.0f} ms; {', '.join(f'{c.extra_ms:.0f}' for c in changes if c.switch == 'epoch')}",
    )
    chapter.claim(
        "That is at most a third of what the buffered switch adds",
        extra["epoch"] <= PART_OF_BUFFERED_MAX * extra["buffered"],
        f"{extra['epoch']:.0f} of {extra['buffered']:.0f} ms",
    )
    longest_s = max(change.outcome.seconds for change in changes if change.switch == "epoch")
    chapter.claim(f"Scaling takes less than {TOTAL_S_MAX:g} s", longest_s < TOTAL_S_MAX, f"{longest_s:.1f} s at most")
    found = [change.outcome.findings for change in changes]
    faults = [sum(getattr(each, name) for each in found) for name in ("lost", "doubled", "disordered")]
    chapter.claim(
        "With both switches, no notification is lost, duplicate or out of order",
        not any(faults),
        ", ".join(map(str, faults)),
    )


def _draw(chapter: Chapter, changes: Sequence[Change]) -> None:
    """Draws the longest delay of the notifications sent in each 0.1 s, for the median run of each switch."""
    figure, panels = pictures.new_figure(2)
    for axes, switch, look in zip(panels, SWITCHES, (pictures.BLUE, pictures.ORANGE), strict=True):
        mine = sorted((change for change in changes if change.switch == switch), key=lambda change: change.extra_ms)
        change = mine[len(mine) // 2]
        longest = {place * BIN_S: delays_ms.max() for place, delays_ms in _by_time(change, BIN_S)}
        axes.step(list(longest), list(longest.values()), where="post", color=look.colour, linewidth=1.3)
        axes.axvspan(0, change.outcome.seconds, color="#EEEEEE", zorder=0)
        pictures.name_axes(axes, f"{switch}: grey while the layers change", "s since the request", "longest delay [ms]")
    pictures.share_y_limits(panels)
    chapter.picture("scaling", figure, "Longest delivery delay of the notifications sent in each 0.1 s")


def _as_table(changes: Sequence[Change]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "switch": change.switch,
                "run": run,
                "sent_s": round(place * ROW_S, 2),
                "notifications": len(delays_ms),
                "delay_p50_ms": float(np.median(delays_ms)),
                "delay_max_ms": float(delays_ms.max()),
            }
            for run, change in enumerate(changes)
            for place, delays_ms in _by_time(change, ROW_S)
        ]
    )


def _by_time(change: Change, step_s: float) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yields the number of each step of time and the delays of the notifications sent in it."""
    places = np.floor(change.sent_s / step_s).astype(int)
    for place in np.unique(places).tolist():
        yield place, change.delays_ms[places == place]


async def _measure_all(extent: Extent) -> list[Change]:
    changes = []
    progress = Progress("scaling", len(SWITCHES) * extent.repetitions)
    async with (
        cluster_processes() as cluster,
        client("subscribe", cluster.address, extent.subscriptions, extent.subscriptions_s) as subscriber,
    ):
        for repetition in range(extent.repetitions):
            # The order alternates, so that a machine that slows down favours neither switch.
            for switch in SWITCHES if repetition % 2 == 0 else SWITCHES[::-1]:
                changes.append(await _measure(cluster, subscriber, switch, extent))
                await Scaling(ClusterLayers(cluster.directory), timeout_s=CHANGE_S).change(_to(1, "epoch"))
                progress.advance(1)
    return changes


async def _measure(cluster: ClusterProcesses, subscriber: Client, switch: str, extent: Extent) -> Change:
    for _ in range(2):
        await cluster.start("matcher")
    async with (
        connect(cluster.address, name="probe") as connection,
        subscriber.subscribing_more(),
        Probe(connection, extent.notifications_s // BATCHES_S, reading) as probe,
    ):
        await asyncio.sleep(extent.calm_s - CALM_S)
        scaling = Scaling(ClusterLayers(cluster.directory), lambda: nullcontext(probe), CHANGE_S)
        outcome = await scaling.change(_to(3, switch))
    findings = outcome.findings
    assert findings is not None
    return Change(switch, outcome, np.array(findings.sent_s) - outcome.began_s, np.array(findings.delays_s) * 1000)


def _to(matchers: int, switch: str) -> Callable[[Wanted], Wanted]:
    def change(wanted: Wanted) -> Wanted:
        return msgspec.structs.replace(wanted, matchers=matchers, is_buffered=switch == "buffered")

    return change
