"""The chapter on real clients and a real broker: runs the workloads W1 to W5, an experiment that the papers left open.

Runs are the same cases as in the simulation, in real time, and the report compares both. Arms are interleaved, forwards
and backwards, so that a machine that slows down favours none. Each run is stored in its own file. So an interrupted
evaluation resumes, and changed control, clients or broker are measured again.

What may go wrong: on a machine that is too slow, runs are discarded and repeated; the last try is kept and counted as
late.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import groupby
from multiprocessing import active_children, get_context
from pathlib import Path

import msgspec
import pyarrow as pa

from tidegate.client import control as machines
from tidegate.client import persistent_query, persistent_ssap
from tidegate_lab import pictures
from tidegate_lab.control import claims, load, request_pool, small_broker
from tidegate_lab.control.grid import (
    BYSTANDERS,
    CORE,
    CROWD,
    DETECTION,
    FAIRNESS,
    FIRST_S,
    LOAD,
    RESPONSES,
    SERVICE,
    STALENESS,
    Extent,
    Grid,
    draw_policies,
    draw_sizes,
    write_rows,
)
from tidegate_lab.control.load import Measured, measure
from tidegate_lab.control.policies import (
    AST,
    CODEL_RBT,
    CODEL_SUM,
    CONFLATION,
    FIXED,
    FULL_DESIGN,
    JITTER,
    LIGHT,
    NONE,
    RBT,
    RBT_PRINTED,
    RIGOROUS,
    RIGOROUS_MEAN,
    SLOTS,
    SPREAD,
)
from tidegate_lab.control.request_pool import Case, Parameters, table_of
from tidegate_lab.control.simulated import run_here
from tidegate_lab.report import Chapter, Progress

LAG_S_MAX = 0.02
"""A run is discarded and repeated if the 99th percentile of its process's own delay is above this."""
STALE_RATIO = 0.6
REQUESTS_RATIO = 0.1
COLLAPSE_S = 1.0
"""A run has collapsed if most checks take longer than this."""


@dataclass(frozen=True)
class MeasuredExtent(Extent):
    """The extent of the measured runs: one repetition per seed. `sizes` are real numbers of clients."""

    warm_up_intervals: float = 2.0
    """The warm-up, in first intervals: long enough for the first checks, which all clients send at the same time."""
    measured_s: float = 20.0
    burst_s: float = 10.0
    """The interval between the updates of a slide-show."""
    tries_max: int = 3
    """The number of tries of a run. The last one is kept, and the data include its lag."""
    jobs_per_core: float = 1.0
    """Concurrent runs per core. A run of 1,000 clients and its broker use a third of a core."""


FULL = MeasuredExtent(seeds=range(1, 6), sizes=(100, 300, 3000), size=0.5)
SHORT = MeasuredExtent(
    seeds=(1,),
    sizes=(60,),
    size=0.1,
    measured_s=10.0,
    burst_s=5.0,
    jobs_per_core=2.0,
)

OVERLOAD_ARMS = (
    NONE,
    FIXED,
    AST,
    RBT_PRINTED,
    RIGOROUS,
    RBT,
    LIGHT,
    JITTER,
    CODEL_RBT,
    SLOTS,
    CONFLATION,
    FULL_DESIGN,
)
IMPATIENT_ARMS = (AST, RBT_PRINTED, RBT, FULL_DESIGN)
BURST_ARMS = (AST, RBT, SPREAD, CODEL_SUM, CODEL_RBT, FULL_DESIGN)
OTHER_BURST_ARMS = (AST, SPREAD, FULL_DESIGN)
DROP_ARMS = (NONE, AST, RBT, CONFLATION, FULL_DESIGN)
CALM_ARMS = (NONE, AST, FULL_DESIGN)
ALARM_ARMS = (RIGOROUS, RIGOROUS_MEAN)
SIZE_ARMS = {NONE: pictures.BLACK, AST: pictures.ORANGE, FULL_DESIGN: pictures.GREEN}

W1, W2, W3, W4, W5 = "W1", "W2", "W3", "W4", "W5"
W1_CACHED, W1_SMALL = "W1, cache", "W1, small pool"
OVERLOAD_FIRST_S = 2.0
"""With this first interval, checks alone need the broker's whole capacity, and notifications half of it."""
CALM_LOSSES = {f"{W5}, {loss:.0%} lost": loss for loss in (0.0, 0.05, 0.2)}
ALARMS = list(CALM_LOSSES)[1]
CALM_EVERY_S = 5.0


def write_chapter(out: Path, extent: MeasuredExtent, jobs: int | None = None) -> Chapter:
    """Measures all workloads with `jobs` concurrent runs. The default depends on the number of cores."""
    jobs = jobs or max(1, int(extent.jobs_per_core * len(os.sched_getaffinity(0))))
    chapter = Chapter(out, "Real clients and a real broker")
    bench = Bench(out / "measured", jobs, extent.tries_max)
    clients = round(extent.size * Parameters.clients)
    chapter.say(
        f"There is one broker process, and {clients:,} knowledge processors over SSAP in one other process of the same "
        "machine. Each processor has a connection and the control machines of Tidegate's clients. The broker consists "
        "of Tidegate's graph, persistent queries and listener, slowed down to the times of the simulation: "
        f"{4 / extent.size:g} ms per query and {1 / extent.size:g} ms per notification in four lanes. So the times do "
        "not depend on the machine. A plain broker drops notifications when it is full. Tidegate's own merges them, "
        f"which is an arm here (conflation). A run is measured for {extent.measured_s:g} s after "
        f"{extent.warm_up_intervals:g} first intervals between checks, {len(extent.seeds)} times, with the same "
        "updates in all arms. The figures are means ± 95 % intervals. False alarms and missed congestion are judged by "
        "the response time without the processing time: under "
        f"{1000 * load.CALM_WAIT_S:g} ms and over {1000 * load.CONGESTED_WAIT_S:g} ms."
    )
    _write_overload(chapter, extent, bench)
    _write_impatient(chapter, extent, bench)
    _write_bursts(chapter, extent, bench)
    _write_drop(chapter, extent, bench)
    _write_calm(chapter, extent, bench)
    _write_sizes(chapter, extent, bench)
    chapter.say(
        f"The chapter has {bench.runs} runs, {jobs} at a time. {bench.tries - bench.runs} more were discarded and "
        f"repeated, because the clients' own process was late by over {1000 * LAG_S_MAX:g} ms in more than 1 % of the "
        f"checks of its clock. {bench.late} runs were kept although they were late."
    )
    return chapter


class Bench:
    """Measures cases, `jobs` at a time, and keeps the results in the directory."""

    def __init__(self, directory: Path, jobs: int, tries_max: int) -> None:
        self._directory = directory
        self._jobs = jobs
        self._tries_max = tries_max
        self.tries = 0
        self.runs = 0
        self.late = 0

    def run(self, what: str, cases: Sequence[Case]) -> pa.Table:
        """Returns a row per case, in their order. Measures them repetition by repetition, every other one backwards."""
        self._directory.mkdir(parents=True, exist_ok=True)
        progress = Progress(what, len(cases))
        due = [case for case in in_turn(cases) if not self._path(case).exists()]
        progress.advance(len(cases) - len(due))
        if due:
            self._measure(due, progress)
        kept = [msgspec.msgpack.decode(self._path(case).read_bytes(), type=Kept) for case in cases]
        self.runs += len(kept)
        self.tries += sum(each.tries for each in kept)
        self.late += sum(each.measured.lag_s > LAG_S_MAX for each in kept)
        return table_of(cases, [each.measured for each in kept])

    def _measure(self, due: Sequence[Case], progress: Progress) -> None:
        with ProcessPoolExecutor(self._jobs, get_context("spawn")) as processes:
            running = [processes.submit(keep, case, self._path(case), self._tries_max) for case in due]
            try:
                for done in as_completed(running):
                    done.result()
                    progress.advance(1)
            except BaseException:
                # The executor would wait for the pending runs. A broker ends with the process of its run.
                for process in active_children():
                    process.terminate()
                raise

    def _path(self, case: Case) -> Path:
        key = blake2b(_version() + msgspec.msgpack.encode(case), digest_size=12).hexdigest()
        return self._directory / f"{key}.msgpack"


class Kept(msgspec.Struct):
    measured: Measured
    tries: int


def keep(case: Case, path: Path, tries_max: int) -> None:
    """Measures a case and stores its result, unless the result exists."""
    tries = 0
    while not path.exists():
        tries += 1
        measured = asyncio.run(measure(case))
        if measured.lag_s <= LAG_S_MAX or tries == tries_max:
            written = path.with_suffix(".part")
            written.write_bytes(msgspec.msgpack.encode(Kept(measured, tries)))
            written.rename(path)


def in_turn(cases: Sequence[Case]) -> Iterator[Case]:
    by_seed = sorted(cases, key=lambda case: case.seed)
    for turn, (_, arms) in enumerate(groupby(by_seed, key=lambda case: case.seed)):
        yield from arms if turn % 2 == 0 else reversed(list(arms))


@cache
def _version() -> bytes:
    """Returns a digest of the code that a run depends on, so that changed code is measured again."""
    package = Path(str(machines.__file__)).parent
    modules = (persistent_query, persistent_ssap, load, small_broker)
    files = [*sorted(package.glob("*.py")), *(Path(str(module.__file__)) for module in modules)]
    return blake2b(b"".join(path.read_bytes() for path in files), digest_size=12).digest()


def _timed(parameters: Parameters, extent: MeasuredExtent, first_s: float = FIRST_S) -> Parameters:
    return replace(parameters, warm_up_s=extent.warm_up_intervals * first_s, measured_s=extent.measured_s)


_COLUMNS = (*CORE, *LOAD, *CROWD)

# W2, measured and simulated.


def _write_overload(chapter: Chapter, extent: MeasuredExtent, bench: Bench) -> None:
    grid, simulated = Grid(extent), Grid(extent)
    for each in (grid, simulated):
        each.add(W2, _timed(request_pool.steady_overload(), extent, OVERLOAD_FIRST_S), OVERLOAD_ARMS, OVERLOAD_FIRST_S)
    grid.run(f"{W2}, measured", bench.run)
    simulated.run(f"{W2}, simulated", run_here)
    chapter.section(f"{W2}: steady overload")
    chapter.say(
        "There is one update per second on average, and 5 % of the notifications are lost in transit. At first, checks "
        "alone need the broker's whole capacity, and notifications half of it: the overload is 1.5."
    )
    write_rows(chapter, grid, [W2], OVERLOAD_ARMS, (*_COLUMNS, *DETECTION, *FAIRNESS))
    chapter.picture(
        "control_measured",
        draw_policies(W2, OVERLOAD_ARMS, {"simulated": simulated, "measured": grid}, (STALENESS, RESPONSES)),
        "Staleness and median response in steady overload, measured and simulated; left is better.",
    )
    chapter.data("control_measured_overload", grid.table(), f"{W2}, one run each")
    chapter.say("The simulation of the same runs:")
    write_rows(chapter, simulated, [W2], OVERLOAD_ARMS, _COLUMNS)
    claims.claim_at_most(chapter, grid, W2, "stale time", FULL_DESIGN, AST, "stale_share", STALE_RATIO)
    claims.claim_at_most(chapter, grid, W2, "requests", FULL_DESIGN, AST, "requests_per_minute", REQUESTS_RATIO)
    _claim_no_collapse(chapter, grid)
    claims.claim_steps(chapter, grid, W2)
    claims.claim_conflation(chapter, grid, W2)
    _claim_agreement(chapter, grid, simulated)


def _claim_no_collapse(chapter: Chapter, grid: Grid) -> None:
    medians = {arm: grid.values(W2, arm.name, "response_p50_s") for arm in (FULL_DESIGN, AST)}
    collapsed = {arm: sum(not median_s <= COLLAPSE_S for median_s in values) for arm, values in medians.items()}
    chapter.claim(
        f"{W2}: the median response time of the full design exceeds {COLLAPSE_S:g} s in no repetition",
        collapsed[FULL_DESIGN] == 0,
        f"{collapsed[FULL_DESIGN]} of {len(medians[FULL_DESIGN])}; AST without backoff: "
        f"{collapsed[AST]} of {len(medians[AST])}",
    )


def _claim_agreement(chapter: Chapter, grid: Grid, simulated: Grid) -> None:
    apart = {
        arm.name: abs(grid.mean(W2, arm, "stale_share") - simulated.mean(W2, arm, "stale_share"))
        for arm in OVERLOAD_ARMS
    }
    worst = max(apart, key=lambda name: apart[name])
    chapter.claim(
        f"{W2}: simulated and measured staleness differ by at most 10 points in every arm",
        apart[worst] <= 0.1,
        f"at most {100 * apart[worst]:.1f} points ({worst})",
    )


# The other workloads.


def _write_impatient(chapter: Chapter, extent: MeasuredExtent, bench: Bench) -> None:
    grid = Grid(extent)
    impatient = _timed(request_pool.impatient_clients(), extent, OVERLOAD_FIRST_S)
    grid.add(W4, impatient, IMPATIENT_ARMS, OVERLOAD_FIRST_S)
    grid.run(f"{W4}, measured", bench.run)
    chapter.section(f"{W4}: the same, with clients that give up after a second")
    write_rows(chapter, grid, [W4], IMPATIENT_ARMS, (*CORE, *SERVICE))
    chapter.data("control_measured_impatient", grid.table(), f"{W4}, one run each")
    base = request_pool.steady_overload()
    claims.claim_patience(chapter, grid, W4, base.lanes / base.query_s * extent.size)


def _write_bursts(chapter: Chapter, extent: MeasuredExtent, bench: Bench) -> None:
    grid, simulated = Grid(extent), Grid(extent)
    others = {W1_CACHED: request_pool.slide_show_cached(), W1_SMALL: request_pool.slide_show_small_pool()}
    for each in (grid, simulated):
        each.add(W1, _slide_show(request_pool.slide_show(), extent), BURST_ARMS)
    for name, show in others.items():
        grid.add(name, _slide_show(show, extent), OTHER_BURST_ARMS)
    grid.run(f"{W1}, measured", bench.run)
    simulated.run(f"{W1}, simulated", run_here)
    chapter.section(f"{W1}: slide-show")
    chapter.say(
        f"An update every {extent.burst_s:g} s is announced to all clients, which fetch it: without and with a query "
        "cache, and with a pool of 0.3 entries per client."
    )
    write_rows(chapter, grid, [W1], BURST_ARMS, _COLUMNS)
    write_rows(chapter, grid, list(others), OTHER_BURST_ARMS, _COLUMNS)
    chapter.picture(
        "control_measured_bursts",
        draw_policies(W1, BURST_ARMS, {"simulated": simulated, "measured": grid}, (STALENESS, BYSTANDERS)),
        f"Staleness, and p99 of bystanders, in {W1}, measured and simulated; left is better.",
    )
    chapter.data("control_measured_bursts", grid.table(), f"{W1}, one run each")
    claims.claim_burst(chapter, grid, W1)
    claims.claim_no_staler(chapter, grid, [W1, *others])


def _slide_show(show: Parameters, extent: MeasuredExtent) -> Parameters:
    return replace(_timed(show, extent), update_every_s=extent.burst_s)


def _write_drop(chapter: Chapter, extent: MeasuredExtent, bench: Bench) -> None:
    grid = Grid(extent)
    third_s = extent.measured_s / 3
    timed = _timed(request_pool.capacity_drop(), extent)
    dropped = replace(timed, slow_from_s=timed.warm_up_s + third_s, slow_until_s=timed.warm_up_s + 2 * third_s)
    grid.add(W3, dropped, DROP_ARMS)
    grid.run(f"{W3}, measured", bench.run)
    chapter.section(f"{W3}: a quarter of the capacity for the second third of the time")
    chapter.say(f"There is an update every 2 s on average, and the first checks come after {FIRST_S:g} s.")
    write_rows(chapter, grid, [W3], DROP_ARMS, _COLUMNS)
    chapter.data("control_measured_drop", grid.table(), f"{W3}, one run each")
    claims.claim_fresher(chapter, grid, W3)
    claims.claim_conflation(chapter, grid, W3)


def _write_calm(chapter: Chapter, extent: MeasuredExtent, bench: Bench) -> None:
    grid = Grid(extent)
    for name, loss in CALM_LOSSES.items():
        calm = replace(request_pool.steady_overload(), update_every_s=CALM_EVERY_S, network_loss=loss)
        arms = (*CALM_ARMS, *ALARM_ARMS) if name == ALARMS else CALM_ARMS
        grid.add(name, _timed(calm, extent), arms)
    grid.run(f"{W5}, measured", bench.run)
    chapter.section(f"{W5}: no overload")
    chapter.say(
        f"There is an update every {CALM_EVERY_S:g} s on average, and the first checks come after {FIRST_S:g} s."
    )
    columns = (*CORE, *DETECTION)
    names = list(CALM_LOSSES)
    write_rows(chapter, grid, names, CALM_ARMS, columns)
    write_rows(chapter, grid, [ALARMS], ALARM_ARMS, columns)
    chapter.data("control_measured_calm", grid.table(), f"{W5}, one run each")
    claims.claim_alarms(chapter, grid, ALARMS)
    claims.claim_no_staler(chapter, grid, names)
    claims.claim_random_loss(chapter, grid, names[-1])


def _write_sizes(chapter: Chapter, extent: MeasuredExtent, bench: Bench) -> None:
    grid = Grid(extent)
    numbers = sorted({*extent.sizes, round(Parameters.clients * extent.size)})
    for number in numbers:
        overload = replace(request_pool.steady_overload(), clients=round(number / extent.size))
        grid.add(str(number), _timed(overload, extent, OVERLOAD_FIRST_S), list(SIZE_ARMS), OVERLOAD_FIRST_S)
    grid.run("numbers of clients, measured", bench.run)
    chapter.section("From few clients to too many")
    chapter.say(f"This is workload {W2} with other numbers of clients on the same broker.")
    write_rows(chapter, grid, list(map(str, numbers)), list(SIZE_ARMS), _COLUMNS)
    figure = draw_sizes(grid, numbers, SIZE_ARMS)
    chapter.picture("control_measured_clients", figure, "Staleness, and p99 of bystanders, by number of clients.")
    chapter.data("control_measured_clients", grid.table(), "the numbers of clients, one run each")
