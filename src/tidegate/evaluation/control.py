"""The evaluation of active control: composes its chapters, simulated and measured, into one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.evaluation import control_measured, control_simulated
from tidegate.evaluation.control_simulated import Run, run_here, run_over
from tidegate.evaluation.report import Chapter, describe_machine, write_report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES = ("numba", "numpy", "pyarrow", "matplotlib")
SWEEP = "sweep"
"""Directory with what simulations over Spark gave: an evaluation that was ended goes on from there."""

WriteChapter = Callable[[Path, bool], Chapter]


def write_simulated(out: Path, is_short: bool, run: Run = run_here) -> Chapter:
    return control_simulated.write_chapter(out, control_simulated.SHORT if is_short else control_simulated.FULL, run)


def simulated_over(session: Callable[[], AbstractContextManager[SparkSession]]) -> WriteChapter:
    """The same chapter over Spark, which is ended with it: what is measured next needs the machine."""

    def write_chapter(out: Path, is_short: bool) -> Chapter:
        with session() as spark:
            return write_simulated(out, is_short, run_over(spark, out / SWEEP))

    return write_chapter


def measured_by(jobs: int | None) -> WriteChapter:
    """The chapter on real clients, with so many runs at a time."""

    def write_chapter(out: Path, is_short: bool) -> Chapter:
        extent = control_measured.SHORT if is_short else control_measured.FULL
        return control_measured.write_chapter(out, extent, jobs)

    return write_chapter


def evaluate_control(out: Path, *, is_short: bool, command: str, chapters: Sequence[WriteChapter]) -> Path:
    """Runs the chapters and writes the report, its pictures and its data sets into `out`; returns the report's path.

    `command` is what the report tells a reader to type to get it again."""
    out.mkdir(parents=True, exist_ok=True)
    written = [write_chapter(out, is_short) for write_chapter in chapters]
    about = [
        f"Command: `{command}`" + (" (short: few seeds and short runs; trust the directions)" if is_short else ""),
        f"Machine: {describe_machine(PACKAGES)}; {datetime.now(UTC):%Y-%m-%d}",
    ]
    return write_report(out, "Evaluation of active control", about, written)
