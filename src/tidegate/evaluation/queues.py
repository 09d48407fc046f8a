"""The evaluation of the message queue: composes its chapters into one report.

A chapter is a function of the directory and of whether the run is a short one; it runs what it reports on. Simulations
run in this process, or over Spark: their outcomes, and so the report, are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.evaluation import queues_measured, queues_simulated
from tidegate.evaluation.queues_simulated import Run, run_here
from tidegate.evaluation.report import Chapter, describe_machine, write_report
from tidegate.simulation.message_queue import Case, simulate_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES = ("numba", "numpy", "pyarrow", "matplotlib")
SWEEP = "sweep"
"""Directory with what simulations over Spark gave: an evaluation that was ended goes on from there."""

WriteChapter = Callable[[Path, bool], Chapter]


def write_simulated(out: Path, is_short: bool, run: Run = run_here) -> Chapter:
    extent = queues_simulated.SHORT if is_short else queues_simulated.FULL
    return queues_simulated.write_chapter(out, extent, run)


def simulated_over(session: Callable[[], AbstractContextManager[SparkSession]]) -> WriteChapter:
    """The same chapter with its simulations over Spark, which is ended with it: what is measured next needs the
    machine."""

    def write_chapter(out: Path, is_short: bool) -> Chapter:
        with session() as spark:
            return write_simulated(out, is_short, run_over(spark, out / SWEEP))

    return write_chapter


def run_over(spark: SparkSession, directory: Path) -> Run:
    from tidegate.pipeline.sweep import sweep

    def run(what: str, cases: Sequence[Case]) -> pa.Table:
        return sweep(spark, simulate_table, cases, directory, what=what)

    return run


def write_measured(out: Path, is_short: bool) -> Chapter:
    return queues_measured.write_chapter(out, queues_measured.SHORT if is_short else queues_measured.FULL)


def evaluate_queues(out: Path, *, is_short: bool, command: str, chapters: Sequence[WriteChapter]) -> Path:
    """Runs the chapters and writes the report, its pictures and its data sets into `out`; returns the report's path.

    `command` is what the report tells a reader to type to get it again."""
    out.mkdir(parents=True, exist_ok=True)
    written = [write_chapter(out, is_short) for write_chapter in chapters]
    about = [
        f"Command: `{command}`" + (" (short: few seeds and short runs; trust the directions)" if is_short else ""),
        f"Machine: {describe_machine(PACKAGES)}; {datetime.now(UTC):%Y-%m-%d}",
    ]
    return write_report(out, "Evaluation of the message queue", about, written)
