"""A small run of the elasticity evaluation: real slices, real clients, and a report of the measurements."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tidegate_lab.elasticity import recovery, scaling, throughput

pytestmark = [pytest.mark.evaluation, pytest.mark.timeout(600)]


def test_scaling_is_measured_with_both_switches(tmp_path: Path) -> None:
    chapter = scaling.write_chapter(tmp_path, scaling.Extent(300, 500, 50, 2.0, 1))
    delays = pq.read_table(tmp_path / "scaling.parquet").to_pandas()
    assert set(delays.switch) == {"epoch", "buffered"}
    assert (delays.delay_p50_ms > 0).all()
    assert (delays.delay_max_ms >= delays.delay_p50_ms).all()
    assert delays.sent_s.min() < -1 < 0 < delays.sent_s.max()
    nothing_lost = chapter.claims[-1]
    assert (nothing_lost.is_held, nothing_lost.measured) == (True, "0, 0, 0")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_throughput_is_measured_by_configuration(tmp_path: Path) -> None:
    extent = throughput.Extent((200,), ((1, 1, 1), (1, 2, 1)), 1.0, 1.5)
    text = throughput.write_chapter(tmp_path, extent).write()
    rows = pq.read_table(tmp_path / "throughput.parquet").to_pylist()
    assert [(row["subscriptions"], row["matchers"]) for row in rows] == [(200, 1), (200, 2)]
    for row in rows:
        assert row["notifications_s"] > 0
        assert min(row[f"{layer}_us"] for layer in ("access_point", "matcher", "exit_point", "broker")) > 0
    assert "| 200 | 1-2-1 |" in text


def test_recovery_is_measured_for_every_kind_of_slice(tmp_path: Path) -> None:
    chapter = recovery.write_chapter(tmp_path, recovery.Extent(300, 500, 1))
    rows = pq.read_table(tmp_path / "recovery.parquet").to_pylist()
    assert [row["kind"] for row in rows] == ["matcher", "access-point", "exit-point"]
    assert min(row["seconds"] for row in rows) > 0
    assert (chapter.claims[-1].is_held, chapter.claims[-1].measured) == (True, "0, 0, 0")
