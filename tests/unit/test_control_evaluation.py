"""A tiny run of the request pool's chapter writes its claims, data sets with all their columns, and pictures."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tidegate_lab.control import simulated
from tidegate_lab.control.grid import Extent, resized
from tidegate_lab.control.policies import FULL_DESIGN
from tidegate_lab.control.request_pool import Outcome, Parameters, simulate, steady_overload
from tidegate_lab.control.simulated import OVERLOAD_FIRST_S, OVERLOAD_POLICIES
from tidegate_lab.report import write_report

TINY = Extent(seeds=(1, 2), sizes=(500, 2000), size=0.02)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("control")
    chapter = simulated.write_chapter(directory, TINY)
    write_report(directory, "Evaluation of active control", ["how"], [chapter])
    return directory


def test_every_claim_has_a_verdict_and_its_figure(out: Path) -> None:
    text = (out / "report.md").read_text()
    verdicts = re.findall(r"^\| [^|]+ \| (held|\*\*not held\*\*) \| [^|]+ \|$", text, re.MULTILINE)
    assert len(verdicts) == 29
    assert "2 seeds (1 to 2)" in text


def test_every_policy_has_its_row(out: Path) -> None:
    text = (out / "report.md").read_text()
    assert all(f"| {policy.name} |" in text for policy in OVERLOAD_POLICIES)


def test_every_link_of_the_report_leads_to_a_file(out: Path) -> None:
    links = set(re.findall(r"\]\(([^)]+)\)", (out / "report.md").read_text()))
    assert links == {path.name for path in out.iterdir()} - {"report.md"}
    assert {path.suffix for path in out.iterdir()} == {".md", ".png", ".parquet"}
    assert all(path.read_bytes().startswith(PNG) for path in out.glob("*.png"))


def test_data_sets_have_a_row_a_run_with_every_parameter_and_measure(out: Path) -> None:
    table = pq.read_table(out / "control_steady_overload.parquet")
    assert table.num_rows == len(OVERLOAD_POLICIES) * len(TINY.seeds)
    names = {field.name for kind in (Parameters, Outcome) for field in fields(kind)}
    assert names | {"scenario", "variant", "seed", "strategy", "backoff", "alpha"} <= set(table.column_names)


def test_a_row_of_a_data_set_can_be_run_again(out: Path) -> None:
    row = pq.read_table(out / "control_steady_overload.parquet").to_pylist()[-1]
    assert (row["variant"], row["seed"]) == (FULL_DESIGN.name, 2)
    parameters = Parameters(**{field.name: row[field.name] for field in fields(Parameters)})
    interval = replace(FULL_DESIGN.control.interval, first_s=OVERLOAD_FIRST_S)
    outcome = simulate(parameters, replace(FULL_DESIGN.control, interval=interval), 2)
    assert {field.name: row[field.name] for field in fields(Outcome)} == pytest.approx(vars(outcome), nan_ok=True)


def test_a_broker_of_another_size_is_as_loaded() -> None:
    half = resized(steady_overload(), 0.5)
    assert half.clients == 1000
    assert half.clients * half.query_s == pytest.approx(2000 * steady_overload().query_s)
    assert half.span_requests_max == pytest.approx(steady_overload().span_requests_max / 2)


def test_policies_have_names_of_their_own() -> None:
    names = [policy.name for policy in OVERLOAD_POLICIES]
    assert len(set(names)) == len(names)
