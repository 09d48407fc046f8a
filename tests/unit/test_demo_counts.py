"""The self-check of the main job: it passes if the counts at both ends of every path agree, or names differences."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.broker.process import RunningBroker
from tidegate.client import Delivery
from tidegate.demo.counts import Counts
from tidegate.demo.main_job import _while_broker_lives
from tidegate.errors import Unavailable

READINGS = [{"station": "28005002", "time": "2026-01-12T00:00:00Z", "NO2": 41.0, "O3": 12.0}] * 3


def agreeing() -> Counts:
    counts = Counts(queue={"enqueued": 3}, alerts=2)
    counts.on_published(READINGS)
    for sequence in (1, 2, 3):
        counts.on_delivered(Delivery(1, sequence, {}))
    counts.queries.reported = 3
    counts.queries.on_seen("28005002", 41.0)
    counts.totals = {
        "messages": 3,
        "set_aside": 0,
        "readings": 6,
        "duplicates": 0,
        "late": 0,
        "windows": 2,
        "alerts": 2,
    }
    return counts


def test_counts_that_agree_do() -> None:
    counts = agreeing()
    assert counts.differences() == []
    assert (counts.lost, counts.doubled) == (0, 0)
    assert "3 readings published" in counts.summary()


@pytest.mark.parametrize("place", ["delivered", "published", "values", "doubled", "alerts", "queue.enqueued"])
@given(by=st.integers(min_value=1, max_value=1000))
def test_a_number_that_is_off_is_found(place: str, by: int) -> None:
    counts = agreeing()
    name, _dot, key = place.partition(".")
    if key:
        getattr(counts, name)[key] += by
    else:
        setattr(counts, name, getattr(counts, name) + by)
    assert counts.differences()


@given(
    name=st.sampled_from(["messages", "set_aside", "readings", "duplicates", "late", "alerts"]), by=st.integers(1, 9)
)
def test_what_spark_says_otherwise_is_found_and_named(name: str, by: int) -> None:
    counts = agreeing()
    totals: dict[str, Any] = deepcopy(counts.totals)
    totals[name] += by
    counts.totals = totals
    assert any(str(totals[name]) in difference for difference in counts.differences())


def test_what_persistent_queries_do_not_know_is_found() -> None:
    counts = agreeing()
    counts.queries.reported = 2
    assert counts.differences() == ["persistent queries received 2 readings of 3"]
    counts.queries.reported = 3
    counts.queries.on_seen("28005002", 40.0)
    assert counts.differences() == ["persistent queries over the graph missed the latest value of 1 stations"]


def test_what_is_missing_at_one_end_is_lost_and_what_comes_again_is_doubled() -> None:
    counts = agreeing()
    counts.on_delivered(Delivery(1, 2, {}))
    assert (counts.doubled, counts.delivered) == (1, 3)
    counts.totals["messages"] = 1
    assert counts.lost == 2


def test_a_pipeline_that_told_nothing_and_a_job_without_readings_do_not_agree() -> None:
    counts = agreeing()
    counts.totals = {}
    assert counts.differences()
    assert Counts().differences() == ["nothing was published"]


@pytest.mark.parametrize(("ends_first", "expected"), [("broker", "U701"), ("work", "")])
def test_the_main_job_ends_with_its_broker(ends_first: str, expected: str) -> None:
    finished: list[str] = []

    async def end() -> int:
        await asyncio.sleep(0 if ends_first == "broker" else 60)
        return 1

    async def work() -> None:
        try:
            await asyncio.sleep(0 if ends_first == "work" else 60)
        finally:
            finished.append("work")

    broker = RunningBroker("", "", "", 0, end)
    if expected:
        with pytest.raises(Unavailable, match=expected):
            asyncio.run(_while_broker_lives(broker, work()))
    else:
        asyncio.run(_while_broker_lives(broker, work()))
    assert finished == ["work"]
