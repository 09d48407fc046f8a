"""A sweep on Spark: many short simulations on all cores, compared with the same simulations one after another.

Measured: wall clock and CPU time of both, interleaved, with kernels loaded and Spark's workers started. The start of
the workers is reported separately. The sweep writes its results to Parquet and reads them back, while the plain loop
keeps them in memory. The results must be equal.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

from benchmarks.job import QUICK, Effort, show_progress
from benchmarks.processes import Failed, tree_cpu_s, tree_cpu_since_s
from benchmarks.tables import ratio, write_table
from tidegate.pipeline.session import end_session, spark_session
from tidegate_lab.queues.message_queue import Case, simulate_table
from tidegate_lab.queues.simulated import ALL_VARIANTS, LOADS
from tidegate_lab.sweep import sweep

SEEDS: Final = range(50)
SEEDS_QUICK: Final = range(2)
SEEDS_WARM_UP: Final = range(1000, 1001)
WARM_UP_S: Final = 4.0
MEASURED_S: Final = 20.0
_ROUNDS_MAX: Final = 2
_LOOP: Final = "plain loop, one process"
_SWEEP: Final = "sweep"
_KEPT: Final = "sweep, all results there"
_HEAD: Final = (
    "run", "simulations", "seconds", "simulations/s", "CPU s", "loop s / this", "parallel efficiency", "CPU efficiency",
)  # fmt: skip
_NOTES: Final = (
    "medians of {rounds} interleaved rounds; the sweep wrote {files} Parquet files; its rows equal those of the loop",
    "parallel efficiency: seconds of the loop / (cores x seconds of the sweep); meaningless on a busy machine",
    "CPU: of all processes, with Java and Python workers; efficiency: CPU of the loop / CPU of the sweep",
    "not in the table: Spark started in {start_s:.1f} s, its workers with a first {few} simulations in {warm_s:.1f} s",
)

T = TypeVar("T")


class Taken(NamedTuple):
    wall_s: float
    cpu_s: float


def run(effort: Effort) -> str:
    cores = os.cpu_count() or 1
    cases, few = _cases(SEEDS_QUICK if effort == QUICK else SEEDS), _cases(SEEDS_WARM_UP)
    rounds = min(effort.rounds, _ROUNDS_MAX)
    runs: dict[str, list[Taken]] = {_LOOP: [], _SWEEP: [], _KEPT: []}
    show_progress("Spark and its workers start")
    start, spark = _timed(lambda: spark_session(f"local[{cores},4]"))
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as made:
        directory = Path(made)
        warm, _ = _timed(lambda: sweep(spark, simulate_table, few, directory / "warm"))
        for number in range(rounds):
            show_progress(f"round {number + 1}  {_LOOP}, {len(cases):,} simulations")
            taken, expected = _timed(lambda: simulate_table(cases))
            runs[_LOOP].append(taken)
            for name in (_SWEEP, _KEPT):
                show_progress(f"round {number + 1}  {name}")
                runs[name].append(_sweep(spark, cases, directory / str(number), expected))
        files = len(list((directory / "0").iterdir()))
    end_session(spark)
    rows = [_row(name, len(cases), runs, 1 if name == _LOOP else cores) for name in runs]
    facts = {"rounds": rounds, "files": files, "start_s": start.wall_s, "few": len(few), "warm_s": warm.wall_s}
    return write_table("Sweep over Spark", _HEAD, rows, [note.format(**facts) for note in _NOTES])


def _cases(seeds: range) -> list[Case]:
    """Returns the cases of the queue evaluation. The longest takes about 30 times as long as the shortest."""
    return [
        Case(
            replace(load, warm_up_s=WARM_UP_S, measured_s=MEASURED_S, **variant.settings),
            variant.method,
            seed,
        )
        for load in LOADS.values()
        for variant in ALL_VARIANTS
        for seed in seeds
    ]


def _sweep(spark: SparkSession, cases: Sequence[Case], directory: Path, expected: pa.Table) -> Taken:
    taken, table = _timed(lambda: sweep(spark, simulate_table, cases, directory))
    if not table.equals(expected):
        raise Failed("WRONG: the sweep on Spark and the plain loop have different results")
    return taken


def _timed(do: Callable[[], T]) -> tuple[Taken, T]:
    began_s, before = time.monotonic(), tree_cpu_s(os.getpid())
    done = do()
    return Taken(time.monotonic() - began_s, tree_cpu_since_s(os.getpid(), before)), done


def _row(name: str, count: int, runs: Mapping[str, Sequence[Taken]], cores: int) -> list[str]:
    loop, this = _median(runs[_LOOP]), _median(runs[name])
    efficiencies = [ratio(loop.wall_s, cores * this.wall_s), ratio(loop.cpu_s, this.cpu_s)]
    return [
        f"{name}, {cores} cores" if name == _SWEEP else name,
        f"{count:,}",
        f"{this.wall_s:.2f}",
        f"{count / this.wall_s:,.0f}",
        f"{this.cpu_s:.2f}",
        ratio(loop.wall_s, this.wall_s),
        *(["-", "-"] if name == _KEPT else efficiencies),
    ]


def _median(taken: Sequence[Taken]) -> Taken:
    return Taken(median(each.wall_s for each in taken), median(each.cpu_s for each in taken))
