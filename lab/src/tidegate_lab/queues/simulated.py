"""The chapter on the simulated message queue: repeats figures 9 to 12 of the paper, and looks for better methods.

Every figure is a grid of scenarios (a deployment and its load) and variants (a method and its settings), each run with
several seeds. The same seed gives all variants the same devices, so only the methods cause differences between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tidegate_lab import pictures
from tidegate_lab.grid import Run as RunCases
from tidegate_lab.grid import SeededGrid, run_in_chunks
from tidegate_lab.queues.message_queue import (
    SET_A,
    SET_B,
    Case,
    Method,
    Parameters,
    simulate_table,
)
from tidegate_lab.report import Chapter, Estimate

Run: TypeAlias = RunCases[Case]

PAPER_SLEEP_S = 5.0
HIGHEST_RATE = 200.0
RDS_OVER_CONVENTIONAL = 1.75
PMS_FROM_RATE = 100.0
QUICKER = 10.0
HIT_RATE_EQUAL = 0.01
"""Hit rates with a smaller difference count as equal."""
GOOD_SHARE = 0.99
"""A sleep is good if its throughput is at least this share of the best."""


@dataclass(frozen=True)
class Extent:
    """The extent of the simulations."""

    seeds: Sequence[int]
    warm_up_s: float
    measured_s: float
    rates: Sequence[float]
    """Requests per second of each back-end (lambda)."""
    sleeps_s: Sequence[float]
    lingers_s: Sequence[float]


FULL = Extent(
    seeds=range(1, 11),
    warm_up_s=40.0,
    measured_s=120.0,
    rates=(10.0, 25.0, 50.0, 75.0, 100.0, 125.0, 150.0, 175.0, HIGHEST_RATE),
    sleeps_s=(0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, PAPER_SLEEP_S, 7.0, 10.0, 15.0, 20.0, 30.0),
    lingers_s=(0.0, 0.005, 0.01, 0.02, 0.05, 0.1),
)
SHORT = Extent(
    seeds=range(1, 6),
    warm_up_s=15.0,
    measured_s=30.0,
    rates=(10.0, 50.0, 100.0, 150.0, HIGHEST_RATE),
    sleeps_s=(0.02, 0.2, 0.5, 2.0, PAPER_SLEEP_S, 10.0),
    lingers_s=(0.0, 0.02, 0.1),
)


@dataclass(frozen=True)
class Variant:
    """A method with its settings, and its name in the report."""

    name: str
    method: Method
    settings: Mapping[str, Any] = field(default_factory=dict)


def rds(sleep_s: float) -> Variant:
    return Variant(f"RDS {sleep_s:g} s", Method.RDS, {"sleep_s": sleep_s})


def wake_up(linger_s: float, batch_messages: int = 25) -> Variant:
    settings = {"linger_s": linger_s, "batch_messages": batch_messages}
    return Variant(f"wake-up {linger_s * 1000:g} ms", Method.WAKE_UP, settings)


CONVENTIONAL = Variant("conventional", Method.CONVENTIONAL)
PMS = Variant("PMS", Method.PMS)
RDS = rds(PAPER_SLEEP_S)
ADAPTIVE = Variant("RDS-adaptive", Method.RDS_ADAPTIVE)
WAKE_UP_AT_ONCE = Variant("wake-up at once", Method.WAKE_UP, {"linger_s": 0.0, "batch_messages": 1})
WAKE_UP = wake_up(0.02)
WAKE_UP_PATIENT = wake_up(0.1)

PAPER_VARIANTS = (CONVENTIONAL, PMS, RDS, WAKE_UP)
ALL_VARIANTS = (CONVENTIONAL, PMS, rds(0.5), RDS, ADAPTIVE, WAKE_UP_AT_ONCE, WAKE_UP, WAKE_UP_PATIENT)
LOOKS = {
    CONVENTIONAL.name: pictures.BLACK,
    PMS.name: pictures.ORANGE,
    RDS.name: pictures.BLUE,
    WAKE_UP.name: pictures.GREEN,
    ADAPTIVE.name: pictures.PURPLE,
}

SMALL_BUFFERS = replace(SET_A, queue_messages_max=50, backlog_s_max=5e-3)
CONNECTIONS = {30: pictures.BLUE, 10: pictures.ORANGE, 3: pictures.GREEN}

BUSY = "4,000 messages/s, λ = 200"
SPARSE = "sparse: 400 messages/s"
OVERLOAD = "overload: 40,000 messages/s"
MANY_BACK_ENDS = "50 back-ends"
FEW_REQUESTS = "few requests: λ = 10"
LOADS = {
    BUSY: SET_A,
    SPARSE: replace(SET_A, offered_messages_per_s=400.0),
    OVERLOAD: replace(SET_A, offered_messages_per_s=40_000.0),
    MANY_BACK_ENDS: replace(SET_A, back_ends=50),
    FEW_REQUESTS: replace(SET_A, back_end_requests_per_s=10.0),
}


def run_here(what: str, cases: Sequence[Case]) -> pa.Table:
    """Runs the cases one after another in this process."""
    return run_in_chunks(simulate_table, what, cases)


class Grid(SeededGrid[Case]):
    """The results of scenarios x variants x seeds."""

    def __init__(self, extent: Extent) -> None:
        super().__init__()
        self._extent = extent

    def add(self, scenario: str, parameters: Parameters, variants: Sequence[Variant]) -> None:
        times: dict[str, Any] = {"warm_up_s": self._extent.warm_up_s, "measured_s": self._extent.measured_s}
        for variant in variants:
            settled = replace(parameters, **times, **variant.settings)
            for seed in self._extent.seeds:
                self.add_case(scenario, variant.name, Case(settled, variant.method, seed))


def write_chapter(out: Path, extent: Extent, run: Run = run_here) -> Chapter:
    """Runs all simulations, and writes pictures and data sets into `out`."""
    chapter = Chapter(out, "The simulated message queue")
    chapter.say(_MODEL)
    chapter.say(
        f"Each point is the mean of {len(extent.seeds)} seeds ({extent.seeds[0]} to {extent.seeds[-1]}), with its 95 % "
        f"confidence interval. {extent.measured_s:g} s of simulated time are measured after {extent.warm_up_s:g} s of "
        "warm-up."
    )
    _write_parameters(chapter)
    _write_request_rates(chapter, extent, run)
    _write_sleeps(chapter, extent, run)
    _write_loads(chapter, extent, run)
    _write_trade_off(chapter, extent, run)
    return chapter


_MODEL = """\
The model is from section 4 of M. Kinoshita et al., *High Throughput Dequeuing Technique in Distributed Message Queues
for IoT*, JIP 25, 2017, [DOI 10.2197/ipsjjip.25.199](https://doi.org/10.2197/ipsjjip.25.199). Devices send messages to
ten queues. Ten back-ends request messages, each λ times per second. Every queue is a server that serves enqueues and
dequeues in the order of arrival. A dequeue costs as much as twenty enqueues, even if it finds nothing.

* **conventional**: a request visits up to three queues in turn and returns what it found, even if that is nothing.
* **PMS**: a request visits the queues that were longest when last monitored, every 0.5 s.
* **RDS**: a request that found nothing is not answered. It sleeps and tries again. **RDS-adaptive** adapts the sleep to
  the traffic, between 10 ms and 5 s.
* **wake-up** (not in the paper): a request waits until a queue announces that it holds 25 messages, or that its oldest
  message has waited for 20 ms (or as named). Other queues that are ready top up the reply. The method assumes that no
  announcement is lost.

The values of the paper's tables were not available. The costs and bounds were fitted, so the ratio of RDS to
conventional checks the fit and is not independent evidence. Set A was fitted to RDS, and set B (a message of a hit
costs 1 ms instead of 0.2 ms) to PMS. No single set gave both curves of the paper. If a throughput is slightly above the
offered rate, queues are processing a backlog of the warm-up.

A claim that one method has more or less of something than another is held if the 95 % interval of the differences, seed
by seed, excludes zero. The means decide a claim of a ratio. A method that drops nothing counts as delivering enough,
even if another delivers more of its backlog of the warm-up. This rule was added after the first results."""


def _write_parameters(chapter: Chapter) -> None:
    chapter.section("Parameters")
    differing = {"hit_message_cost_s": f"{SET_A.hit_message_cost_s:g}; set B: {SET_B.hit_message_cost_s:g}"}
    names = [name for name in SET_A.__dataclass_fields__ if name not in ("warm_up_s", "measured_s")]
    rows = [(f"`{name}`", differing.get(name, f"{getattr(SET_A, name)}")) for name in names]
    half = (len(rows) + 1) // 2
    right = [*rows[half:], ("", "")][:half]
    chapter.table(
        ("parameter", "set A", "parameter", "set A"), [(*a, *b) for a, b in zip(rows[:half], right, strict=True)]
    )


# Figures 9 to 11: by request rate.


@dataclass(frozen=True)
class _Measure:
    number: int
    picture: str
    field: str
    axis: str
    what: str


_MEASURES = (
    _Measure(9, "figure_09_throughput", "throughput_per_s", "throughput [messages/s]", "Throughput"),
    _Measure(10, "figure_10_hit_rate", "hit_rate", "dequeues that hit [share]", "Hit rate"),
    _Measure(11, "figure_11_messages_per_hit", "messages_per_hit", "messages per hit", "Messages per hit"),
)


def _rate(parameter_set: str, rate: float) -> str:
    return f"set {parameter_set}, λ = {rate:g}"


def _write_request_rates(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    for name, parameters in (("A", SET_A), ("B", SET_B)):
        for rate in extent.rates:
            grid.add(_rate(name, rate), replace(parameters, back_end_requests_per_s=rate), PAPER_VARIANTS)
    grid.run("figures 9 to 11", run)
    chapter.section("More requests, fewer messages (figures 9, 10 and 11 of the paper)")
    chapter.say(
        "If back-ends send more requests, more dequeues find their queue empty. Each costs the queue almost as much as "
        "a hit, until no time is left for enqueues and messages are dropped. PMS sends all dequeue controllers to the "
        "same queues, where the first takes many messages and the others find none. RDS and wake-up keep requests away "
        "from empty queues."
    )
    for measure in _MEASURES:
        caption = f"{measure.what} by request rate: figure {measure.number} of the paper, with wake-up added."
        chapter.picture(measure.picture, _draw_rates(grid, extent, measure), caption)
    chapter.data("request_rates", grid.table(), "sets A and B, all rates, methods and seeds")
    _claim_rds(chapter, grid, extent)
    _claim_pms(chapter, grid, extent)


def _draw_rates(grid: Grid, extent: Extent, measure: _Measure) -> Figure:
    figure, panels = pictures.new_figure(2)
    lines = {name: [_rate_line(grid, extent, measure, name, variant) for variant in PAPER_VARIANTS] for name in "AB"}
    for axes, name in zip(panels, lines, strict=True):
        pictures.draw_lines(axes, lines[name])
        pictures.name_axes(axes, f"Parameter set {name}", "requests per second of each back-end (λ)", measure.axis)
        axes.set_xlim(left=0)
        pictures.set_x_ticks(axes, range(0, 201, 50))
    pictures.share_y_limits(panels)
    for axes, name in zip(panels, lines, strict=True):
        pictures.label_ends(figure, axes, lines[name])
    return figure


def _rate_line(grid: Grid, extent: Extent, measure: _Measure, parameter_set: str, variant: Variant) -> pictures.Line:
    y = [grid.estimate(_rate(parameter_set, rate), variant.name, measure.field) for rate in extent.rates]
    return pictures.Line(variant.name, LOOKS[variant.name], extent.rates, y)


def _claim_rds(chapter: Chapter, grid: Grid, extent: Extent) -> None:
    highest = _rate("A", HIGHEST_RATE)
    conventional = grid.estimate(highest, CONVENTIONAL.name, "throughput_per_s")
    held = grid.estimate(highest, RDS.name, "throughput_per_s")
    ratio = held.mean / conventional.mean
    chapter.claim(
        f"RDS delivers at least {RDS_OVER_CONVENTIONAL} times the conventional throughput at λ = {HIGHEST_RATE:g}",
        ratio >= RDS_OVER_CONVENTIONAL,
        f"{ratio:.2f} ({held.write()} over {conventional.write()} messages/s; paper: 1.80)",
    )
    by_rate = [grid.estimate(_rate("A", rate), RDS.name, "throughput_per_s").mean for rate in extent.rates]
    lowest = min(by_rate) / SET_A.offered_messages_per_s
    chapter.claim(
        "RDS keeps its throughput at every request rate",
        lowest >= 0.97,
        f"at least {lowest:.1%} of the offered rate",
    )


def _claim_pms(chapter: Chapter, grid: Grid, extent: Extent) -> None:
    rates = [rate for rate in extent.rates if rate >= PMS_FROM_RATE]

    def differences(measure: str) -> list[Estimate]:
        return [grid.difference(_rate("B", rate), PMS.name, CONVENTIONAL.name, measure) for rate in rates]

    span = f"PMS against conventional, λ = {rates[0]:g} to {rates[-1]:g}, set B"
    hit_rate = max(differences("hit_rate"), key=lambda difference: difference.mean)
    is_lower = hit_rate.mean <= HIT_RATE_EQUAL
    chapter.claim(f"{span}: lower or equal hit rate (±{HIT_RATE_EQUAL:g})", is_lower, f"at most {hit_rate.write(3)}")
    messages = min(differences("messages_per_hit"), key=lambda difference: difference.mean)
    chapter.claim(f"{span}: more messages per hit", messages.is_above_zero, f"at least {messages.write(2)} more")
    throughput = min(differences("throughput_per_s"), key=lambda difference: difference.mean)
    measured = f"at least {throughput.write()} messages/s more"
    chapter.claim(f"{span}: higher throughput", throughput.is_above_zero, measured)


# Figure 12: by sleep.


def _connections(buffers: str, connections: int) -> str:
    return f"{buffers}, {connections} connections"


_BUFFERS = {
    "set A": ("Set A: 400 messages a queue, backlog 25 ms", SET_A),
    "small buffers": ("Small buffers: 50 messages, backlog 5 ms", SMALL_BUFFERS),
}


def _write_sleeps(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    variants = (CONVENTIONAL, *(rds(sleep_s) for sleep_s in extent.sleeps_s))
    for buffers, (_title, parameters) in _BUFFERS.items():
        for connections in CONNECTIONS:
            deployed = replace(parameters, connections_per_back_end=connections)
            grid.add(_connections(buffers, connections), deployed, variants)
    grid.run("figure 12", run)
    chapter.section("How long to sleep (figure 12 of the paper)")
    chapter.say(
        "If the sleep is too short, requests wake up for queues that are still empty, which is worse than answering "
        "immediately. If it is too long, messages wait until the queues are full. The lower limit depends on the "
        "number of connections W of a back-end, because that many requests share the queues' spare time. The upper "
        "limit depends on the capacity of the queues. The paper has two optima, 5 s in simulation and 0.1 s to 0.5 s "
        "on its servers. They differ like those of many and few connections here. No fixed sleep suits every "
        "deployment."
    )
    caption = "Throughput of RDS (solid) by its sleep, with W connections per back-end; dashed: conventional."
    chapter.picture("figure_12_sleep", _draw_sleeps(grid, extent), caption)
    chapter.data("sleeps", grid.table(), "RDS at every sleep and the conventional method, λ = 200")
    _write_best_sleeps(chapter, grid, extent)
    _claim_sleeps(chapter, grid, extent)


def _draw_sleeps(grid: Grid, extent: Extent) -> Figure:
    figure, panels = pictures.new_figure(2, width=6.2)
    lines = {buffers: [_sleep_line(grid, extent, buffers, w) for w in CONNECTIONS] for buffers in _BUFFERS}
    for axes, (buffers, (title, _parameters)) in zip(panels, _BUFFERS.items(), strict=True):
        axes.set_xscale("log")
        pictures.draw_lines(axes, lines[buffers])
        pictures.name_axes(axes, title, "sleep of RDS [s]", "throughput [messages/s]")
        axes.set_xlim(left=min(extent.sleeps_s) / 7)  # room for the names
        pictures.set_x_ticks(axes, (0.02, 0.1, 0.5, 2, 5, 10, 20))
    pictures.share_y_limits(panels)
    for axes, buffers in zip(panels, _BUFFERS, strict=True):
        pictures.label_starts(figure, axes, lines[buffers])
        _draw_conventional(figure, axes, grid, buffers)
    return figure


def _sleep_line(grid: Grid, extent: Extent, buffers: str, connections: int) -> pictures.Line:
    scenario = _connections(buffers, connections)
    y = [grid.estimate(scenario, rds(sleep_s).name, "throughput_per_s") for sleep_s in extent.sleeps_s]
    return pictures.Line(f"W = {connections}", CONNECTIONS[connections], extent.sleeps_s, y)


def _draw_conventional(figure: Figure, axes: Axes, grid: Grid, buffers: str) -> None:
    labels = []
    for connections, look in CONNECTIONS.items():
        y = grid.estimate(_connections(buffers, connections), CONVENTIONAL.name, "throughput_per_s").mean
        axes.axhline(y, color=look.colour, linestyle=(0, (5, 3)), linewidth=1.1)
        labels.append(pictures.Label(f"conventional, W = {connections}", look, y))
    pictures.label_right(figure, axes, labels)


def _good_sleeps(grid: Grid, extent: Extent, scenario: str) -> list[float]:
    throughputs = {
        sleep_s: grid.estimate(scenario, rds(sleep_s).name, "throughput_per_s").mean for sleep_s in extent.sleeps_s
    }
    best = max(throughputs.values())
    return [sleep_s for sleep_s, throughput in throughputs.items() if throughput >= GOOD_SHARE * best]


def _best_sleep(grid: Grid, extent: Extent, scenario: str) -> tuple[float, Estimate]:
    estimates = [(s, grid.estimate(scenario, rds(s).name, "throughput_per_s")) for s in extent.sleeps_s]
    return max(estimates, key=lambda pair: pair[1].mean)


def _write_best_sleeps(chapter: Chapter, grid: Grid, extent: Extent) -> None:
    rows = []
    for buffers in _BUFFERS:
        for connections in CONNECTIONS:
            scenario = _connections(buffers, connections)
            best_s, throughput = _best_sleep(grid, extent, scenario)
            good_s = _good_sleeps(grid, extent, scenario)
            conventional = grid.estimate(scenario, CONVENTIONAL.name, "throughput_per_s")
            span = f"{min(good_s):g} to {max(good_s):g}"
            rows.append((buffers, str(connections), conventional.write(), f"{best_s:g}", throughput.write(), span))
    head = ("buffers", "W", "conventional [messages/s]", "best sleep [s]", "RDS then [messages/s]", "within 1 % [s]")
    chapter.table(head, rows)


def _claim_sleeps(chapter: Chapter, grid: Grid, extent: Extent) -> None:
    many, few = max(CONNECTIONS), min(CONNECTIONS)
    best_many_s, _ = _best_sleep(grid, extent, _connections("small buffers", many))
    best_few_s, _ = _best_sleep(grid, extent, _connections("small buffers", few))
    chapter.claim(
        "The best sleep depends on the number of connections W (small buffers)",
        best_few_s < best_many_s,
        f"{best_many_s:g} s with W = {many}, {best_few_s:g} s with W = {few}",
    )
    shortest_many_s = min(_good_sleeps(grid, extent, _connections("set A", many)))
    shortest_few_s = min(_good_sleeps(grid, extent, _connections("set A", few)))
    chapter.claim(
        "The shortest sleep within 1 % of the best throughput depends on W (set A)",
        shortest_few_s < shortest_many_s,
        f"{shortest_many_s:g} s with W = {many}, {shortest_few_s:g} s or less with W = {few}",
    )
    scenario, shortest = _connections("set A", many), rds(min(extent.sleeps_s)).name
    ratio = (
        grid.estimate(scenario, shortest, "throughput_per_s").mean
        / grid.estimate(scenario, CONVENTIONAL.name, "throughput_per_s").mean
    )
    chapter.claim(
        "A sleep that is too short is worse than none", ratio < 1, f"{shortest}: {ratio:.2f} times conventional"
    )


# Methods that are better than RDS.


def _write_loads(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    for load, parameters in LOADS.items():
        grid.add(load, parameters, ALL_VARIANTS)
    grid.run("loads", run)
    chapter.section("Methods that are better than RDS")
    chapter.say("Cost is the work of the queues per delivered message. Unless stated otherwise, λ = 200 with set A.")
    head = ("load", "method", "throughput [messages/s]", "dropped [messages/s]", "hit rate", "messages a hit")
    chapter.table((*head, "p50 [ms]", "p99 [ms]", "cost [ms]"), _load_rows(grid))
    chapter.data("loads", grid.table(), "five loads, all methods and seeds")
    _claim_wake_up(chapter, grid)
    for load in LOADS:
        _claim_load(chapter, grid, load)


def _load_rows(grid: Grid) -> list[tuple[str, ...]]:
    columns = (
        ("throughput_per_s", 0, 1.0),
        ("dropped_per_s", 0, 1.0),
        ("hit_rate", 3, 1.0),
        ("messages_per_hit", 1, 1.0),
        ("latency_p50_s", 1, 1000.0),
        ("latency_p99_s", 1, 1000.0),
        ("cost_per_message_s", 3, 1000.0),
    )
    rows = []
    for load in LOADS:
        for variant in ALL_VARIANTS:
            name = load if variant is ALL_VARIANTS[0] else ""
            estimates = [(grid.estimate(load, variant.name, field), d, scale) for field, d, scale in columns]
            rows.append((name, variant.name, *(estimate.write(d, scale) for estimate, d, scale in estimates)))
    return rows


def _delivers_no_less(grid: Grid, load: str, ours: str, theirs: str) -> bool:
    """Reports whether our method delivers at least as much as theirs, or drops nothing.

    A method that drops nothing delivers everything. Another can only appear to deliver more, from a backlog that it
    built up during the warm-up."""
    is_all = grid.estimate(load, ours, "dropped_per_s").mean == 0
    return is_all or not grid.difference(load, ours, theirs, "throughput_per_s").is_below_zero


def _claim_wake_up(chapter: Chapter, grid: Grid) -> None:
    ours, theirs = WAKE_UP.name, RDS.name

    def against(measure: str, digits: int, scale: float = 1.0) -> str:
        pair = [grid.estimate(BUSY, name, measure).write(digits, scale) for name in (ours, theirs)]
        return " against ".join(pair)

    chapter.claim(
        f"{ours} delivers no less than {theirs}, or drops nothing, at λ = 200",
        _delivers_no_less(grid, BUSY, ours, theirs),
        f"{against('throughput_per_s', 0)} messages/s; dropped {against('dropped_per_s', 1)} messages/s",
    )
    chapter.claim(
        f"{ours} costs less per message than {theirs} at λ = 200",
        grid.difference(BUSY, ours, theirs, "cost_per_message_s").is_below_zero,
        f"{against('cost_per_message_s', 3, 1000)} ms",
    )
    ratio = grid.estimate(BUSY, theirs, "latency_p99_s").mean / grid.estimate(BUSY, ours, "latency_p99_s").mean
    chapter.claim(
        f"The p99 of {ours} is at least {QUICKER:g} times lower than that of {theirs} at λ = 200",
        ratio >= QUICKER,
        f"{ratio:.0f} times: {against('latency_p99_s', 1, 1000)} ms",
    )


def _claim_load(chapter: Chapter, grid: Grid, load: str) -> None:
    is_better = {variant.name: _beats_rds(grid, load, variant.name) for variant in (WAKE_UP, WAKE_UP_PATIENT)}
    chapter.claim(
        f"{load}: a wake-up has a lower cost and p99 than {RDS.name}, and delivers no less or drops nothing",
        any(is_better.values()),
        ", ".join(f"{name}: {'yes' if is_held else 'no'}" for name, is_held in is_better.items()),
    )


def _beats_rds(grid: Grid, load: str, ours: str) -> bool:
    measures = ("cost_per_message_s", "latency_p99_s")
    is_lower = [grid.difference(load, ours, RDS.name, measure).is_below_zero for measure in measures]
    return all(is_lower) and _delivers_no_less(grid, load, ours, RDS.name)


def _write_trade_off(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    sleepers = [rds(sleep_s) for sleep_s in extent.sleeps_s if 0.5 <= sleep_s <= PAPER_SLEEP_S]
    wakers = [wake_up(linger_s, batch_messages=50) for linger_s in extent.lingers_s]
    grid.add(BUSY, SET_A, (*sleepers, *wakers, ADAPTIVE))
    grid.run("latency and cost", run)
    chapter.section("Latency and cost")
    chapter.say(
        "With RDS, a longer sleep lowers the cost, but unlucky messages wait much longer. With wake-up, the linger "
        "(here with batches of up to 50 messages) lowers the cost for a few milliseconds of waiting. The linger bounds "
        "the wait directly, while after a sleep of RDS there may still be no message."
    )
    figure = _draw_trade_off(grid, sleepers, wakers)
    caption = "Cost per message by p99 of latency at λ = 200, set A; lower left is better."
    chapter.picture("latency_and_cost", figure, caption)
    chapter.data("latency_and_cost", grid.table(), "RDS by sleep, wake-up by linger, RDS-adaptive")


def _draw_trade_off(grid: Grid, sleepers: Sequence[Variant], wakers: Sequence[Variant]) -> Figure:
    figure, (axes,) = pictures.new_figure(1, width=7.6, height=4.4)
    for variants, look in ((sleepers, pictures.BLUE), (wakers, pictures.GREEN), ((ADAPTIVE,), pictures.PURPLE)):
        x = [grid.estimate(BUSY, variant.name, "latency_p99_s").mean * 1000 for variant in variants]
        y = [grid.estimate(BUSY, variant.name, "cost_per_message_s").mean * 1000 for variant in variants]
        axes.plot(x, y, color=look.colour, marker=look.marker, markersize=5, linewidth=1.6)
        for variant, *place in zip(variants, x, y, strict=True):
            axes.annotate(
                variant.name,
                (place[0], place[1]),
                xytext=(6, 4),
                textcoords="offset points",
                color=look.colour,
                fontsize=9,
            )
    axes.set_xscale("log")
    pictures.set_x_ticks(axes, (5, 10, 20, 50, 100, 200, 500, 1000))
    axes.set_xlim(5, 1100)
    axes.set_ylim(bottom=0)
    pictures.name_axes(axes, "Set A, λ = 200", "p99 of latency [ms]", "work of the queues per message [ms]")
    return figure
