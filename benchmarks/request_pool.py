"""The simulated request pool: events per second on one core, and the time of a sweep of 10,000 runs on all cores.

Measured: the CPU time of single runs in this process, as the best of several, because other load can only add to it.
Also the wall clock and CPU time of a sweep on Spark over a typical mix, with kernels loaded and Spark's workers
started.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.job import QUICK, Effort, show_progress
from benchmarks.processes import tree_cpu_s, tree_cpu_since_s
from benchmarks.tables import write_table
from tidegate.pipeline.session import end_session, spark_session
from tidegate_lab.control.policies import AST, FULL_DESIGN, NONE, RBT, Policy
from tidegate_lab.control.request_pool import (
    Case,
    Parameters,
    capacity_drop,
    impatient_clients,
    many_clients,
    simulate,
    simulate_table,
    slide_show,
    steady_overload,
)
from tidegate_lab.control.simulated import OVERLOAD_FIRST_S
from tidegate_lab.sweep import sweep

POLICIES: Final = (NONE, AST, RBT, FULL_DESIGN)
SCENARIOS: Final[dict[str, Callable[[], Parameters]]] = {
    "S1, 2000 clients": slide_show,
    "S2, 2000 clients": steady_overload,
    "S3, 2000 clients": capacity_drop,
    "S4, 10,000 clients": many_clients,
    "W, 2000 clients": impatient_clients,
}
SINGLE: Final = ("S2, 2000 clients", "S4, 10,000 clients")
SEEDS: Final = range(1, 51)
SEEDS_QUICK: Final = range(1, 11)
SEEDS_WARM_UP: Final = range(1000, 1001)
RUNS_ASKED: Final = 10_000
_RUNS_PER_ROUND: Final = 4


def run(effort: Effort) -> str:
    rows = [_single(name, policy, effort.rounds * _RUNS_PER_ROUND) for name in SINGLE for policy in POLICIES]
    single = write_table(
        "Simulated request pool, one core",
        ("run", "events", "CPU ms", "M events/s"),
        rows,
        [f"the best of {effort.rounds * _RUNS_PER_ROUND} runs of seed 1"],
    )
    return f"{single}\n{_sweep(SEEDS_QUICK if effort == QUICK else SEEDS)}"


def _single(name: str, policy: Policy, runs: int) -> list[str]:
    case = _case(SCENARIOS[name](), policy, 1)
    events, best_s = simulate(*case).events, float("inf")
    for _ in range(runs):
        began_s = time.process_time()
        simulate(*case)
        best_s = min(best_s, time.process_time() - began_s)
    show_progress(f"{name}, {policy.name}: {events / best_s / 1e6:.2f} M events/s")
    return [f"{name}: {policy.name}", f"{events:,}", f"{best_s * 1000:.1f}", f"{events / best_s / 1e6:.2f}"]


def _sweep(seeds: Sequence[int]) -> str:
    cores = os.cpu_count() or 1
    cases, few = _cases(seeds), _cases(SEEDS_WARM_UP)
    show_progress(f"Spark and its workers start; then {len(cases):,} runs")
    spark = spark_session(f"local[{cores},4]")
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as made:
        sweep(spark, simulate_table, few, Path(made) / "warm")
        began_s, before = time.monotonic(), tree_cpu_s(os.getpid())
        events = sum(sweep(spark, simulate_table, cases, Path(made) / "measured")["events"].to_pylist())
        took_s, cpu_s = time.monotonic() - began_s, tree_cpu_since_s(os.getpid(), before)
    end_session(spark)
    row = [
        f"{len(cases):,}",
        f"{took_s:.1f}",
        f"{len(cases) / took_s:,.1f}",
        f"{events / took_s / 1e6:.2f}",
        f"{RUNS_ASKED / len(cases) * took_s / 60:.1f}",
        f"{RUNS_ASKED / len(cases) * cpu_s / cores / 60:.1f}",
    ]
    mix = ", ".join(name.partition(",")[0] for name in SCENARIOS)
    policies = ", ".join(policy.name for policy in POLICIES)
    return write_table(
        f"Sweep of simulated request pools over Spark, {cores} cores",
        ("runs", "seconds", "runs/s", "M events/s", f"minutes for {RUNS_ASKED:,}", "with idle cores"),
        [row],
        [
            f"{mix}, each with {policies}; results in Parquet; Spark was started before",
            f"with idle cores: CPU of all processes, with Java and Python workers, over {cores} cores",
        ],
    )


def _cases(seeds: Sequence[int]) -> list[Case]:
    return [_case(scenario(), policy, seed) for scenario in SCENARIOS.values() for policy in POLICIES for seed in seeds]


def _case(parameters: Parameters, policy: Policy, seed: int) -> Case:
    interval = replace(policy.control.interval, first_s=OVERLOAD_FIRST_S)
    return Case(replace(parameters, **policy.broker), replace(policy.control, interval=interval), seed)
