"""The chapter on the simulated request pool: how active control helps an overloaded broker, and what helps more.

Every table is a grid of scenarios (a broker and its load) and policies (how clients are paced, and how the broker
helps), each run with several seeds. The same seed gives all policies the same updates. The runs decide whether a claim
is held; `claims` states which claims were written before any run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from tidegate.client.control.estimates import overload_probability
from tidegate_lab import grid as grids
from tidegate_lab import pictures
from tidegate_lab.control import claims, request_pool
from tidegate_lab.control.grid import (
    BYSTANDERS,
    CORE,
    CROWD,
    DETECTION,
    FAIRNESS,
    LOAD,
    RESPONSES,
    SERVICE,
    STALENESS,
    Extent,
    Grid,
    draw_policies,
    draw_sizes,
    resized,
    write_rows,
)
from tidegate_lab.control.policies import (
    ALG2,
    ALG2_PRINTED,
    AST,
    CODEL_AST,
    CODEL_RBT,
    CODEL_SUM,
    CONFLATION,
    FIRST_VALUES,
    FIXED,
    FULL_DESIGN,
    FULL_WITHOUT_RBT,
    GRADIENT,
    JITTER,
    LIGHT,
    NO_HINTS,
    NONE,
    RANDOM,
    RBT,
    RBT_PRINTED,
    RIGOROUS,
    RIGOROUS_MEAN,
    SLOTS,
    SPREAD,
    TOKENS,
)
from tidegate_lab.control.request_pool import Case, simulate_table
from tidegate_lab.report import Chapter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Run: TypeAlias = grids.Run[Case]

# The limits that active control must meet.
FULL_STALE_RATIO = 0.55
FULL_RESPONSE_RATIO = 0.02
BACKOFF_STALE_RATIO = 0.8
SPREAD_BYSTANDER_RATIO = 0.35
# A limit that the design expects in addition.
SPREAD_DISPERSION_RATIO = 0.25


FULL = Extent(seeds=range(1, 31), sizes=(250, 500, 1000, 1500, 2000, 3000, 4000))
SHORT = Extent(seeds=range(1, 4), sizes=(500, 1000, 2000, 4000))


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
    "S1d": ("with a pool of 0.3 entries per client", request_pool.slide_show_small_pool),
    "S4": ("10,000 clients, one update per minute", request_pool.many_clients),
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
# The first check interval in steady overload. With it, fixed checks alone are twice the broker's capacity.
OVERLOAD_FIRST_S = 1.0


def run_here(what: str, cases: Sequence[Case]) -> pa.Table:
    """Runs the cases one after another in this process."""
    return grids.run_in_chunks(simulate_table, what, cases)


def run_over(spark: SparkSession, directory: Path) -> Run:
    """Returns a function that runs cases as a sweep on Spark. Results stay in the directory, so an interrupted sweep
    resumes from them."""
    from tidegate_lab.sweep import sweep

    def run(what: str, cases: Sequence[Case]) -> pa.Table:
        return sweep(spark, simulate_table, cases, directory, what=what)

    return run


def write_chapter(out: Path, extent: Extent, run: Run = run_here) -> Chapter:
    """Runs all simulations, and writes pictures and data sets into `out`."""
    chapter = Chapter(out, "The simulated request pool")
    chapter.say(_MODEL)
    seeds = extent.seeds
    chapter.say(
        f"Each figure is the mean of {len(seeds)} seeds ({seeds[0]} to {seeds[-1]}), ± its 95 % interval. Intervals of "
        "means are Student's t, because a bootstrap is too narrow for means of few runs. Intervals of ratios, in "
        "brackets, are percentiles of a bootstrap over the seeds."
    )
    _write_overload(chapter, extent, run)
    _write_impatient(chapter, extent, run)
    _write_bursts(chapter, extent, run)
    _write_drops(chapter, extent, run)
    _write_calm(chapter, extent, run)
    _write_sizes(chapter, extent, run)
    return chapter


_MODEL = """\
A broker serves requests in four lanes, with means of 4 ms per query and 1 ms per notification: 1000 queries or 4000
notifications per second. 2000 clients hold a persistent query over the same data. The broker notifies all clients of an
update. 5 % of the notifications are lost, and more if its pool (1.5 entries per client, shared by requests and
notifications) is full. Clients check by themselves for missed updates. Bystanders send 20 other requests per second.

*Stale* is the share of time in which a client does not hold the newest state. *Age* is the mean age of its oldest
unseen update. *False alarms* are responses that waited less than 1 ms at the broker but were classified as
congested. *Missed* are responses that waited over 100 ms but were not classified as congested. *IDC* is the index of
dispersion of requests per 100 ms. The model omits the broker's cost of a refusal and a hint, and network congestion.

* **none**, **basic**: steps 1 and 2 of A. S. Vdovenko et al.
* **AST**: step 3, the adaptive strategy of equation (3), or with the estimates of Algorithm 2.
* **AST+RBT**: step 4, with random backoff. *As printed* is Algorithm 3 with its two variables read as one (taken
  literally, it never backs off). The others are repaired. The first value is that of the excess delay, or as named. The
  longest backoff is twice the time that the broker needs to serve every client once. A congested check does not shorten
  the interval. After a failure a client waits only for the backoff (*sum*: for the interval too).
* **rigorous**, **mediate**, **light**: how congestion is detected; *mean*: rigorous by the mean processing time.
* **gradient**, **full jitter**, **CoDel**, **token bucket**: methods from other systems.
* **slots**: the broker assigns the time of the next check. **spread**: the broker gives a time within which to fetch.
  **conflation**: the broker keeps one notification per subscription, and merges newer ones into it.
* **full design**: all three. It also prefers notifications to requests by 12:1. A notification counts as a check and
  postpones the next one, at random within the spread.

The means decide a claim of a ratio or a difference. The claims about the IDC, about fairness and about clients without
hints were added when the first figures were known, and the others before any run. The definition of a false alarm was
changed after the first results. Originally it was a wait of less than 10 ms, which rigorous detects correctly."""

_COLUMNS = (*CORE, *LOAD, *CROWD)

# Steady overload.


def _write_overload(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    grid.add(S2, request_pool.steady_overload(), OVERLOAD_POLICIES, OVERLOAD_FIRST_S)
    grid.run("steady overload", run)
    chapter.section("S2: steady overload")
    chapter.say(
        "There is one update per second on average, and the first checks come after 1 s. Checks are meant to find lost "
        "notifications. Here they cause the losses, and AST reacts to losses with more checks."
    )
    write_rows(chapter, grid, [S2], OVERLOAD_POLICIES, (*_COLUMNS, *DETECTION, *FAIRNESS))
    caption = "Staleness and median response time in steady overload, by policy; left is better."
    figure = draw_policies(S2, OVERLOAD_POLICIES, {"": grid}, (STALENESS, RESPONSES))
    chapter.picture("control_steady_overload", figure, caption)
    _write_probabilities(chapter, grid, extent)
    chapter.data("control_steady_overload", grid.table(), "S2, all policies and seeds")
    claims.claim_steps(chapter, grid, S2)
    _claim_design(chapter, grid)


def _write_probabilities(chapter: Chapter, grid: Grid, extent: Extent) -> None:
    chapter.say(
        "The table shows how often as many requests arrive within 100 ms as the broker can serve in that time. The "
        "papers assume a Poisson flow of requests, whose tail is shown for comparison. Synchronised clients do not "
        "send a Poisson flow, which has an IDC of 1."
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


def _claim_design(chapter: Chapter, grid: Grid) -> None:
    claims.claim_conflation(chapter, grid, S2)
    for policy, theirs, what, measure, at_most in (
        (FULL_DESIGN, AST, "stale time", "stale_share", FULL_STALE_RATIO),
        (FULL_DESIGN, AST, "median response", "response_p50_s", FULL_RESPONSE_RATIO),
        (RBT, AST, "stale time", "stale_share", BACKOFF_STALE_RATIO),
        (NO_HINTS, AST, "stale time", "stale_share", BACKOFF_STALE_RATIO),
    ):
        claims.claim_at_most(chapter, grid, S2, what, policy, theirs, measure, at_most)
    dispersions = {policy: grid.mean(S2, policy, "dispersion") for policy in (SLOTS, AST)}
    chapter.claim(
        "S2: requests at slots are nearly a Poisson flow (IDC at most 2), and those of AST are not (10 or more)",
        dispersions[SLOTS] <= 2 and dispersions[AST] >= 10,
        ", ".join(f"{policy.name}: {dispersion:.1f}" for policy, dispersion in dispersions.items()),
    )
    fairness = {policy: grid.mean(S2, policy, "fairness") for policy in (FULL_DESIGN, AST)}
    chapter.claim(
        "S2: the full design shares stale time evenly (Jain's index at least 0.9)",
        fairness[FULL_DESIGN] >= 0.9,
        ", ".join(f"{policy.name}: {index:.3f}" for policy, index in fairness.items()),
    )


# Clients that give up.


def _write_impatient(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    grid.add(W, request_pool.impatient_clients(), IMPATIENT_POLICIES, OVERLOAD_FIRST_S)
    grid.run("impatient clients", run)
    chapter.section("W: clients that give up after a second")
    chapter.say("The overload is the same. The broker does not know that a client has given up, and serves it in vain.")
    write_rows(chapter, grid, [W], IMPATIENT_POLICIES, (*CORE, *SERVICE))
    chapter.data("control_impatient_clients", grid.table(), "W, all policies and seeds")
    base = request_pool.steady_overload()
    claims.claim_patience(chapter, grid, W, base.lanes / base.query_s * extent.size)
    claims.claim_fresher(chapter, grid, W)


# Bursts.


def _write_bursts(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    for name, (_, scenario) in BURSTS.items():
        grid.add(name, scenario(), BURST_POLICIES)
    grid.run("bursts", run)
    chapter.section("S1, S1c, S1d, S4: slide-shows")
    chapter.say(
        "An update every 10 s is announced to all clients, which fetch it. All clients start together. "
        + "; ".join(f"{name}: {what}" for name, (what, _) in BURSTS.items())
        + ". Spreading a burst cannot make clients fresher, because the broker already works at full speed. "
        "It helps bystanders, and avoids refusals and timeouts."
    )
    write_rows(chapter, grid, list(BURSTS), BURST_POLICIES, _COLUMNS)
    caption = "S1: staleness, and p99 of bystanders, by policy; left is better."
    figure = draw_policies("S1", BURST_POLICIES, {"": grid}, (STALENESS, BYSTANDERS))
    chapter.picture("control_bursts", figure, caption)
    chapter.data("control_bursts", grid.table(), "S1, S1c, S1d and S4, all policies and seeds")
    _claim_bursts(chapter, grid)


def _claim_bursts(chapter: Chapter, grid: Grid) -> None:
    claims.claim_burst(chapter, grid, "S1")
    claims.claim_spread(chapter, grid, "S4")
    what = "p99 of bystanders"
    claims.claim_at_most(chapter, grid, "S1", what, SPREAD, AST, "bystander_p99_s", SPREAD_BYSTANDER_RATIO)
    claims.claim_at_most(chapter, grid, "S1", "IDC", SPREAD, AST, "dispersion", SPREAD_DISPERSION_RATIO)
    claims.claim_no_staler(chapter, grid, list(BURSTS))


# Reduced capacity for a minute.


def _write_drops(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    for name, scenario in DROPS.items():
        grid.add(name, scenario(), DROP_POLICIES)
    grid.run("capacity drops", run)
    chapter.section("S3, S3p: a quarter of the capacity for a minute, and the minute after")
    chapter.say("There is an update every 2 s on average. Everything takes four times as long from 60 s to 120 s.")
    write_rows(chapter, grid, list(DROPS), DROP_POLICIES, _COLUMNS)
    chapter.data("control_capacity_drop", grid.table(), "S3 and S3p, all policies and seeds")
    for name in DROPS:
        claims.claim_fresher(chapter, grid, name)
    claims.claim_conflation(chapter, grid, "S3")


# No overload.


def _write_calm(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    for name, parameters in CALM.items():
        grid.add(name, parameters, CALM_POLICIES)
    grid.run("no overload", run)
    chapter.section("No overload: losses that are not caused by load")
    chapter.say("AST was designed for this case: notifications are lost at random, and the broker has time for checks.")
    write_rows(chapter, grid, list(CALM), CALM_POLICIES, (*CORE, *DETECTION))
    chapter.data("control_no_overload", grid.table(), "rare updates and three rates of loss, all policies and seeds")
    claims.claim_alarms(chapter, grid, LIGHT_LOADS[1])
    claims.claim_no_staler(chapter, grid, LIGHT_LOADS)
    claims.claim_random_loss(chapter, grid, RANDOM_LOSS)


# The number of clients.


def _write_sizes(chapter: Chapter, extent: Extent, run: Run) -> None:
    grid = Grid(extent)
    policies = list(SIZE_POLICIES)
    for size in extent.sizes:
        grid.add(str(size), replace(request_pool.steady_overload(), clients=size), policies, OVERLOAD_FIRST_S)
    grid.run("numbers of clients", run)
    chapter.section("From few clients to too many")
    chapter.say("This is scenario S2 with other numbers of clients.")
    caption = "Staleness, and p99 of bystanders, by number of clients."
    chapter.picture("control_clients", draw_sizes(grid, extent.sizes, SIZE_POLICIES), caption)
    chapter.data("control_clients", grid.table(), "S2 by number of clients")
    largest = str(max(extent.sizes))
    stale = grid.over(largest, FULL_DESIGN, NONE, "stale_share")
    chapter.claim(
        f"{largest} clients: the full design is no staler than no checks at all", stale.value <= 1, stale.write()
    )
