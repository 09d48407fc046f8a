"""A small run of active control's measured chapter: every arm runs on a real broker, and the report is complete."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tidegate_lab.control import measured as measured_chapter
from tidegate_lab.control.load import Measured, measure
from tidegate_lab.control.measured import (
    BURST_ARMS,
    LAG_S_MAX,
    OTHER_BURST_ARMS,
    OVERLOAD_ARMS,
    MeasuredExtent,
)
from tidegate_lab.control.policies import AST, CONFLATION, FULL_DESIGN, NONE, Policy
from tidegate_lab.control.request_pool import Case, Parameters, slide_show, steady_overload

pytestmark = [pytest.mark.evaluation, pytest.mark.timeout(600)]
TRIES_MAX = 5
TINY = MeasuredExtent(seeds=(1,), sizes=(), size=0.05, warm_up_intervals=0.1, measured_s=0.5, burst_s=0.2, tries_max=1)


def case_of(policy: Policy, parameters: Parameters, first_s: float = 0.5) -> Case:
    settled = replace(parameters, **policy.broker, clients=40, warm_up_s=0.2, measured_s=2.0)
    return Case(settled, replace(policy.control, interval=replace(policy.control.interval, first_s=first_s)), 1)


def run(case: Case) -> Measured:
    """Measures again if the machine was too busy, as the experiment itself does."""
    for _ in range(TRIES_MAX):
        measured = asyncio.run(measure(case))
        if measured.lag_s <= LAG_S_MAX:
            break
    return measured


def test_who_never_checks_asks_nothing_and_hears_of_updates() -> None:
    calm = replace(steady_overload(), update_every_s=0.5, network_loss=0.0)
    measured = run(case_of(NONE, calm))
    assert measured.requests_per_minute == 0
    assert 0 < measured.stale_share < 1
    assert measured.notification_loss < 0.5, "the network loses none, a broker on a busy machine may drop some"
    assert measured.bystander_p99_s > 0


def test_a_check_finds_what_was_lost() -> None:
    """All indications are lost, so only checks can find the state."""
    deaf = replace(steady_overload(), update_every_s=0.5, network_loss=0.999)
    never, checked = run(case_of(NONE, deaf)), run(case_of(AST, deaf))
    assert never.stale_share > 0.6
    assert checked.stale_share < never.stale_share
    assert checked.requests_per_minute > 0


def test_an_announced_update_is_fetched() -> None:
    show = replace(slide_show(), update_every_s=0.6, network_loss=0.0)
    measured = run(case_of(FULL_DESIGN, show, first_s=20.0))
    assert measured.requests_per_minute > 40, "two updates in two seconds are fetched by all"
    assert measured.stale_share < 0.9


def test_a_broker_that_is_full_drops_indications_unless_it_merges_them() -> None:
    # One update fills the lanes for 100 ms, so checks find them full even on a slow machine.
    flood = replace(
        steady_overload(), update_every_s=0.005, notification_s=0.02, network_loss=0.0, entries_per_client=0.5
    )
    plain, merging = (run(case_of(policy, flood, first_s=0.25)) for policy in (AST, CONFLATION))
    assert plain.notification_loss > 0
    assert (plain.merged_share, merging.notification_loss) == (0, 0)
    assert merging.merged_share > 0
    assert plain.refused_share > 0


def test_clients_that_give_up_waste_what_is_served() -> None:
    case = case_of(AST, replace(steady_overload(), query_s=20e-3, timeout_s=0.05))
    measured = run(case)
    assert measured.timed_out_share > 0
    assert measured.wasted_share > 0
    assert not measured.response_p999_s > case.parameters.timeout_s, "late answers are no responses"


def test_the_measured_chapter_and_its_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_chapter, "OVERLOAD_FIRST_S", 0.25)
    chapter = measured_chapter.write_chapter(tmp_path, TINY, jobs=2)
    written = chapter.write()
    runs = pq.read_table(tmp_path / "control_measured_overload.parquet").to_pylist()
    assert [run["variant"] for run in runs] == [arm.name for arm in OVERLOAD_ARMS]
    assert all(0 <= run["stale_share"] <= 1 for run in runs)
    bursts = pq.read_table(tmp_path / "control_measured_bursts.parquet").to_pylist()
    assert len(bursts) == len(BURST_ARMS) + 2 * len(OTHER_BURST_ARMS)
    assert all(f"W{number}" in written for number in range(1, 6))
    pictures = ("control_measured", "control_measured_bursts", "control_measured_clients")
    assert {path.stem for path in tmp_path.glob("*.png")} == set(pictures)
    measured = {path: path.stat().st_mtime_ns for path in (tmp_path / "measured").iterdir()}
    assert measured_chapter.write_chapter(tmp_path, TINY).claims == chapter.claims
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "measured").iterdir()} == measured
