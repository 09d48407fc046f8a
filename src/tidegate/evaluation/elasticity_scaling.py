"""The chapter on scaling while everything flows: what subscribers notice when 1-1-1 becomes 1-3-1, with both switches.

The buffered switch is the paper's order of steps: notifications are held back until the old slices have nothing left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.client import connect
from tidegate.cluster.change import CALM_S, change_layers
from tidegate.cluster.directory import Wanted
from tidegate.cluster.outcome import Outcome
from tidegate.cluster.probe import Probe
from tidegate.evaluation import pictures
from tidegate.evaluation.cluster_processes import ClusterProcesses, cluster_processes
from tidegate.evaluation.elasticity_load import Client, client, reading
from tidegate.evaluation.report import Chapter, Progress

CHANGE_S: Final = 300.0
BATCHES_S: Final = 100
BIN_S: Final = 0.1
ROW_S: Final = 0.02
SWITCHES: Final = ("epoch", "buffered")
# What may be asked of the epoch switch, from the issue of the paper's 588 ms in which notifications were held.
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
    """One scaling, as subscribers saw it. Times are from when it was asked for."""

    switch: str
    outcome: Outcome
    sent_s: NDArray[np.float64]
    delays_ms: NDArray[np.float64]

    @property
    def before_ms(self) -> NDArray[np.float64]:
        """Of what had arrived before."""
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
    chapter = Chapter(out, "Scaling while everything flows")
    changes = asyncio.run(_measure_all(extent))
    chapter.say(
        f"1-1-1 becomes 1-3-1 with {extent.subscriptions:,} subscriptions, while {extent.notifications_s:,} "
        f"notifications/s are published, each wanted by sixteen subscriptions that lie with all Matchers, and "
        f"{extent.subscriptions_s:,} new subscriptions/s arrive. Two slices stand by, so that their start is not part "
        f"of it. Both switches take turns, {extent.repetitions} times each, on one cluster, which is scaled back in "
        "between. The delay is from the program that publishes to the last of the sixteen subscriptions of a program; "
        "lost, doubled and out of order are counted over all deliveries."
    )
    chapter.table(
        ("switch", "total s", "moved", "p99.9 before ms", "p99.9 during ms", "extra ms", "longest ms", "lost",
         "doubled", "out of order"),
        [_row(change) for change in changes],
    )  # fmt: skip
    _draw(chapter, changes)
    chapter.data("scaling", _as_table(changes), f"one for what was sent in each {ROW_S * 1000:g} ms of a run")
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
        f"The epoch switch delays p99.9 of the deliveries by at most {EXTRA_MS_MAX:g} ms more (median of the runs)",
        extra["epoch"] <= EXTRA_MS_MAX,
        f"{extra['epoch']:.0f} ms; {', '.join(f'{c.extra_ms:.0f}' for c in changes if c.switch == 'epoch')}",
    )
    chapter.claim(
        "That is at most a third of what the buffered switch delays them",
        extra["epoch"] <= PART_OF_BUFFERED_MAX * extra["buffered"],
        f"{extra['epoch']:.0f} of {extra['buffered']:.0f} ms",
    )
    longest_s = max(change.outcome.seconds for change in changes if change.switch == "epoch")
    chapter.claim(f"Scaling takes less than {TOTAL_S_MAX:g} s", longest_s < TOTAL_S_MAX, f"{longest_s:.1f} s at most")
    found = [change.outcome.findings for change in changes]
    faults = [sum(getattr(each, name) for each in found) for name in ("lost", "doubled", "disordered")]
    chapter.claim(
        "Nothing is lost, doubled or out of order, whatever the switch", not any(faults), ", ".join(map(str, faults))
    )


def _draw(chapter: Chapter, changes: Sequence[Change]) -> None:
    """The longest delay of what was sent in each tenth of a second; of each switch the run in the middle."""
    figure, panels = pictures.new_figure(2)
    for axes, switch, look in zip(panels, SWITCHES, (pictures.BLUE, pictures.ORANGE), strict=True):
        mine = sorted((change for change in changes if change.switch == switch), key=lambda change: change.extra_ms)
        change = mine[len(mine) // 2]
        longest = {place * BIN_S: delays_ms.max() for place, delays_ms in _by_time(change, BIN_S)}
        axes.step(list(longest), list(longest.values()), where="post", color=look.colour, linewidth=1.3)
        axes.axvspan(0, change.outcome.seconds, color="#EEEEEE", zorder=0)
        pictures.name_axes(axes, f"{switch}: the layers change in the grey", "s since it was asked for", "ms, longest")
    pictures.share_y_limits(panels)
    chapter.picture("scaling", figure, "Longest delivery delay of what was sent in each 0.1 s")


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
    """The delays of what was sent in each step."""
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
            # In turns, forwards and backwards, against whatever drifts.
            for switch in SWITCHES if repetition % 2 == 0 else SWITCHES[::-1]:
                changes.append(await _measure(cluster, subscriber, switch, extent))
                await change_layers(cluster.directory, _to(1, "epoch"), None, CHANGE_S, lambda _phase: None)
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
        outcome = await change_layers(cluster.directory, _to(3, switch), probe, CHANGE_S, lambda _phase: None)
    findings = outcome.findings
    assert findings is not None
    return Change(switch, outcome, np.array(findings.sent_s) - outcome.began_s, np.array(findings.delays_s) * 1000)


def _to(matchers: int, switch: str) -> Callable[[Wanted], Wanted]:
    def change(wanted: Wanted) -> Wanted:
        return msgspec.structs.replace(wanted, matchers=matchers, is_buffered=switch == "buffered")

    return change
