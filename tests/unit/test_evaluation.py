"""A tiny run of an evaluation writes a report with all its claims, data sets with all their columns, and pictures."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_lab import pictures
from tidegate_lab.queues import simulated
from tidegate_lab.queues.evaluation import evaluate_queues
from tidegate_lab.queues.message_queue import Method, Outcome, Parameters, simulate
from tidegate_lab.report import Chapter, Estimate, Ratio, write_report, write_table

TINY = simulated.Extent(
    seeds=(1, 2),
    warm_up_s=0.5,
    measured_s=0.5,
    rates=(50.0, 200.0),
    sleeps_s=(0.02, 0.5, 5.0),
    lingers_s=(0.0, 0.02),
)
TIMES = ("warm_up_s", "measured_s")
PNG = b"\x89PNG\r\n\x1a\n"


def write_tiny(out: Path, is_short: bool) -> Chapter:
    return simulated.write_chapter(out, TINY)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluation") / "queues"
    path = evaluate_queues(directory, is_short=True, command="the command", chapters=[write_tiny])
    assert path == directory / "report.md"
    return directory


def test_the_report_says_how_it_was_made_and_what_holds(out: Path) -> None:
    text = (out / "report.md").read_text()
    assert "Command: `the command`" in text
    assert re.search(r"\d+ cores; Python 3\.\d+\.\d+, numba", text)
    assert "2 seeds (1 to 2)" in text
    assert all(f"`{field.name}`" in text for field in fields(Parameters) if field.name not in TIMES)
    verdicts = re.findall(r"^\| [^|]+ \| (held|\*\*not held\*\*) \| [^|]+ \|$", text, re.MULTILINE)
    assert len(verdicts) == 16


def test_intervals_cover_what_they_promise() -> None:
    """The test draws a thousand means of five values, and a thousand ratios of two means of thirty."""
    random = np.random.default_rng(2)
    few = [Estimate.of(values) for values in random.normal(10.0, 2.0, (1000, 5)).tolist()]
    covered = sum(abs(each.mean - 10.0) <= each.half_width for each in few)
    assert 930 <= covered <= 970
    common = random.normal(0.0, 1.0, (1000, 30))
    ours, theirs = (mean + common + random.normal(0.0, 0.5, common.shape) for mean in (6.0, 12.0))
    ratios = [Ratio.of(*pair) for pair in zip(ours.tolist(), theirs.tolist(), strict=True)]
    covered = sum(each.low <= 0.5 <= each.high for each in ratios)
    assert 910 <= covered <= 970
    assert all(each.low <= each.value <= each.high for each in ratios)


def test_columns_of_figures_are_aligned_to_the_right() -> None:
    table = write_table(("who", "p50", "claim"), [("AST", "1,764.5 ± 25.2", "1 of 2"), ("none", "-", "none")])
    assert table.splitlines()[1] == "| --- | ---: | --- |"


def test_ratios_without_values_are_told_as_such() -> None:
    assert Ratio.of([1.0, 3.0], [4.0, 4.0]).write() == "0.50 times (0.25 to 0.75)"
    assert Ratio.of([1.0], [4.0]).write() == "0.25 times"
    assert Ratio.of([1.0, float("nan")], [4.0, 4.0]).write() == "nan times"
    assert Ratio.of([1.0, 2.0], [0.0, 0.0]).write() == "inf times"


def test_every_link_of_the_report_leads_to_a_file(out: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", (out / "report.md").read_text())
    files = {link for link in links if not link.startswith("https://")}
    assert files == {path.name for path in out.iterdir()} - {"report.md"}


def test_data_sets_have_a_row_a_run_with_every_parameter_and_measure(out: Path) -> None:
    names = {"request_rates": 2 * 2 * 4, "sleeps": 2 * 3 * 4, "loads": 5 * 8, "latency_and_cost": 5}
    columns = ["scenario", "variant", "method", "seed"]
    columns += [field.name for kind in (Parameters, Outcome) for field in fields(kind)]
    for name, points in names.items():
        table = pq.read_table(out / f"{name}.parquet")
        assert table.column_names == columns
        assert table.num_rows == points * len(TINY.seeds)


def test_a_row_of_a_data_set_can_be_run_again(out: Path) -> None:
    row = pq.read_table(out / "loads.parquet").to_pylist()[7]
    parameters = Parameters(**{field.name: row[field.name] for field in fields(Parameters)})
    method = next(method for method in Method if method.label == row["method"])
    assert simulate(parameters, method, row["seed"]).throughput_per_s == row["throughput_per_s"]


def test_pictures_are_pictures(out: Path) -> None:
    files = sorted(out.glob("*.png"))
    assert len(files) == 5
    assert all(file.read_bytes().startswith(PNG) for file in files)


def test_claims_stand_first_whether_they_hold_or_not(tmp_path: Path) -> None:
    chapter = Chapter(tmp_path, "Chapter")
    chapter.claim("it is fast", True, "7")
    chapter.claim("it is cheap", False, "8")
    text = write_report(tmp_path, "Title", ["how"], [chapter]).read_text()
    assert "| it is fast | held | 7 |\n| it is cheap | **not held** | 8 |" in text
    assert text.index("it is cheap") < text.index("## Chapter")


def test_an_interval_is_that_of_student() -> None:
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert estimate.mean == 2
    assert estimate.half_width == pytest.approx(4.30 / 3**0.5)
    assert not estimate.is_above_zero
    assert Estimate.of([1.0, 1.1, 1.2]).is_above_zero
    assert Estimate.of([1.0, float("nan")]).write() == "-"
    assert replace(estimate, mean=-9.0).is_below_zero


@given(st.lists(st.floats(0, 500), min_size=1, max_size=8))
def test_labels_keep_their_order_and_their_distance(wanted: list[float]) -> None:
    places = pictures.spread(wanted, 10)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    assert all(places[b] - places[a] >= 10 - 1e-6 for a, b in pairwise(order))
    assert sum(places) == pytest.approx(sum(wanted), abs=1e-6)
