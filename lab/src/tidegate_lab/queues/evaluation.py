"""Evaluation of the message queue: composes its chapters into one report.

A chapter is a function that takes the directory and whether the run is short. It runs its experiments and reports on
them. Simulations run in this process or on Spark, with the same results and therefore the same report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate_lab.queues import measured, simulated
from tidegate_lab.queues.message_queue import Case, simulate_table
from tidegate_lab.queues.simulated import Run, run_here
from tidegate_lab.report import Chapter, describe_machine, write_report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES = ("numba", "numpy", "pyarrow", "matplotlib")
SWEEP = "sweep"
"""The directory for results of simulations on Spark. An interrupted evaluation resumes from them."""

WriteChapter = Callable[[Path, bool], Chapter]


def write_simulated(out: Path, is_short: bool, run: Run = run_here) -> Chapter:
    extent = simulated.SHORT if is_short else simulated.FULL
    return simulated.write_chapter(out, extent, run)


def simulated_over(session: Callable[[], AbstractContextManager[SparkSession]]) -> WriteChapter:
    """Returns a chapter whose simulations run on Spark. The session ends with the chapter, because the measurements
    after it need the machine for themselves."""

    def write_chapter(out: Path, is_short: bool) -> Chapter:
        with session() as spark:
            return write_simulated(out, is_short, run_over(spark, out / SWEEP))

    return write_chapter


def run_over(spark: SparkSession, directory: Path) -> Run:
    from tidegate_lab.sweep import sweep

    def run(what: str, cases: Sequence[Case]) -> pa.Table:
        return sweep(spark, simulate_table, cases, directory, what=what)

    return run


def write_measured(out: Path, is_short: bool) -> Chapter:
    return measured.write_chapter(out, measured.SHORT if is_short else measured.FULL)


def evaluate_queues(out: Path, *, is_short: bool, command: str, chapters: Sequence[WriteChapter]) -> Path:
    """Runs the chapters and writes the report, its pictures and its data sets into `out`; returns the report's path.

    The report quotes `command`, so that readers can repeat the evaluation."""
    out.mkdir(parents=True, exist_ok=True)
    written = [write_chapter(out, is_short) for write_chapter in chapters]
    about = [
        f"Command: `{command}`"
        + (" (short: few seeds and short runs, which show trends, not exact values)" if is_short else ""),
        f"Machine: {describe_machine(PACKAGES)}; {datetime.now(UTC):%Y-%m-%d}",
    ]
    return write_report(out, "Evaluation of the message queue", about, written)
