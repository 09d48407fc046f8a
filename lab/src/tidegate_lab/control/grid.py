"""Grid of active control: runs scenarios x policies x seeds, simulated or measured, and draws their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

from matplotlib.figure import Figure

from tidegate_lab import pictures
from tidegate_lab.control.policies import Policy
from tidegate_lab.control.request_pool import Case, Parameters
from tidegate_lab.grid import SeededGrid
from tidegate_lab.report import Chapter, Estimate, Ratio

FIRST_S = 4.0
"""The first interval between checks, unless a scenario has its own."""


@dataclass(frozen=True)
class Extent:
    """The extent of the runs. A `size` below 1 reduces the number of clients and the broker's speed alike, for trials
    of the chapter."""

    seeds: Sequence[int]
    sizes: Sequence[int]
    """The numbers of clients in the last picture."""
    size: float = 1.0


class Grid(SeededGrid[Case]):
    """The results of scenarios x policies x seeds."""

    def __init__(self, extent: Extent) -> None:
        super().__init__()
        self._extent = extent

    def add(self, scenario: str, parameters: Parameters, policies: Sequence[Policy], first_s: float = FIRST_S) -> None:
        for policy in policies:
            settled = resized(replace(parameters, **policy.broker), self._extent.size)
            control = replace(policy.control, interval=replace(policy.control.interval, first_s=first_s))
            for seed in self._extent.seeds:
                self.add_case(scenario, policy.name, Case(settled, control, seed))

    def mean(self, scenario: str, policy: Policy, measure: str) -> float:
        return self.estimate(scenario, policy.name, measure).mean

    def over(self, scenario: str, ours: Policy, theirs: Policy, measure: str) -> Ratio:
        return self.ratio(scenario, ours.name, theirs.name, measure)

    def excess(self, scenario: str, ours: Policy, theirs: Policy, measure: str) -> float:
        """Returns the mean of ours minus theirs, which is negative if ours is lower."""
        return self.difference(scenario, ours.name, theirs.name, measure).mean


def resized(parameters: Parameters, size: float) -> Parameters:
    """Scales the number of clients and the broker's speed alike, so that the load of the broker stays the same."""
    return replace(
        parameters,
        clients=max(parameters.lanes, round(parameters.clients * size)),
        query_s=parameters.query_s / size,
        cached_query_s=parameters.cached_query_s / size,
        notification_s=parameters.notification_s / size,
        probes_per_s=parameters.probes_per_s * size,
    )


Column: TypeAlias = tuple[str, str, int, float]
"""The title of a column, its measure, the number of digits, and the factor that converts the unit."""
CORE: Sequence[Column] = (
    ("stale [%]", "stale_share", 1, 100.0),
    ("age [ms]", "age_s", 0, 1000.0),
    ("p50 [ms]", "response_p50_s", 1, 1000.0),
    ("p99 [ms]", "response_p99_s", 0, 1000.0),
    ("p99.9 [ms]", "response_p999_s", 0, 1000.0),
    ("requests a minute", "requests_per_minute", 1, 1.0),
)
LOAD: Sequence[Column] = (
    ("refused [%]", "refused_share", 1, 100.0),
    ("notifications lost [%]", "notification_loss", 1, 100.0),
    ("bystander p99 [ms]", "bystander_p99_s", 0, 1000.0),
)
CROWD: Sequence[Column] = (("IDC", "dispersion", 1, 1.0), ("peak a 100 ms", "peak_requests", 0, 1.0))
DETECTION: Sequence[Column] = (
    ("false alarms [%]", "false_alarm_share", 1, 100.0),
    ("missed [%]", "missed_share", 1, 100.0),
)
SERVICE: Sequence[Column] = (
    ("goodput [1/s]", "goodput_per_s", 0, 1.0),
    ("wasted [%]", "wasted_share", 1, 100.0),
    ("timed out [%]", "timed_out_share", 1, 100.0),
)
FAIRNESS: Sequence[Column] = (("fairness", "fairness", 3, 1.0),)


def write_rows(
    chapter: Chapter, grid: Grid, scenarios: Sequence[str], policies: Sequence[Policy], columns: Sequence[Column]
) -> None:
    """Adds a table with one row per scenario and policy. Only the first row of a scenario shows its name."""
    rows = []
    for scenario in scenarios:
        for policy in policies:
            cells = [grid.estimate(scenario, policy.name, name).write(d, scale) for _, name, d, scale in columns]
            rows.append((scenario if policy is policies[0] else "", policy.name, *cells))
    chapter.table(("scenario", "policy", *(title for title, *_ in columns)), rows)


@dataclass(frozen=True)
class Panel:
    """One panel of a picture: its titles, its measure, and the factor that converts the unit."""

    title: str
    values: str
    measure: str
    scale: float
    ticks: Sequence[float] = ()
    """The ticks of a logarithmic axis. Without ticks the axis is linear and begins at zero."""
    largest: float = inf
    """The largest possible value. The axis ends there, even if an interval extends beyond it."""


STALENESS = Panel("Staleness", "stale [%]", "stale_share", 100.0, largest=100.0)
RESPONSES = Panel("Response time", "p50 [ms]", "response_p50_s", 1000.0, (10, 100, 1000))
BYSTANDERS = Panel("Effect on bystanders", "p99 of their response times [ms]", "bystander_p99_s", 1000.0)


def draw_policies(
    scenario: str, policies: Sequence[Policy], grids: Mapping[str, Grid], panels: tuple[Panel, Panel]
) -> Figure:
    """Draws one row per policy. Each grid has its own colour and its name in the legend."""
    figure, axes = pictures.new_figure(2, width=6.0, height=1.4 + 0.23 * len(policies))
    names = [policy.name for policy in policies]
    looks = (pictures.BLUE, pictures.ORANGE)
    for each, panel in zip(axes, panels, strict=True):
        for (name, grid), look in zip(grids.items(), looks, strict=False):
            estimates = [grid.estimate(scenario, policy, panel.measure) for policy in names]
            pictures.draw_dots(each, name, look, estimates, panel.scale)
        pictures.name_rows(each, names)
        pictures.name_axes(each, panel.title, panel.values, "")
        if panel.ticks:
            each.set_xscale("log")
            pictures.set_x_ticks(each, panel.ticks)
        else:
            each.set_xlim(0, min(each.get_xlim()[1], panel.largest))
    axes[1].set_yticklabels([])
    if len(grids) > 1:
        axes[0].legend(frameon=False, fontsize=9)
    return figure


def draw_sizes(grid: Grid, sizes: Sequence[int], looks: Mapping[Policy, pictures.Look]) -> Figure:
    """Draws lines by the number of clients, which is also the scenario's name."""
    figure, axes = pictures.new_figure(2)
    drawn = []
    for each, panel in zip(axes, (STALENESS, BYSTANDERS), strict=True):
        lines = [
            pictures.Line(policy.name, look, sizes, _by_size(grid, sizes, policy, panel.measure), panel.scale)
            for policy, look in looks.items()
        ]
        pictures.draw_lines(each, lines)
        pictures.name_axes(each, panel.title, "clients", panel.values)
        each.set_ylim(0, min(each.get_ylim()[1], panel.largest))
        drawn.append((each, lines))
    for each, lines in drawn:
        pictures.label_ends(figure, each, lines)
    return figure


def _by_size(grid: Grid, sizes: Sequence[int], policy: Policy, measure: str) -> list[Estimate]:
    return [grid.estimate(str(size), policy.name, measure) for size in sizes]
