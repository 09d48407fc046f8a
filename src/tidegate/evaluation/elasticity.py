"""The evaluation of the elastic layers: section 6 of the paper again, on real processes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from tidegate.evaluation import elasticity_recovery, elasticity_scaling, elasticity_throughput
from tidegate.evaluation.report import describe_machine, write_report

PACKAGES = ("numba", "numpy", "kazoo", "lmdb", "pyarrow", "matplotlib")


def evaluate_elasticity(out: Path, *, is_short: bool, command: str) -> Path:
    """Writes the report, its pictures and its data sets into `out`; returns the report's path."""
    out.mkdir(parents=True, exist_ok=True)
    chapters = [
        elasticity_scaling.write_chapter(out, elasticity_scaling.SHORT if is_short else elasticity_scaling.FULL),
        elasticity_recovery.write_chapter(out, elasticity_recovery.SHORT if is_short else elasticity_recovery.FULL),
        elasticity_throughput.write_chapter(
            out, elasticity_throughput.SHORT if is_short else elasticity_throughput.FULL
        ),
    ]
    about = [
        f"Command: `{command}`" + (" (short: few and short runs; trust the directions)" if is_short else ""),
        f"Machine: {describe_machine(PACKAGES)}; {datetime.now(UTC):%Y-%m-%d}",
    ]
    return write_report(out, "Evaluation of the elastic layers", about, chapters)
