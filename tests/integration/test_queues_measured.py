"""A tiny run of the evaluation on a real broker with LMDB and with Redis: every message arrives, and the report is
complete.

Its figures are meaningless, and none is asserted."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tidegate_lab.queues.load import Times
from tidegate_lab.queues.measured import LOADS, VARIANTS, Extent, write_chapter

TINY = Extent(Times(warm_up_s=0.05, measured_s=0.2), repetitions=1)


@pytest.mark.evaluation
@pytest.mark.timeout(240)
def test_a_tiny_run_measures_every_method_on_both_stores_and_loses_nothing(tmp_path: Path) -> None:
    chapter = write_chapter(tmp_path, TINY)
    rows = pq.read_table(tmp_path / "measured.parquet").to_pylist()
    assert len(rows) == 2 * len(LOADS) * len(VARIANTS)
    assert {row["method"] for row in rows} == {variant.name for variant in VARIANTS}
    assert all(row["enqueued"] > 0 and row["missing"] == 0 for row in rows)
    assert chapter.claims[0].is_held, chapter.claims[0].measured
    assert (tmp_path / "measured.png").read_bytes().startswith(b"\x89PNG")
    assert all(variant.name in chapter.write() for variant in VARIANTS)
