"""A sweep over Spark: many short simulations on all cores, beside the same simulations one after another.

Measured: the wall clock of both, in turn, with kernels loaded and Spark's workers started; what starting them takes is
told apart. The sweep writes its results to Parquet and reads them back, the plain loop keeps them; they are compared.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

from benchmarks.job import QUICK, Effort, show_progress
from benchmarks.processes import Failed
from benchmarks.tables import ratio, write_table
from tidegate.evaluation.queues_simulated import ALL_VARIANTS, LOADS
from tidegate.pipeline.session import spark_session
from tidegate.pipeline.sweep import sweep
from tidegate.simulation.message_queue import Case, simulate_table

SEEDS: Final = range(50)
SEEDS_QUICK: Final = range(2)
SEEDS_WARM_UP: Final = range(1000, 1001)
WARM_UP_S: Final = 4.0
MEASURED_S: Final = 20.0
_ROUNDS_MAX: Final = 2
_HEAD: Final = ("run", "simulations", "seconds", "simulations/s", "loop s / this", "parallel efficiency")
_NOTES: Final = (
    "medians of {rounds} interleaved rounds; the sweep left {files} Parquet files; its rows equal those of the loop",
    "parallel efficiency: seconds of the loop over cores x seconds of the sweep",
    "not in the table: Spark started in {start_s:.1f} s, its workers with a first {few} simulations in {warm_s:.1f} s",
)

T = TypeVar("T")


def run(effort: Effort) -> str:
    cores = os.cpu_count() or 1
    cases, few = _cases(SEEDS_QUICK if effort == QUICK else SEEDS), _cases(SEEDS_WARM_UP)
    rounds = min(effort.rounds, _ROUNDS_MAX)
    plain_s: list[float] = []
    sweep_s: list[float] = []
    kept_s: list[float] = []
    show_progress("Spark and its workers start")
    start_s, spark = _timed(lambda: spark_session(f"local[{cores},4]"))
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as made:
        directory = Path(made)
        warm_s, _ = _timed(lambda: sweep(spark, simulate_table, few, directory / "warm"))
        for number in range(rounds):
            show_progress(f"round {number + 1}  plain loop, {len(cases):,} simulations")
            took_s, expected = _timed(lambda: simulate_table(cases))
            plain_s.append(took_s)
            for name, taken_s in (("sweep", sweep_s), ("sweep, all results there", kept_s)):
                show_progress(f"round {number + 1}  {name}")
                taken_s.append(_sweep(spark, cases, directory / str(number), expected))
        files = len(list((directory / "0").iterdir()))
    spark.stop()
    rows = [
        _row("plain loop, one process", len(cases), plain_s, plain_s, 1),
        _row(f"sweep, {cores} cores", len(cases), sweep_s, plain_s, cores),
        [*_row("sweep, all results there", len(cases), kept_s, plain_s, cores)[:-1], "-"],
    ]
    told = {"rounds": rounds, "files": files, "start_s": start_s, "few": len(few), "warm_s": warm_s}
    return write_table("Sweep over Spark", _HEAD, rows, [note.format(**told) for note in _NOTES])


def _cases(seeds: range) -> list[Case]:
    """Loads and methods of the evaluation of queues: the longest takes some thirty times as long as the shortest."""
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


def _sweep(spark: SparkSession, cases: Sequence[Case], directory: Path, expected: pa.Table) -> float:
    took_s, table = _timed(lambda: sweep(spark, simulate_table, cases, directory))
    if not table.equals(expected):
        raise Failed("the sweep over Spark gave other results than the plain loop")
    return took_s


def _timed(do: Callable[[], T]) -> tuple[float, T]:
    began_s = time.monotonic()
    done = do()
    return time.monotonic() - began_s, done


def _row(name: str, count: int, taken_s: Sequence[float], plain_s: Sequence[float], cores: int) -> list[str]:
    took_s, loop_s = median(taken_s), median(plain_s)
    return [
        name,
        f"{count:,}",
        f"{took_s:.2f}",
        f"{count / took_s:,.0f}",
        ratio(loop_s, took_s),
        ratio(loop_s, cores * took_s),
    ]
