"""The measured chapter of active control, small: every arm runs on a real broker, and the report has all of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tidegate.evaluation import control_measured
from tidegate.evaluation.control_load import Times
from tidegate.evaluation.control_measured import ARMS, NONE, Extent, workloads

pytestmark = pytest.mark.timeout(280)
TINY = Extent(Times(warm_up_s=0.1, measured_s=0.8), repetitions=1, processors=60)


def test_the_measured_chapter(tmp_path: Path) -> None:
    chapter = control_measured.write_chapter(tmp_path, TINY)
    written = chapter.write()
    runs = pq.read_table(tmp_path / "control_measured.parquet").to_pylist()
    names = [workload.name for workload in workloads(TINY.processors)]
    assert sorted((run["workload"], run["arm"]) for run in runs) == sorted(
        (name, arm.name) for name in names for arm in ARMS
    )
    assert all(0 <= run["stale_share"] <= 1 for run in runs)
    assert all((run["requests_per_minute"] == 0) for run in runs if run["arm"] == NONE.name)
    assert sum(run["requests_per_minute"] for run in runs) > 0
    assert all(f"### {name}" in written for name in names)
    assert (tmp_path / "control_measured.png").stat().st_size > 0
    assert len(chapter.claims) == 8
