"""Evaluation of the elastic layers: repeats section 6 of the paper on real processes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from tidegate_lab.elasticity import recovery, scaling, throughput
from tidegate_lab.report import describe_machine, write_report

PACKAGES = ("numba", "numpy", "kazoo", "lmdb", "pyarrow", "matplotlib")


def evaluate_elasticity(out: Path, *, is_short: bool, command: str) -> Path:
    """Writes the report, its pictures and its data sets into `out`; returns the report's path."""
    out.mkdir(parents=True, exist_ok=True)
    chapters = [
        scaling.write_chapter(out, scaling.SHORT if is_short else scaling.FULL),
        recovery.write_chapter(out, recovery.SHORT if is_short else recovery.FULL),
        throughput.write_chapter(out, throughput.SHORT if is_short else throughput.FULL),
    ]
    about = [
        f"Command: `{command}`"
        + (" (short: few and short runs, which show trends, not exact values)" if is_short else ""),
        f"Machine: {describe_machine(PACKAGES)}; {datetime.now(UTC):%Y-%m-%d}",
    ]
    return write_report(out, "Evaluation of the elastic layers", about, chapters)
