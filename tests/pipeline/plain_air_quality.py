"""The oracle of the air-quality pipeline: the same in plain Python, message by message; and rows as the source makes
them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import pyarrow.parquet
import pytest
from pyspark.sql import DataFrame, SparkSession

from tidegate.devices.air_quality_index import BANDS
from tidegate.pipeline.air_quality import BODY_SCHEMA, POLLUTANTS, Settings
from tidegate.pipeline.air_quality_job import Totals, read_totals

SCHEMA = (
    f"{BODY_SCHEMA}, _queue int, _sequence long, _enqueued_at timestamp, _device string, _body binary, _error string"
)

Key = tuple[str, str, datetime]


class Message(NamedTuple):
    """A body that could be read, or the reason why it could not."""

    body: Mapping[str, Any] | None
    queue: int
    sequence: int
    enqueued_at: datetime
    error: str | None = None


class Alert(NamedTuple):
    alert: str
    state: str
    station: str
    since: datetime
    until: datetime
    windows: int
    peak: float


def frame(spark: SparkSession, messages: Iterable[Message]) -> DataFrame:
    return spark.createDataFrame([_row(message) for message in messages], SCHEMA)


def _row(message: Message) -> tuple[Any, ...]:
    body = message.body or {}
    time = datetime.fromisoformat(body["time"]) if "time" in body else None
    return (
        body.get("station"),
        body.get("name"),
        time,
        *(body.get(pollutant) for pollutant in POLLUTANTS),
        message.queue,
        message.sequence,
        message.enqueued_at,
        "device",
        b"as it came",
        message.error,
    )


@dataclass
class PlainAirQuality:
    """Computes the expected tables from batches."""

    settings: Settings
    watermark: datetime | None = None
    messages: int = 0
    set_aside: list[Message] = field(default_factory=list)
    readings: dict[Key, float] = field(default_factory=dict)
    duplicates: int = 0
    late: list[tuple[Key, float]] = field(default_factory=list)
    latest: datetime | None = None

    def feed(self, batch: Sequence[Message]) -> None:
        self.messages += len(batch)
        for message in sorted(batch, key=lambda each: (each.queue, each.sequence)):
            if self._is_bad(message):
                self.set_aside.append(message)
            else:
                self._read(message.body or {})
        if self.latest is not None:
            self.watermark = self.latest - timedelta(seconds=self.settings.watermark_s)

    def _is_bad(self, message: Message) -> bool:
        body = message.body or {}
        if message.error is not None:
            return True
        values = [body[pollutant] for pollutant in POLLUTANTS if pollutant in body]
        if not body.get("station") or "time" not in body or not values or not all(map(math.isfinite, values)):
            return True
        ahead_s = (datetime.fromisoformat(body["time"]) - message.enqueued_at).total_seconds()
        return self.settings.ahead_s is not None and ahead_s > self.settings.ahead_s

    def _read(self, body: Mapping[str, Any]) -> None:
        time = datetime.fromisoformat(body["time"])
        self.latest = time if self.latest is None else max(time, self.latest)
        for pollutant in POLLUTANTS:
            if pollutant in body:
                key = (body["station"], pollutant, time)
                if self.watermark is not None and self._end(time) <= self.watermark:
                    self.late.append((key, body[pollutant]))
                elif key in self.readings:
                    self.duplicates += 1
                else:
                    self.readings[key] = body[pollutant]

    def _end(self, time: datetime) -> datetime:
        width_s = self.settings.window_s
        return datetime.fromtimestamp((time.timestamp() // width_s + 1) * width_s, UTC)

    def windows(self) -> dict[Key, tuple[float, float, int]]:
        """Returns the mean, maximum and count of the closed windows, by station, pollutant and start."""
        values: dict[Key, list[float]] = defaultdict(list)
        for (station, pollutant, time), value in self.readings.items():
            end = self._end(time)
            if self.watermark is not None and end <= self.watermark:
                values[station, pollutant, end - timedelta(seconds=self.settings.window_s)].append(value)
        return {key: (fmean(each), max(each), len(each)) for key, each in values.items()}

    def alerts(self) -> list[Alert]:
        assert self.watermark is not None
        means = {key: mean for key, (mean, _maximum, _count) in self.windows().items()}
        return sorted(plain_alerts(means, self.watermark, self.settings))


def plain_alerts(means: Mapping[Key, float], watermark: datetime, settings: Settings) -> Iterator[Alert]:
    """Yields the alerts of the windows of each station and pollutant, in order of time."""
    width = timedelta(seconds=settings.window_s)
    for (station, pollutant, start), mean in means.items():
        threshold = settings.thresholds.get(pollutant, math.inf)
        if mean <= threshold or means.get((station, pollutant, start - width), -math.inf) > threshold:
            continue
        peaks: list[float] = []
        while (peak := means.get((station, pollutant, start + len(peaks) * width), -math.inf)) > threshold:
            peaks.append(peak)
        if len(peaks) >= settings.windows:
            first = peaks[: settings.windows]
            yield Alert(pollutant, "begins", station, start, start + len(first) * width, len(first), max(first))
            until = start + len(peaks) * width
            if until + width <= watermark:
                yield Alert(pollutant, "ends", station, start, until, len(peaks), max(peaks))


def disorder(random: Random, notifications: Sequence[Mapping[str, Any]], within: timedelta) -> list[Mapping[str, Any]]:
    """Returns the notifications in random order, each at most `within` later than it should be."""
    delays = [within * random.random() for _ in notifications]
    order = sorted(
        range(len(notifications)), key=lambda i: datetime.fromisoformat(notifications[i]["time"]) + delays[i]
    )
    return [notifications[i] for i in order]


def rows_of(out: Path, table: str) -> list[dict[str, Any]]:
    """Returns the rows of a table, read as by any other program."""
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(out / table).to_pylist()
    return rows


def check(out: Path, expected: PlainAirQuality) -> None:
    """Checks that all tables have exactly the expected rows, once."""
    kept = Counter((row["station"], row["pollutant"], row["time"], row["value"]) for row in rows_of(out, "readings"))
    assert kept == Counter((*key, value) for key, value in expected.readings.items())
    late = Counter((row["station"], row["pollutant"], row["time"], row["value"]) for row in rows_of(out, "late"))
    assert late == Counter((*key, value) for key, value in expected.late)
    windows = expected.windows()
    found = rows_of(out, "windows")
    assert len(found) == len(windows)
    for row in found:
        mean, maximum, count = windows[row["station"], row["pollutant"], row["start"]]
        assert (row["mean"], row["maximum"], row["count"]) == (pytest.approx(mean), maximum, count)
    indexed = {(station, start) for station, pollutant, start in windows if pollutant in BANDS}
    assert Counter((row["station"], row["start"]) for row in rows_of(out, "index")) == Counter(indexed)
    assert sorted(map(_as_alert, rows_of(out, "alerts"))) == [_as_alert(each._asdict()) for each in expected.alerts()]
    assert read_totals(out) == Totals(
        messages=expected.messages,
        set_aside=len(expected.set_aside),
        readings=len(expected.readings),
        duplicates=expected.duplicates,
        late=len(expected.late),
        windows=len(windows),
        alerts=len(expected.alerts()),
    )


def _as_alert(row: Mapping[str, Any]) -> Alert:
    return Alert(**{name: row[name] for name in Alert._fields})._replace(peak=round(row["peak"], 6))
