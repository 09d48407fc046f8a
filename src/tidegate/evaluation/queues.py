"""The evaluation of the message queue: composes its chapters into one report.

A chapter is a function of the directory and of whether the run is a short one; it runs what it reports on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tidegate.evaluation import queues_measured, queues_simulated
from tidegate.evaluation.report import Chapter, describe_machine, write_report

PACKAGES = ("numba", "numpy", "pyarrow", "matplotlib")

WriteChapter = Callable[[Path, bool], Chapter]


def write_simulated(out: Path, is_short: bool) -> Chapter:
    return queues_simulated.write_chapter(out, queues_simulated.SHORT if is_short else queues_simulated.FULL)


def write_measured(out: Path, is_short: bool) -> Chapter:
    return queues_measured.write_chapter(out, queues_measured.SHORT if is_short else queues_measured.FULL)


CHAPTERS: tuple[WriteChapter, ...] = (write_simulated, write_measured)


def evaluate_queues(out: Path, *, is_short: bool, command: str, chapters: Sequence[WriteChapter] = CHAPTERS) -> Path:
    """Runs every chapter and writes the report, its pictures and its data sets into `out`; returns the report's path.

    `command` is what the report tells a reader to type to get it again."""
    out.mkdir(parents=True, exist_ok=True)
    written = [write_chapter(out, is_short) for write_chapter in chapters]
    about = [
        f"Command: `{command}`" + (" (short: few seeds and short runs; trust the directions)" if is_short else ""),
        f"Machine: {describe_machine(PACKAGES)}; {datetime.now(UTC):%Y-%m-%d}",
    ]
    return write_report(out, "Evaluation of the message queue", about, written)
