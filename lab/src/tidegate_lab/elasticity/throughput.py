"""The chapter on throughput: the rate of the layers by numbers of slices and subscriptions, and the gain of each slice.

All slices share the cores of this machine, so the measured rate hardly shows what another slice gains. The CPU time
per notification in each slice shows it: with a core for each slice, the busiest slice would bound the rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from tidegate.cluster.cluster_layers import ClusterLayers
from tidegate.cluster.observer import Observer
from tidegate.cluster.scaling import Scaling
from tidegate.hosts.load import LOAD_S
from tidegate.layers.frames import Load
from tidegate.layers.layer import Layer, layer_of
from tidegate_lab import pictures
from tidegate_lab.elasticity.cluster_processes import ClusterProcesses, cluster_processes
from tidegate_lab.elasticity.load import client
from tidegate_lab.report import Chapter, Estimate, Progress

Layout = tuple[int, int, int]
CHANGE_S: Final = 600.0
KINDS: Final = ("access-point", "matcher", "exit-point")


@dataclass(frozen=True)
class Extent:
    subscriptions: Sequence[int]
    layouts: Sequence[Layout]
    warm_up_s: float
    measured_s: float


FULL = Extent((1000, 10_000, 100_000, 1_000_000), ((1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 6, 2)), 2.0, 6.0)
SHORT = Extent((1000, 10_000), ((1, 1, 1), (1, 2, 1), (1, 3, 1)), 1.5, 2.0)


@dataclass(frozen=True)
class Measured:
    """CPU time in microseconds per notification: of the Access Point and the Exit Point that handle it, of the busiest
    Matcher, and of the broker with its Connection Points."""

    subscriptions: int
    access_points: int
    matchers: int
    exit_points: int
    notifications_s: float
    access_point_us: float
    matcher_us: float
    exit_point_us: float
    broker_us: float

    @property
    def layout(self) -> str:
        return f"{self.access_points}-{self.matchers}-{self.exit_points}"

    @property
    def bound_s(self) -> float:
        """Notifications per second that the busiest slice could handle if it had a core to itself.

        Access Points and Exit Points share the notifications, while every Matcher handles all of them."""
        return 1e6 / max(
            self.access_point_us / self.access_points, self.matcher_us, self.exit_point_us / self.exit_points
        )


def write_chapter(out: Path, extent: Extent) -> Chapter:
    chapter = Chapter(out, "Throughput by configuration")
    results = asyncio.run(_measure_all(extent))
    chapter.say(
        "Every slice, the broker, the publisher and the subscriber are processes on this machine. A publisher sends "
        "lists of 256 as fast as they are acknowledged. Every notification is delivered to one subscriber, and "
        "compared with all subscriptions of others, which match hardly any. A configuration is named Access "
        "Points-Matchers-Exit Points. The cluster is scaled from one configuration to the next and keeps its "
        f"subscriptions. Each is measured for {extent.measured_s:g} s. CPU time is in µs per notification. With a core "
        "for each slice, the busiest slice would bound the rate. The last column is this bound, which can be computed "
        "on a machine with few cores too."
    )
    chapter.table(
        ("subscriptions", "configuration", "notifications/s here", "Access Points µs", "busiest Matcher µs",
         "Exit Points µs", "broker µs", "bound by the busiest slice, /s"),
        [
            (
                f"{each.subscriptions:,}", each.layout, f"{each.notifications_s:,.0f}", f"{each.access_point_us:.2f}",
                f"{each.matcher_us:.2f}", f"{each.exit_point_us:.2f}", f"{each.broker_us:.2f}", f"{each.bound_s:,.0f}",
            )
            for each in results
        ],
    )  # fmt: skip
    _write_speedup(chapter, results)
    _draw(chapter, results)
    chapter.data("throughput", pa.Table.from_pylist([asdict(each) for each in results]), "one per configuration")
    _claim(chapter, results)
    return chapter


def _write_speedup(chapter: Chapter, results: Sequence[Measured]) -> None:
    chapter.section("The gain of more Matchers")
    chapter.say(
        "Speedup is the work of a single Matcher per notification, divided by that of the busiest of several. "
        "Efficiency is the speedup divided by the number of Matchers. The Karp-Flatt metric is the share of the work "
        "that appears not to be divided, because every Matcher decodes every notification."
    )
    rows = []
    for one in results:
        if one.matchers == 1:
            continue
        alone = next(each for each in results if each.subscriptions == one.subscriptions and each.matchers == 1)
        speedup = alone.matcher_us / one.matcher_us
        serial = (1 / speedup - 1 / one.matchers) / (1 - 1 / one.matchers)
        rows.append(
            (
                f"{one.subscriptions:,}", one.layout, f"{speedup:.2f}", f"{speedup / one.matchers:.2f}",
                f"{serial:.2f}", f"{one.bound_s / alone.bound_s:.2f}",
            )
        )  # fmt: skip
    chapter.table(
        ("subscriptions", "configuration", "speedup", "efficiency", "Karp-Flatt", "speedup of the whole"), rows
    )


def _draw(chapter: Chapter, results: Sequence[Measured]) -> None:
    looks = (pictures.BLACK, pictures.BLUE, pictures.GREEN, pictures.ORANGE)
    figure, (rates, work) = pictures.new_figure(2)
    sizes = sorted({each.subscriptions for each in results})
    for axes, value in ((rates, "bound_s"), (work, "matcher_us")):
        lines = []
        for look, size in zip(looks, sizes, strict=False):
            mine = [each for each in results if each.subscriptions == size]
            values = [Estimate(getattr(each, value) / (1000 if value == "bound_s" else 1), 0.0) for each in mine]
            lines.append(pictures.Line(f"{size:,}", look, [each.matchers for each in mine], values))
        pictures.draw_lines(axes, lines)
        pictures.set_x_ticks(axes, sorted({each.matchers for each in results}))
        axes.set_ylim(0)
        pictures.label_ends(figure, axes, lines)
    pictures.name_axes(rates, "Bound by the busiest slice", "Matchers", "thousand notifications/s")
    pictures.name_axes(work, "Work of the busiest Matcher", "Matchers", "µs per notification")
    chapter.picture("throughput", figure, "By number of Matchers, with a line for each number of subscriptions")


def _claim(chapter: Chapter, results: Sequence[Measured]) -> None:
    rates = {each.subscriptions: each.notifications_s for each in results if each.layout == "1-1-1"}
    for size, least in ((1000, 300_000), (1_000_000, 60_000)):
        if size in rates:
            chapter.claim(
                f"1-1-1 carries at least {least:,} notifications/s with {size:,} subscriptions, in separate processes "
                "on this machine's cores",
                rates[size] >= least,
                f"{rates[size]:,.0f}/s",
            )


async def _measure_all(extent: Extent) -> list[Measured]:
    results = []
    progress = Progress("throughput", len(extent.subscriptions) * len(extent.layouts))
    for subscriptions in extent.subscriptions:
        async with (
            cluster_processes() as cluster,
            client("subscribe", cluster.address, subscriptions - 1, 0),
            Observer(cluster.directory) as observer,
        ):
            present = dict.fromkeys(KINDS, 1)
            for layout in extent.layouts:
                await _scale_to(cluster, layout, present)
                results.append(await _measure(cluster, observer, subscriptions, layout, extent))
                progress.advance(1)
    return results


async def _scale_to(cluster: ClusterProcesses, layout: Layout, present: dict[str, int]) -> None:
    for kind, count in zip(KINDS, layout, strict=True):
        for _ in range(count - present[kind]):
            await cluster.start(kind)
        present[kind] = count
    counts = dict(zip(("access_points", "matchers", "exit_points"), layout, strict=True))
    scaling = Scaling(ClusterLayers(cluster.directory), timeout_s=CHANGE_S)
    await scaling.change(lambda wanted: msgspec.structs.replace(wanted, **counts))


async def _measure(
    cluster: ClusterProcesses, observer: Observer, subscriptions: int, layout: Layout, extent: Extent
) -> Measured:
    async with client("take", cluster.address), client("publish", cluster.address):
        await asyncio.sleep(extent.warm_up_s)
        before = await observer.loads()
        await asyncio.sleep(max(extent.measured_s, 3 * LOAD_S))
        after = await observer.loads()
    return Measured(
        subscriptions,
        *layout,
        notifications_s=_rate(before, after),
        access_point_us=sum(_work_us(before, after, Layer.ACCESS_POINT)) / layout[0],
        matcher_us=max(_work_us(before, after, Layer.MATCHER)),
        exit_point_us=sum(_work_us(before, after, Layer.EXIT_POINT)) / layout[2],
        broker_us=sum(_work_us(before, after, None)),
    )


def _rate(before: dict[str, Load], after: dict[str, Load]) -> float:
    """Returns the notifications per second that left the Exit Points."""
    return sum(
        (load.notifications - before[name].notifications) / (load.at_s - before[name].at_s)
        for name, load in after.items()
        if layer_of(name) is Layer.EXIT_POINT and name in before
    )


def _work_us(before: dict[str, Load], after: dict[str, Load], layer: Layer | None) -> list[float]:
    """Returns, for each slice of a layer, the CPU microseconds per notification that it handled."""
    return [
        1e6 * (load.cpu_s - before[name].cpu_s) / max(1, load.notifications - before[name].notifications)
        for name, load in after.items()
        if layer_of(name) is layer and name in before and load.notifications > before[name].notifications
    ] or [float("nan")]
