"""The air-quality job: its tables are those of a plain program for the same messages, however often it dies."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from plain_air_quality import Message, PlainAirQuality, check, disorder, frame, rows_of
from pyspark.sql import SparkSession
from pyspark.sql.functions import lit, raise_error

from tidegate.devices import STATIONS, readings
from tidegate.errors import Unavailable
from tidegate.pipeline.air_quality import ALERT_SCHEMA, Settings
from tidegate.pipeline.air_quality_job import Batches, Job, start_alerts
from tidegate.pipeline.history import History

START = datetime(2026, 1, 1, tzinfo=UTC)
TABLES = ("set_aside", "readings", "late", "windows", "index", "alerts")
SETTINGS = Settings(thresholds={"NO2": 120.0, "O3": 60.0})


def batches_of_messages(seed: int, count: int) -> list[list[Message]]:
    """Returns two days of four stations, out of order within the watermark. Some are duplicate, bad or far too late."""
    random = Random(seed)
    notifications: list[Mapping[str, Any]] = list(
        islice(readings(seed, START, timedelta(minutes=20), STATIONS[:4]), 4 * 3 * 48)
    )
    sent = disorder(random, notifications, timedelta(minutes=90))
    for place in range(len(sent) - 1, 0, -25):
        sent.insert(place, random.choice(sent[max(0, place - 10) : place]))
        sent.insert(place, {**sent[place], "PM10": float("nan")})
    for place in range(len(sent) // 2, len(sent), 30):
        sent.insert(place, random.choice(sent[: place // 4]))
    messages = [Message(body, number % 4, number, START + timedelta(days=3)) for number, body in enumerate(sent)]
    cuts = [0, *sorted(random.sample(range(1, len(messages)), count - 1)), len(messages)]
    return [messages[begin:end] for begin, end in pairwise(cuts)]


@pytest.mark.crash
@pytest.mark.timeout(600)
def test_batches_that_are_done_again_leave_each_row_once(spark: SparkSession, tmp_path: Path) -> None:
    """A driver that dies leaves the complete parts of its batch behind. Whatever these are, the batch is repeated with
    the same rows in another order, and the tables are as if nothing had happened."""
    expected, random = PlainAirQuality(SETTINGS), Random(5)
    history = History(tmp_path / "out")
    with history.open(SETTINGS, "readings"):
        doing = Batches(history, SETTINGS)
        for batch, messages in enumerate(batches_of_messages(5, 3)):
            expected.feed(messages)
            doing.on_batch(frame(spark, messages), batch)
            lose_from(tmp_path / "out", batch, first=random.choice(TABLES))
            shuffled = random.sample(messages, len(messages))
            doing.on_batch(frame(spark, shuffled), batch)
            # Its state exists, so nothing is done, and the rows are not read.
            doing.on_batch(frame(spark, messages[:1]), batch)

    check(tmp_path / "out", expected)
    places = Counter((row["queue"], row["sequence"]) for row in rows_of(tmp_path / "out", "set_aside"))
    assert places == Counter((each.queue, each.sequence) for each in expected.set_aside)
    assert expected.late
    assert expected.duplicates
    assert expected.set_aside
    assert expected.alerts()


def lose_from(out: Path, batch: int, first: str) -> None:
    """Removes what a driver would not have written if it had died before this table."""
    shutil.rmtree(out / "state" / f"batch={batch}")
    for table in TABLES[TABLES.index(first) :]:
        for part in (out / table).glob(f"day=*/batch={batch}"):
            shutil.rmtree(part)


def test_a_batch_that_fails_says_why_in_short(spark: SparkSession, tmp_path: Path) -> None:
    """Spark fails without a message on a long error from Python."""
    history = History(tmp_path / "out")
    failing = raise_error(lit("no such disk")).cast("string")
    messages = frame(spark, batches_of_messages(5, 1)[0]).withColumn("station", failing)

    with (
        history.open(SETTINGS, "readings"),
        pytest.raises(Unavailable, match="no such disk") as caught,
    ):
        Batches(history, SETTINGS).on_batch(messages, 0)
    assert caught.value.code == "U711"
    assert caught.value.__suppress_context__
    assert len(str(caught.value)) < 1_000
    assert not history.has_state(0)


def test_alerts_are_read_as_they_come_also_when_there_were_none(spark: SparkSession, tmp_path: Path) -> None:
    history = History(tmp_path / "out")
    job = Job("air", {}, tmp_path / "out", SETTINGS, batch_messages=1, every="1 second", publishes=False)
    since, until = START, START + timedelta(hours=3)
    row = ("NO2", "begins", "28079004", "Plaza", since, until, 3, 212.0, 180.0, since.date())
    with history.open(SETTINGS, "readings"):
        query = start_alerts(spark, job, history, once=False)
        try:
            query.processAllAvailable()
            for batch in range(2):
                history.append(spark.createDataFrame([row], f"{ALERT_SCHEMA}, day date"), "alerts", batch)
                query.processAllAvailable()
            rows = sum(progress.numInputRows for progress in query.recentProgress)
        finally:
            query.stop()

    assert rows == 2
