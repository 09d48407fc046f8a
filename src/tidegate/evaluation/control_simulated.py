"""The chapter on the simulated request pool: what active control does for an overloaded broker, and what does better.

Every table is a grid of scenarios (a broker and its load) and policies (how clients are paced, and what the broker does
about it), each run with several seeds. The same seed gives all policies the same updates. Claims and their limits were
written down before the runs, and are marked held or not by what these gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
from matplotlib.figure import Figure

from tidegate.client.control import (
    BackoffKind,
    BackoffSettings,
    Control,
    Detection,
    DetectionSettings,
    FirstValue,
    IntervalSettings,
    Strategy,
)
from tidegate.client.control.estimates import overload_probability
from tidegate.evaluation import grid as grids
from tidegate.evaluation import pictures
from tidegate.evaluation.report import Chapter, Ratio
from tidegate.simulation import request_pool
from tidegate.simulation.request_pool import Case, Parameters, simulate_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Run: TypeAlias = grids.Run[Case]

# What the issue of active control asks for.
FULL_STALE_RATIO = 0.55
FULL_RESPONSE_RATIO = 0.02
BACKOFF_STALE_RATIO = 0.8
SPREAD_BYSTANDER_RATIO = 0.35
# What its design expects beside.
SPREAD_DISPERSION_RATIO = 0.25


@dataclass(frozen=True)
class Extent:
    """How much is run. `size` makes all brokers and their clients smaller, and as much slower, to try the chapter."""

    seeds: Sequence[int]
    sizes: Sequence[int]
    """Numbers of clients of the last picture."""
    size: float = 1.0


FULL = Extent(seeds=range(1, 31), sizes=(250, 500, 1000, 1500, 2000, 3000, 4000))
SHORT = Extent(seeds=range(1, 4), sizes=(500, 1000, 2000, 4000))


@dataclass(frozen=True, eq=False)
class Policy:
    """How clients are paced, and what the broker does beside, as a reader names it."""

    name: str
    control: Control
    broker: Mapping[str, Any] = field(default_factory=dict)


def printed(strategy: Strategy = Strategy.ADAPTIVE) -> Control:
    """Clients as in the papers, without backoff."""
    return Control(
        IntervalSettings(strategy, is_frozen_by_congestion=False),
        DetectionSettings(network_s=Parameters.round_trip_s),
        BackoffSettings(BackoffKind.NONE),
        is_restarted_by_notifications=False,
        is_backoff_alone_after_failure=False,
    )


def repaired(
    detection: Detection = Detection.MEDIATE,
    first_value: FirstValue = FirstValue.EXCESS,
    kind: BackoffKind = BackoffKind.REPAIRED,
) -> Control:
    """Step 4: a check that was congested shortens nothing, and after a failure only the backoff is waited."""
    return Control(
        IntervalSettings(),
        DetectionSettings(detection, network_s=Parameters.round_trip_s),
        BackoffSettings(kind, first_value),
        is_restarted_by_notifications=False,
    )


def _printed_backoff() -> Control:
    detection = DetectionSettings(Detection.LIGHT_PRINTED, network_s=Parameters.round_trip_s, average_factor=1.0)
    return replace(printed(), detection=detection, backoff=BackoffSettings(BackoffKind.PRINTED))


RESTARTED = replace(repaired(), is_restarted_by_notifications=True)
DESIGN = {
    "is_giving_slots": True,
    "is_giving_spread": True,
    "is_conflating": True,
    "notifications_per_request": 12,
}
CODEL = {"codel_target_s": 0.05}

NONE = Policy("none", printed(Strategy.NONE))
FIXED = Policy("basic, fixed", printed(Strategy.FIXED))
RANDOM = Policy("basic, random", printed(Strategy.RANDOM))
AST = Policy("AST", printed())
ALG2_PRINTED = Policy("AST, Alg. 2 printed", printed(Strategy.ESTIMATES_PRINTED))
ALG2 = Policy("AST, Alg. 2 repaired", printed(Strategy.ESTIMATES))
RBT_PRINTED = Policy("AST+RBT as printed", _printed_backoff())
RBT = Policy("AST+RBT mediate", repaired())
RIGOROUS = Policy("AST+RBT rigorous", repaired(Detection.RIGOROUS))
RIGOROUS_MEAN = Policy("AST+RBT rigorous, mean", repaired(Detection.RIGOROUS_MEAN))
LIGHT = Policy("AST+RBT light", repaired(Detection.LIGHT))
FIRST_VALUES = [
    Policy(f"first value: {first_value}", repaired(first_value=first_value))
    for first_value in FirstValue
    if first_value is not FirstValue.EXCESS
]
JITTER = Policy("full jitter", repaired(kind=BackoffKind.FULL_JITTER))
GRADIENT = Policy("gradient", printed(Strategy.GRADIENT))
TOKENS = Policy("AST, token bucket", printed(), {"token_every_s": 4.0})
CODEL_AST = Policy("AST, CoDel", printed(), CODEL)
CODEL_SUM = Policy("RBT+CoDel, sum", replace(repaired(), is_backoff_alone_after_failure=False), CODEL)
CODEL_RBT = Policy("RBT+CoDel", repaired(), CODEL)
SLOTS = Policy("AST, slots", printed(), {"is_giving_slots": True})
SPREAD = Policy("AST, spread", printed(), {"is_giving_spread": True})
CONFLATION = Policy("AST, conflation", printed(), {"is_conflating": True})
NO_HINTS = Policy("client only, no hints", RESTARTED, {"is_hinting": False})
FULL_WITHOUT_RBT = Policy("full without RBT", replace(RESTARTED, backoff=BackoffSettings(BackoffKind.NONE)), DESIGN)
FULL_DESIGN = Policy("full design", RESTARTED, DESIGN)

PAPER_POLICIES = (NONE, FIXED, RANDOM, AST, ALG2_PRINTED, ALG2, RBT_PRINTED)
OVERLOAD_POLICIES = (
    *PAPER_POLICIES,
    RIGOROUS,
    RIGOROUS_MEAN,
    RBT,
    LIGHT,
    *FIRST_VALUES,
    JITTER,
    GRADIENT,
    TOKENS,
    CODEL_AST,
    CODEL_SUM,
    CODEL_RBT,
    SLOTS,
    CONFLATION,
    NO_HINTS,
    FULL_WITHOUT_RBT,
    FULL_DESIGN,
)
IMPATIENT_POLICIES = (NONE, FIXED, AST, RBT_PRINTED, RBT, JITTER, CODEL_RBT, NO_HINTS, FULL_DESIGN)
BURST_POLICIES = (NONE, AST, RBT_PRINTED, RBT, SPREAD, CODEL_AST, CODEL_SUM, CODEL_RBT, FULL_DESIGN)
DROP_POLICIES = (NONE, AST, RBT_PRINTED, RBT, CODEL_RBT, CONFLATION, FULL_DESIGN)
CALM_POLICIES = (NONE, FIXED, AST, RIGOROUS, RIGOROUS_MEAN, RBT, FULL_DESIGN)
SIZE_POLICIES = {NONE: pictures.BLACK, AST: pictures.ORANGE, RBT: pictures.BLUE, FULL_DESIGN: pictures.GREEN}

S2, W = "S2", "W"
BURSTS = {
    "S1": ("slide-show, 2000 clients", request_pool.slide_show),
    "S1c": ("with a query cache", request_pool.slide_show_cached),
    "S1d": ("with a pool of 0.3 entries a client", request_pool.slide_show_small_pool),
    "S4": ("10,000 clients, an update a minute", request_pool.many_clients),
}
DROPS = {"S3": request_pool.capacity_drop, "S3p": request_pool.after_capacity_drop}
CALM = {
    f"update every {every_s:g} s, {loss:.0%} lost": replace(
        request_pool.steady_overload(), update_every_s=every_s, network_loss=loss
    )
    for every_s, loss in ((20.0, 0.0), (20.0, 0.05), (20.0, 0.2), (5.0, 0.2))
}
LIGHT_LOADS = list(CALM)[:3]
RANDOM_LOSS = list(CALM)[3]
# The first check interval of the steady overload: with it, fixed checks alone are twice what the broker can serve.
OVERLOAD_FIRST_S = 1.0


def run_here(what: str, cases: Sequence[Case]) -> pa.Table:
    """One after another, in this process."""
    return grids.run_in_chunks(simulate_table, what, cases)


def run_over(spark: SparkSession, directory: Path) -> Run:
    """As a sweep over Spark; what it gave stays in the directory, so that a sweep that was ended goes on from there."""
    from tidegate.pipeline.sweep import sweep

    def run(what: str, cases: Sequence[Case]) -> pa.Table:
        return sweep(spark, simulate_table, cases, directory, what=what)

    return run


class Grid(grids.SeededGrid[Case]):
    """The outcomes of scenarios x policies x seeds."""

    def __init__(self, extent: Extent) -> None:
        super().__init__()
        self._extent = extent

    def add(self, scenario: str, parameters: Parameters, policies: Sequence[Policy], first_s: float = 4.0) -> None:
        for policy in policies:
            settled = resized(replace(parameters, **policy.broker), self._extent.size)
            control = replace(policy.control, interval=replace(policy.control.interval, first_s=first_s))
            for seed in self._extent.seeds:
                self.add_case(scenario, policy.name, Case(settled, control, seed))

    def mean(self, scenario: str, policy: Policy, measure: str) -> float:
        return self.estimate(scenario, policy.name, measure).mean

    def over(self, scenario: str, ours: Policy, theirs: Policy, measure: str) -> Ratio:
        return self.ratio(scenario, ours.name, theirs.name, measure)

    def less(self, scenario: str, ours: Policy, theirs: Policy, measure: str) -> float:
        """By how much ours is above theirs; negative when it is below."""
        return self.difference(scenario, ours.name, theirs.name, measure).mean


def resized(parameters: Parameters, size: float) -> Parameters:
    """So much smaller in clients and in speed that it is as loaded as before."""
    return replace(
        parameters,
        clients=max(parameters.lanes, round(parameters.clients * size)),
        query_s=parameters.query_s / size,
        cached_query_s=parameters.cached_query_s / size,
        notification_s=parameters.notification_s / size,
        probes_per_s=parameters.probes_per_s * size,
    )


def write_chapter(out: Path, extent: Extent, run: Run = run_here) -> Chapter:
    """Runs everything and writes pictures and data sets into `out`."""
    chapter = Chapter(out, "The simulated request pool")
    chapter.say(_MODEL)
    seeds = extent.seeds
    chapter.say(
        f"Each figure is the mean of {len(seeds)} seeds ({seeds[0]} to {seeds[-1]}), ± its 95 % interval. Intervals of "
        "means are Student's t, as for means of few runs a bootstrap is too narrow; those of ratios, in brackets, are "
        "percentiles of a bootstrap over the seeds."
    )
    _write_overload(chapter, extent, run)
    _write_impatient(chapter, extent, run)
    _write_bursts(chapter, extent, run)
    _write_drops(chapter, extent, run)
    _write_calm(chapter, extent, run)
    _write_sizes(chapter, extent, run)
    return chapter


_MODEL = """\
A broker serves requests in four lanes, 4 ms a query and 1 ms a notification on average: 1000 queries or 4000
notifications a second. 2000 clients hold a persistent query over the same data. The broker notifies all of an update;
5 % of the notifications get lost, and more when its pool (1.5 entries a client, shared by requests and notifications)
is full. Clients check by themselves for what they missed. Bystanders send 20 other requests a second.

*Stale* is the share of time in which a client does not hold the newest state; *age* is the mean age of the oldest
update that it has not seen. *False alarms* are responses that waited less than 1 ms at the broker and were taken for
congested, *missed* are those that waited over 100 ms and were not. *IDC* is the index of dispersion of requests by
100 ms. The model leaves out what a refusal and a hint cost the broker, and congestion of the network.

* **none**, **basic**: steps 1 and 2 of A. S. Vdovenko et al.; **AST**: step 3, the adaptive strategy of equation (3),
  or with the estimates of Algorithm 2; **AST+RBT**: step 4, with random backoff. *As printed* is Algorithm 3 with its
  two variables read as one (by the letter it never backs off); the others are repaired: the first value is that of the
  excess delay, or as named; the longest backoff is twice what the broker needs to serve everybody once; a check that
  was congested itself does not shorten the interval; after a failure only the backoff is waited (*sum*: the interval
  too).
* **rigorous**, **mediate**, **light**: how congestion is detected; *mean*: rigorous by the mean processing time.
* **gradient**, **full jitter**, **CoDel**, **token bucket**: what others use.
* **slots**, **spread**, **conflation**: the broker appoints the next check; gives a time within which to fetch; keeps
  one notification a subscription and merges newer ones into it. The **full design** has them all, prefers
  notifications 12:1 to requests, and takes notifications for checks.

A claim of a ratio or a difference is decided by the means. What counts as a false alarm was settled after first
results: at first it was a wait of less than 10 ms, of which rigorous rightly complains."""

_Column: TypeAlias = tuple[str, str, int, float]
_COLUMNS: Sequence[_Column] = (
    ("stale [%]", "stale_share", 1, 100.0),
    ("age [ms]", "age_s", 0, 1000.0),
    ("p50 [ms]", "response_p50_s", 1, 1000.0),
    ("p99 [ms]", "response_p99_s", 0, 1000.0),
    ("requests a minute", "requests_per_minute", 1, 1.0),
    ("refused [%]", "refused_share", 1, 100.0),
    ("notifications lost [%]", "notification_loss", 1, 100.0),
    ("bystander p99 [ms]", "bystander_p99_s", 0, 1000.0),
    ("IDC", "dispersion", 1, 1.0),
    ("peak a 100 ms", "peak_requests", 0, 1.0),
)
_DETECTION: Sequence[_Column] = (
    ("false alarms [%]", "false_alarm_share", 1, 100.0),
    ("missed [%]", "missed_share", 1, 100.0),
)
_SERVICE: Sequence[_Column] = (
    ("goodput [1/s]", "goodput_per_s", 0, 1.0),
    ("wasted [%]", "wasted_share", 1, 100.0),
    ("timed out [%]", "timed_out_share", 1, 100.0),
)
_FAIRNESS: Sequence[_Column] = (("fairness", "fairness", 3, 1.0),)


def _write_rows(
    chapter: Chapter, grid: Grid, scenarios: Sequence[str], policies: Sequence[Policy], columns: Sequence[_Column]
) -> None:
    """The name of a scenario stands at its first row."""
    rows = []
    for scenario in scenarios:
        for policy in policies:
            cells = [grid.estimate(scenario, policy.name, name).write(d, scale) for _, name, d, scale in columns]
            rows.append((scenario if policy is policies[0] else "", policy.name, *cells))
    chapter.table(("scenario", "policy", *(title for title, *_ in columns)), rows)


def _claim_at_most(chapter: Chapter, text: str, ratio: Ratio, at_most: float) -> None:
    chapter.claim(f"{text} (at most {at_most:g} times)", ratio.value <= at_most, ratio.write(3))


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"


# Steady overload.


def _write_overload(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    grid.add(S2, request_pool.steady_overload(), OVERLOAD_POLICIES, OVERLOAD_FIRST_S)
    grid.run("steady overload", run)
    chapter.section("S2: steady overload")
    chapter.say(
        "An update a second on average, checks first after 1 s. Checks are meant to find what notifications lost; here "
        "they are why notifications get lost, and AST answers losses with more of them."
    )
    _write_rows(chapter, grid, [S2], OVERLOAD_POLICIES, (*_COLUMNS, *_DETECTION, *_FAIRNESS))
    caption = "Staleness and median response time in steady overload, by policy; left is better."
    chapter.picture("control_steady_overload", _draw_overload(grid), caption)
    _write_probabilities(chapter, grid, extent)
    chapter.data("control_steady_overload", grid.table(), "S2, all policies and seeds")
    _claim_steps(chapter, grid)
    _claim_design(chapter, grid)


def _draw_overload(grid: Grid) -> Figure:
    figure, (left, right) = pictures.new_figure(2, width=6.0, height=6.4)
    names = [policy.name for policy in OVERLOAD_POLICIES]
    stale = [grid.estimate(S2, name, "stale_share") for name in names]
    pictures.draw_dots(left, "stale", pictures.BLUE, stale, 100.0)
    responses = [grid.estimate(S2, name, "response_p50_s") for name in names]
    pictures.draw_dots(right, "p50", pictures.ORANGE, responses, 1000.0)
    for axes, title, x in ((left, "Staleness", "stale [%]"), (right, "Response time", "p50 [ms]")):
        pictures.name_rows(axes, names)
        pictures.name_axes(axes, title, x, "")
    left.set_xlim(left=0)
    right.set_xscale("log")
    pictures.set_x_ticks(right, (10, 100, 1000))
    right.set_yticklabels([])
    return figure


def _write_probabilities(chapter: Chapter, grid: Grid, extent: Extent) -> None:
    chapter.say(
        "How often do 100 ms bring as many requests as the broker can serve in them? The papers take requests for a "
        "Poisson flow; its tail is beside what was measured. Synchronised clients are no such flow, whose IDC is 1."
    )
    served_max = resized(request_pool.steady_overload(), extent.size).span_requests_max
    clients = resized(request_pool.steady_overload(), extent.size).clients
    rows = []
    for policy in (FIXED, AST, RBT_PRINTED, RBT, SLOTS, FULL_DESIGN):
        a_span = clients * grid.mean(S2, policy, "requests_per_minute") / 600
        tail = overload_probability(a_span, round(served_max))
        measured = grid.estimate(S2, policy.name, "crowded_share")
        dispersion = grid.estimate(S2, policy.name, "dispersion")
        rows.append((policy.name, f"{a_span:.1f}", f"{tail:.2g}", measured.write(3), dispersion.write(1)))
    chapter.table(("policy", "requests a 100 ms", "Poisson tail", "measured", "IDC"), rows)


def _claim_steps(chapter: Chapter, grid: Grid) -> None:
    for policy in (FIXED, AST):
        losses = grid.over(S2, policy, NONE, "notification_loss")
        stale = grid.over(S2, policy, NONE, "stale_share")
        chapter.claim(
            f"S2: {policy.name} raises the loss of notifications 3 times or more over none, and staleness by half",
            losses.value >= 3 and stale.value >= 1.5,
            f"loss {losses.write()}, staleness {stale.write()}",
        )
    near = grid.over(S2, RBT_PRINTED, AST, "stale_share")
    chapter.claim("S2: RBT as printed is within 10 % of AST's staleness", abs(near.value - 1) <= 0.1, near.write())
    quicker = grid.over(S2, AST, RBT, "response_p50_s")
    fresher = grid.less(S2, RBT, AST, "stale_share")
    chapter.claim(
        "S2: repaired RBT (mediate) lowers the median response 3 times or more and staleness by 10 points or more",
        quicker.value >= 3 and fresher <= -0.10,
        f"{quicker.write()}, {_points(fresher)}",
    )
    missed = {policy.name: grid.mean(S2, policy, "missed_share") for policy in (LIGHT, RBT)}
    chapter.claim(
        "S2: light misses more than half of lasting congestion, mediate at most 1 %",
        missed[LIGHT.name] > 0.5 and missed[RBT.name] <= 0.01,
        ", ".join(f"{name}: {share:.1%}" for name, share in missed.items()),
    )


def _claim_design(chapter: Chapter, grid: Grid) -> None:
    _claim_conflation(chapter, grid, S2)
    against = "S2: {} of the full design against AST"
    stale = grid.over(S2, FULL_DESIGN, AST, "stale_share")
    _claim_at_most(chapter, against.format("stale time"), stale, FULL_STALE_RATIO)
    response = grid.over(S2, FULL_DESIGN, AST, "response_p50_s")
    _claim_at_most(chapter, against.format("median response"), response, FULL_RESPONSE_RATIO)
    backoff = grid.over(S2, RBT, AST, "stale_share")
    _claim_at_most(chapter, "S2: stale time of repaired step 4 (mediate) against AST", backoff, BACKOFF_STALE_RATIO)
    alone = grid.over(S2, NO_HINTS, AST, "stale_share")
    _claim_at_most(chapter, "S2: stale time of clients without any hint against AST", alone, BACKOFF_STALE_RATIO)
    dispersions = {policy: grid.mean(S2, policy, "dispersion") for policy in (SLOTS, AST)}
    chapter.claim(
        "S2: requests at slots are nearly a Poisson flow (IDC at most 2), those of AST are none (10 or more)",
        dispersions[SLOTS] <= 2 and dispersions[AST] >= 10,
        ", ".join(f"{policy.name}: {dispersion:.1f}" for policy, dispersion in dispersions.items()),
    )
    fairness = {policy: grid.mean(S2, policy, "fairness") for policy in (FULL_DESIGN, AST)}
    chapter.claim(
        "S2: the full design shares stale time evenly (Jain's index at least 0.9)",
        fairness[FULL_DESIGN] >= 0.9,
        ", ".join(f"{policy.name}: {index:.3f}" for policy, index in fairness.items()),
    )


def _claim_conflation(chapter: Chapter, grid: Grid, scenario: str) -> None:
    stale, age = (grid.over(scenario, CONFLATION, AST, measure) for measure in ("stale_share", "age_s"))
    chapter.claim(
        f"{scenario}: conflation alone halves AST's staleness and divides its age by 5",
        stale.value <= 0.5 and age.value <= 0.2,
        f"{stale.write()} and {age.write()}",
    )


# Clients that give up.


def _write_impatient(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    grid.add(W, request_pool.impatient_clients(), IMPATIENT_POLICIES, OVERLOAD_FIRST_S)
    grid.run("impatient clients", run)
    chapter.section("W: clients that give up after a second")
    chapter.say("The same overload; the broker does not know that a client has given up, and serves it in vain.")
    _write_rows(chapter, grid, [W], IMPATIENT_POLICIES, (*_COLUMNS[:5], *_SERVICE))
    chapter.data("control_impatient_clients", grid.table(), "W, all policies and seeds")
    wasted = {policy: grid.mean(W, policy, "wasted_share") for policy in (AST, RBT)}
    served_per_s = request_pool.steady_overload().lanes / request_pool.steady_overload().query_s * extent.size
    useful = grid.mean(W, RBT, "goodput_per_s") / served_per_s
    chapter.claim(
        "W: AST wastes over 90 % of what is served; repaired RBT under 10 %",
        wasted[AST] > 0.9 and wasted[RBT] < 0.1,
        f"{wasted[AST]:.1%} and {wasted[RBT]:.1%}",
    )
    chapter.claim(
        "W: repaired RBT keeps 45 % of the capacity for useful queries", useful >= 0.45, f"{useful:.0%} of it"
    )
    stale = grid.over(W, FULL_DESIGN, AST, "stale_share")
    chapter.claim("W: the full design is fresher than AST", stale.value < 1, stale.write())


# Bursts.


def _write_bursts(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    for name, (_, scenario) in BURSTS.items():
        grid.add(name, scenario(), BURST_POLICIES)
    grid.run("bursts", run)
    chapter.section("S1, S1c, S1d, S4: slide-shows")
    chapter.say(
        "An update every 10 s is announced to all clients, which fetch it; all start together. "
        + "; ".join(f"{name}: {what}" for name, (what, _) in BURSTS.items())
        + ". Spreading a burst cannot make it fresher, as first come first served already works at full speed: "
        "what it gains is the time of bystanders, refusals and timeouts."
    )
    _write_rows(chapter, grid, list(BURSTS), BURST_POLICIES, _COLUMNS)
    chapter.data("control_bursts", grid.table(), "S1, S1c, S1d and S4, all policies and seeds")
    _claim_bursts(chapter, grid)


def _claim_bursts(chapter: Chapter, grid: Grid) -> None:
    costs = grid.less("S1", RBT, AST, "stale_share")
    spared = grid.over("S1", RBT, AST, "bystander_p99_s")
    chapter.claim(
        "S1: RBT makes a burst no fresher (0 to 3 points staler) and lowers the p99 of bystanders by 20 % or more",
        0 <= costs <= 0.03 and spared.value <= 0.8,
        f"{_points(costs)}, {spared.write()}",
    )
    for name in ("S1", "S4"):
        response, bystander = (grid.over(name, SPREAD, AST, p99) for p99 in ("response_p99_s", "bystander_p99_s"))
        stale = grid.less(name, SPREAD, AST, "stale_share")
        chapter.claim(
            f"{name}: the spread lowers p99 of responses and of bystanders by 70 %, for less than a point of staleness",
            response.value <= 0.3 and bystander.value <= 0.3 and stale < 0.01,
            f"{response.write()} and {bystander.write()}, {_points(stale)}",
        )
    text = "S1: p99 of bystanders with the spread against without"
    _claim_at_most(chapter, text, grid.over("S1", SPREAD, AST, "bystander_p99_s"), SPREAD_BYSTANDER_RATIO)
    dispersion = grid.over("S1", SPREAD, AST, "dispersion")
    _claim_at_most(chapter, "S1: IDC of requests with the spread against without", dispersion, SPREAD_DISPERSION_RATIO)
    summed, alone = (grid.over("S1", policy, RBT, "stale_share") for policy in (CODEL_SUM, CODEL_RBT))
    chapter.claim(
        "S1: CoDel makes a burst 3 times staler, unless only the backoff is waited after a refusal",
        summed.value >= 3 and alone.value < 3,
        f"{summed.write()}; {alone.write()} with the backoff alone",
    )
    worse = {name: grid.less(name, FULL_DESIGN, AST, "stale_share") for name in BURSTS}
    chapter.claim(
        "S1, S1c, S1d, S4: the full design is at most half a point staler than AST",
        max(worse.values()) <= 0.005,
        ", ".join(f"{name}: {_points(points)}" for name, points in worse.items()),
    )


# Less capacity for a minute.


def _write_drops(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    for name, scenario in DROPS.items():
        grid.add(name, scenario(), DROP_POLICIES)
    grid.run("capacity drops", run)
    chapter.section("S3, S3p: a quarter of the capacity for a minute, and the minute after")
    chapter.say("An update every 2 s on average; everything takes four times as long from 60 s to 120 s.")
    _write_rows(chapter, grid, list(DROPS), DROP_POLICIES, _COLUMNS)
    chapter.data("control_capacity_drop", grid.table(), "S3 and S3p, all policies and seeds")
    for name in DROPS:
        stale = grid.over(name, FULL_DESIGN, AST, "stale_share")
        chapter.claim(f"{name}: the full design is fresher than AST", stale.value < 1, stale.write())
    _claim_conflation(chapter, grid, "S3")


# No overload.


def _write_calm(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    for name, parameters in CALM.items():
        grid.add(name, parameters, CALM_POLICIES)
    grid.run("no overload", run)
    chapter.section("No overload: losses that are not caused by load")
    chapter.say("What AST was made for: notifications get lost at random, and the broker has time for checks.")
    _write_rows(chapter, grid, list(CALM), CALM_POLICIES, (*_COLUMNS[:5], *_DETECTION))
    chapter.data("control_no_overload", grid.table(), "rare updates and three rates of loss, all policies and seeds")
    alarms = {policy: grid.mean(LIGHT_LOADS[1], policy, "false_alarm_share") for policy in (RIGOROUS_MEAN, RIGOROUS)}
    chapter.claim(
        "calm: rigorous by the mean raises 25 % to 45 % false alarms, by the request's own processing time at most 1 %",
        0.25 <= alarms[RIGOROUS_MEAN] <= 0.45 and alarms[RIGOROUS] <= 0.01,
        f"{alarms[RIGOROUS_MEAN]:.1%} and {alarms[RIGOROUS]:.1%}",
    )
    worse = {name: grid.less(name, FULL_DESIGN, AST, "stale_share") for name in LIGHT_LOADS}
    chapter.claim(
        "calm: the full design is at most half a point staler than AST",
        max(worse.values()) <= 0.005,
        ", ".join(f"{name}: {_points(points)}" for name, points in worse.items()),
    )
    ratio = grid.over(RANDOM_LOSS, AST, NONE, "stale_share")
    both = [f"{grid.mean(RANDOM_LOSS, policy, 'stale_share'):.1%}" for policy in (NONE, AST)]
    chapter.claim(
        f"{RANDOM_LOSS}: AST has at most 0.6 times the staleness of none",
        ratio.value <= 0.6,
        f"{both[0]} to {both[1]}: {ratio.write()}",
    )


# The number of clients.


def _write_sizes(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    policies = list(SIZE_POLICIES)
    for size in extent.sizes:
        grid.add(str(size), replace(request_pool.steady_overload(), clients=size), policies, OVERLOAD_FIRST_S)
    grid.run("numbers of clients", run)
    chapter.section("From few clients to too many")
    chapter.say("The scenario S2 with other numbers of clients.")
    caption = "Staleness, and p99 of bystanders, against the number of clients."
    chapter.picture("control_clients", _draw_sizes(grid, extent), caption)
    chapter.data("control_clients", grid.table(), "S2 by number of clients")
    largest = str(max(extent.sizes))
    stale = grid.over(largest, FULL_DESIGN, NONE, "stale_share")
    chapter.claim(
        f"{largest} clients: the full design is no staler than no checks at all", stale.value <= 1, stale.write()
    )


def _draw_sizes(grid: Grid, extent: Extent) -> Figure:
    figure, panels = pictures.new_figure(2)
    measures = (
        ("stale_share", "Staleness", "stale [share]"),
        ("bystander_p99_s", "What bystanders feel", "p99 of their response times [s]"),
    )
    drawn = []
    for axes, (measure, title, y) in zip(panels, measures, strict=True):
        lines = [
            pictures.Line(
                policy.name,
                look,
                extent.sizes,
                [grid.estimate(str(size), policy.name, measure) for size in extent.sizes],
            )
            for policy, look in SIZE_POLICIES.items()
        ]
        pictures.draw_lines(axes, lines)
        pictures.name_axes(axes, title, "clients", y)
        axes.set_ylim(bottom=0)
        drawn.append((axes, lines))
    for axes, lines in drawn:
        pictures.label_ends(figure, axes, lines)
    return figure
