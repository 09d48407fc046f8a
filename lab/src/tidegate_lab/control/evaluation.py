"""Evaluation of active control: composes its chapters, simulated and measured, into one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate_lab.control import measured, simulated
from tidegate_lab.control.simulated import Run, run_here, run_over
from tidegate_lab.report import Chapter, describe_machine, write_report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES = ("numba", "numpy", "pyarrow", "matplotlib")
SWEEP = "sweep"
"""The directory for results of simulations on Spark. An interrupted evaluation resumes from them."""

WriteChapter = Callable[[Path, bool], Chapter]


def write_simulated(out: Path, is_short: bool, run: Run = run_here) -> Chapter:
    return simulated.write_chapter(out, simulated.SHORT if is_short else simulated.FULL, run)


def simulated_over(session: Callable[[], AbstractContextManager[SparkSession]]) -> WriteChapter:
    """Returns a chapter whose simulations run on Spark. The session ends with the chapter, because the measurements
    after it need the machine for themselves."""

    def write_chapter(out: Path, is_short: bool) -> Chapter:
        with session() as spark:
            return write_simulated(out, is_short, run_over(spark, out / SWEEP))

    return write_chapter


def measured_by(jobs: int | None) -> WriteChapter:
    """Returns the chapter on real clients, with `jobs` concurrent runs."""

    def write_chapter(out: Path, is_short: bool) -> Chapter:
        extent = measured.SHORT if is_short else measured.FULL
        return measured.write_chapter(out, extent, jobs)

    return write_chapter


def evaluate_control(out: Path, *, is_short: bool, command: str, chapters: Sequence[WriteChapter]) -> Path:
    """Runs the chapters and writes the report, its pictures and its data sets into `out`; returns the report's path.

    The report quotes `command`, so that readers can repeat the evaluation."""
    out.mkdir(parents=True, exist_ok=True)
    written = [write_chapter(out, is_short) for write_chapter in chapters]
    about = [
        f"Command: `{command}`"
        + (" (short: few seeds and short runs, which show trends, not exact values)" if is_short else ""),
        f"Machine: {describe_machine(PACKAGES)}; {datetime.now(UTC):%Y-%m-%d}",
    ]
    return write_report(out, "Evaluation of active control", about, written)
