"""Simulated request pools give the same results on Spark as in a plain loop, and the same chapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tidegate.client.control import Control, Strategy
from tidegate_lab.control.grid import Extent
from tidegate_lab.control.policies import printed
from tidegate_lab.control.request_pool import Case, Parameters, simulate_table
from tidegate_lab.control.simulated import Run, run_here, run_over, write_chapter
from tidegate_lab.sweep import sweep

BRIEF = Parameters(clients=40, query_s=0.1, warm_up_s=0.5, measured_s=2.0)


def test_any_chunks_give_what_a_plain_loop_gives(spark: SparkSession, tmp_path: Path) -> None:
    controls = [Control(), *(printed(strategy) for strategy in Strategy)]
    cases = [Case(BRIEF, control, seed) for control in controls for seed in range(4)]
    cases.append(Case(replace(BRIEF, timeout_s=0.5, is_conflating=True), Control(), 1))
    table = sweep(spark, simulate_table, cases, tmp_path, chunk_s=1e-3)
    # `equals` does not work, because a missing measurement is NaN, which equals nothing.
    assert repr(table.to_pylist()) == repr(simulate_table(cases).to_pylist())
    assert table["strategy"].to_pylist()[:4] == ["adaptive"] * 4


@pytest.mark.evaluation
def test_the_chapter_over_spark_is_the_same(spark: SparkSession, tmp_path: Path) -> None:
    def write(name: str, run: Run) -> dict[str, str]:
        out = tmp_path / name
        out.mkdir()
        chapter = write_chapter(out, Extent(seeds=(1, 2), sizes=(500,), size=0.01), run)
        tables = {path.name: repr(pq.read_table(path).to_pylist()) for path in out.glob("*.parquet")}
        return tables | {"text": chapter.write(), "claims": repr(chapter.claims)}

    here = write("here", run_here)
    assert write("over Spark", run_over(spark, tmp_path / "sweep")) == here
    assert len(here) == 8
