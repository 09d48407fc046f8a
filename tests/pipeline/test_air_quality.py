"""Air quality: each function returns the same as a plain program for the same rows."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from plain_air_quality import Alert, Key, Message, frame, plain_alerts
from pyspark.sql import DataFrame, SparkSession

from tidegate.devices.air_quality_index import BAND_NAMES, BANDS
from tidegate.pipeline import air_quality
from tidegate.pipeline.air_quality import POLLUTANTS, RUN_SCHEMA, WINDOW_SCHEMA, Settings

MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
GOOD: dict[str, Any] = {"station": "28079004", "name": "Plaza", "time": "2026-01-01T00:00:00Z", "NO2": 41.0}

# As the European Environment Agency publishes them, for whole numbers.
PUBLISHED = """
PM2.5  0-5   6-15    16-50    51-90    91-140   141-
PM10   0-15  16-45   46-120   121-195  196-270  271-
NO2    0-10  11-25   26-60    61-100   101-150  151-
O3     0-60  61-100  101-120  121-160  161-180  181-
SO2    0-20  21-40   41-125   126-190  191-275  276-
"""


def message(body: dict[str, Any], *, error: str | None = None) -> Message:
    return Message(body, 0, 0, MIDNIGHT, error)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


def test_a_message_that_cannot_be_read_is_set_aside_with_the_reason_and_its_bytes(spark: SparkSession) -> None:
    cases: list[tuple[Message, str | None]] = [
        (message(GOOD), None),
        (message(GOOD | {"PM2.5": 0.0, "O3": -1.5}), None),
        (message({}, error="Expected `object`, got `str`"), "Expected `object`, got `str`"),
        (message(without("station")), "it has no station"),
        (message(GOOD | {"station": ""}), "it has no station"),
        (message(without("time")), "it has no time"),
        (message(without("NO2")), "it has no pollutant"),
        (message(GOOD | {"PM2.5": math.nan}), "its PM2.5 is no number"),
        (message(GOOD | {"O3": math.inf}), "its O3 is no number"),
        (message(GOOD | {"O3": -math.inf}), "its O3 is no number"),
        (message(GOOD | {"time": "2026-01-01T01:00:00Z"}), None),
        (message(GOOD | {"time": "2026-01-01T01:00:00.000001Z"}), "its time is over 3600 s ahead of its arrival"),
        (message(GOOD | {"time": "1969-12-31T23:59:59Z"}), None),
    ]
    numbered = [each._replace(sequence=number) for number, (each, _reason) in enumerate(cases)]

    parsed = air_quality.parse(frame(spark, numbered), Settings()).persist()

    found = {row["sequence"]: row for row in air_quality.set_aside(parsed).collect()}
    assert {number: row["reason"] for number, row in found.items()} == {
        number: reason for number, (_message, reason) in enumerate(cases) if reason is not None
    }
    assert {bytes(row["body"]) for row in found.values()} == {b"as it came"}
    values = {(row["sequence"], row["pollutant"], row["value"]) for row in air_quality.readings(parsed).collect()}
    assert values == {(0, "NO2", 41.0), (1, "NO2", 41.0), (1, "PM2.5", 0.0), (1, "O3", -1.5)} | {
        (number, "NO2", 41.0) for number in (10, 12)
    }
    parsed.unpersist()


def test_times_may_be_made_up_when_that_is_said(spark: SparkSession) -> None:
    ahead = frame(spark, [message(GOOD | {"time": "2099-01-01T00:00:00Z"})])

    assert air_quality.parse(ahead, Settings(ahead_s=None)).where("reason is null").count() == 1


def test_the_index_has_the_published_bands_with_their_ends(spark: SparkSession) -> None:
    cases = []
    for line in PUBLISHED.strip().splitlines():
        pollutant, *ranges = line.split()
        for level, (low, high) in enumerate((each.split("-") for each in ranges), start=1):
            cases.append((pollutant, float(low), level))
            if high:
                cases.append((pollutant, float(high), level))
                cases.append((pollutant, math.nextafter(float(high), math.inf), level + 1))
    stations = [
        (str(number), pollutant, mean) for number, (pollutant, mean, _level) in enumerate(cases)
    ]  # one station per case

    found = {row["station"]: (row["index"], row["band"], row["pollutant"]) for row in index_of(spark, stations)}

    assert found == {
        str(number): (level, BAND_NAMES[level - 1], pollutant) for number, (pollutant, _mean, level) in enumerate(cases)
    }
    assert {pollutant for pollutant, _mean, _level in cases} == BANDS.keys()


def test_the_index_of_a_station_is_that_of_its_worst_pollutant(spark: SparkSession) -> None:
    found = index_of(
        spark,
        [
            *(("a", pollutant, 1.0) for pollutant in POLLUTANTS if pollutant != "O3"),
            ("a", "O3", 130.0),
            ("b", "PM10", 46.0),
            ("b", "NO2", 59.0),
            ("c", "CO", 900.0),
        ],
    )

    # b: both are moderate; c: no index is defined for its pollutant.
    assert {row["station"]: (row["index"], row["pollutant"]) for row in found} == {"a": (4, "O3"), "b": (3, "NO2")}


def index_of(spark: SparkSession, means: list[tuple[str, str, float]]) -> list[Any]:
    rows = [(station, None, pollutant, MIDNIGHT, MIDNIGHT + HOUR, mean, mean, 1) for station, pollutant, mean in means]
    return air_quality.index(spark.createDataFrame(rows, WINDOW_SCHEMA)).collect()


@pytest.mark.parametrize("seed", [1, 2])
def test_alerts_do_not_depend_on_when_windows_are_closed(spark: SparkSession, seed: int) -> None:
    """Windows of some stations and pollutants, with gaps, are closed in batches of random width. Together the batches
    give the same alerts as one pass over all windows."""
    random = Random(seed)
    settings = Settings(thresholds={"NO2": 180.0, "O3": 120.0}, windows=random.choice([2, 3]))
    means: dict[Key, float] = {
        (station, pollutant, MIDNIGHT + hour * HOUR): level
        for station in ("a", "b", "c")
        for pollutant in ("NO2", "O3", "CO")
        for hour in range(60)
        if random.random() < 0.9 and (level := random.choice([100.0, 180.0, 180.5, 200.0 + hour, 250.0]))
    }
    runs = spark.createDataFrame([], RUN_SCHEMA)
    found: list[Alert] = []
    hours = [0, *sorted(random.sample(range(1, 60), 3)), 60]

    for begin, end in pairwise(hours):
        watermark = MIDNIGHT + end * HOUR
        closed = windows_frame(spark, {k: v for k, v in means.items() if begin <= (k[2] - MIDNIGHT) / HOUR < end})
        exceeding = air_quality.exceedances(closed, runs, settings).persist()
        watermark_us = int(watermark.timestamp()) * 1_000_000
        found += [as_alert(row) for row in air_quality.alerts(exceeding, watermark_us, settings).collect()]
        # From here on they are rows, as if read from a file.
        runs = spark.createDataFrame(air_quality.open_runs(exceeding, watermark_us, settings).collect(), RUN_SCHEMA)
        exceeding.unpersist()

    expected = list(plain_alerts(means, MIDNIGHT + 60 * HOUR, settings))
    assert sorted(found) == sorted(expected), f"{hours} {settings}"
    assert {alert.state for alert in expected} == {"begins", "ends"}


def windows_frame(spark: SparkSession, means: dict[Key, float]) -> DataFrame:
    rows = [
        (station, f"name of {station}", pollutant, start, start + HOUR, mean, mean, 1)
        for (station, pollutant, start), mean in means.items()
    ]
    return spark.createDataFrame(rows, WINDOW_SCHEMA)


def as_alert(row: Any) -> Alert:
    assert row["name"] == f"name of {row['station']}"
    since, until = (row[name].astimezone(UTC) for name in ("since", "until"))
    return Alert(row["alert"], row["state"], row["station"], since, until, row["windows"], row["peak"])


def test_a_run_ends_with_a_station_that_falls_silent(spark: SparkSession) -> None:
    means: dict[Key, float] = {("a", "NO2", MIDNIGHT + hour * HOUR): 200.0 + hour for hour in range(4)}
    nothing = spark.createDataFrame([], WINDOW_SCHEMA)
    settings = Settings()
    last_us = int((MIDNIGHT + 4 * HOUR).timestamp()) * 1_000_000
    first = air_quality.exceedances(windows_frame(spark, means), spark.createDataFrame([], RUN_SCHEMA), settings)
    runs = air_quality.open_runs(first, last_us, settings)
    assert [row["windows"] for row in runs.collect()] == [4]

    silent = air_quality.exceedances(nothing, runs, settings)

    just_before = air_quality.alerts(silent, last_us + 3_600_000_000 - 1, settings)
    assert just_before.count() == 0
    [ended] = air_quality.alerts(silent, last_us + 3_600_000_000, settings).collect()
    assert as_alert(ended) == Alert("NO2", "ends", "a", MIDNIGHT, MIDNIGHT + 4 * HOUR, 4, 203.0)
    assert air_quality.open_runs(silent, last_us + 3_600_000_000, settings).count() == 0
