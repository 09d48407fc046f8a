"""The air-quality job: reads a queue, writes a history of Parquet tables, and publishes alerts to the broker.

    query "readings":  queue ─► for each batch: readings, late, set_aside, windows, index, alerts ─► history
    query "alerts":    history's alerts ─► broker

Why two queries: a query has one source and one sink, and only one query may read a queue, since it deletes the messages
it has read. The first query does all the work in `foreachBatch`, where one batch can go to several tables. It is
exactly-once in effect because of `history`: a batch depends only on its rows and on the state before it, and its parts
appear once. The second query reads the alert files, which appear once, and the sink publishes each batch once.

Why the job keeps its own state instead of using Spark's stateful operators: those drop late and duplicate rows and
count them only in passing, so a crash makes the counts wrong. Here every message and reading is in a table or in a
count that is saved together with the batch. The cost: the readings of open windows are written again with each batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tidegate.pipeline import air_quality
from tidegate.pipeline.air_quality import Settings
from tidegate.pipeline.history import History, count_rows
from tidegate.pipeline.options import parse_sink_options
from tidegate.pipeline.progress import follow, spark_failures_as_errors
from tidegate.pipeline.progress_publisher import ProgressPublisher

PIPELINE: Final = "air-quality"
# Names of the queries and of their checkpoint directories.
READINGS: Final = "readings"
ALERTS: Final = "alerts"
_US_PER_S: Final = 1_000_000


@dataclass(frozen=True)
class Job:
    """Where the job reads, writes and publishes. Without `publishes`, alerts are in the history only, and the job does
    not publish its progress."""

    queue: str
    broker: dict[str, str]
    out: Path
    settings: Settings
    batch_messages: int
    every: str
    publishes: bool


class Totals(msgspec.Struct, frozen=True):
    """Counts since the history began. Every message is set aside or has readings; each value of the latter is counted
    under readings, duplicates or late."""

    messages: int = 0
    set_aside: int = 0
    readings: int = 0
    duplicates: int = 0
    late: int = 0
    windows: int = 0
    alerts: int = 0

    def __add__(self, other: Totals) -> Totals:
        mine, its = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Totals(*(one + another for one, another in zip(mine, its, strict=True)))


class State(msgspec.Struct, frozen=True):
    """What a batch passes on to the next, besides the tables of open readings and open runs."""

    watermark_us: int | None = None
    totals: Totals = Totals()


def run(spark: SparkSession, job: Job, *, once: bool) -> None:
    """Runs the job until Ctrl-C, or with `once` until it has processed what is in the queue now."""
    history = History(job.out)
    on_progress = ProgressPublisher(PIPELINE, parse_sink_options(job.broker).broker).publish if job.publishes else None
    with history.open(job.settings, READINGS):
        if once:
            # One after the other: the second query ends as soon as it has read the alerts that exist when it starts.
            follow([start_readings(spark, job, history, once=True)], on_progress=on_progress)
            follow([start_alerts(spark, job, history, once=True)], on_progress=on_progress)
        else:
            follow(
                [start(spark, job, history, once=False) for start in (start_readings, start_alerts)],
                on_progress=on_progress,
            )


def read_totals(out: Path) -> Totals:
    """Returns the totals of a history as of its last finished batch."""
    history = History(out)
    batch = history.last_batch()
    return history.state(batch, State).totals if batch >= 0 else Totals()


def start_readings(spark: SparkSession, job: Job, history: History, *, once: bool) -> StreamingQuery:
    messages = (
        spark.readStream.format("tidegate")
        .options(**job.broker, queue=job.queue, schema=air_quality.BODY_SCHEMA, maxRowsPerTrigger=job.batch_messages)
        .load()
    )
    writer = messages.writeStream.foreachBatch(Batches(history, job.settings).on_batch)
    return _start(writer, job, history, READINGS, once=once)


def start_alerts(spark: SparkSession, job: Job, history: History, *, once: bool) -> StreamingQuery:
    """Starts the query that publishes alerts.

    Without `publishes` the query discards the alerts but still advances its checkpoint. So a history that was filled
    from old readings never publishes alerts about them when the job continues with new readings."""
    alerts = (
        spark.readStream.schema(air_quality.ALERT_SCHEMA)
        # Spark ignores files older than this; a restarted job must still read old ones.
        .option("maxFileAge", "36500d")
        # Without this Spark infers columns from directory names, which do not exist before the first file.
        .option("recursiveFileLookup", "true")
        .parquet(history.table("alerts"))
    )
    writer = alerts.writeStream
    writer = writer.format("tidegate").options(**job.broker) if job.publishes else writer.format("noop")
    return _start(writer, job, history, ALERTS, once=once)


def _start(writer: DataStreamWriter, job: Job, history: History, name: str, *, once: bool) -> StreamingQuery:
    writer = writer.queryName(name).option("checkpointLocation", history.checkpoint(name))
    return writer.trigger(availableNow=True).start() if once else writer.trigger(processingTime=job.every).start()


class Batches:
    """Processes each batch of messages. Runs on the driver."""

    def __init__(self, history: History, settings: Settings) -> None:
        self._history = history
        self._settings = settings

    def on_batch(self, messages: DataFrame, batch: int) -> None:
        # After a crash Spark may repeat a batch whose state was already saved.
        if self._history.has_state(batch):
            return
        before = self._history.state(batch - 1, State) if batch > 0 else State()
        open_before = self._history.state_table(messages.sparkSession, batch - 1, "open", air_quality.READING_SCHEMA)
        parsed = air_quality.parse(messages, self._settings).persist()
        arrived = air_quality.readings(parsed)
        judged = air_quality.judge(arrived, open_before, before.watermark_us, self._settings).persist()
        try:
            with spark_failures_as_errors():
                self._keep(parsed, judged, before, batch)
        finally:
            judged.unpersist()
            parsed.unpersist()

    def _keep(self, parsed: DataFrame, judged: DataFrame, before: State, batch: int) -> None:
        counts, latest_us = _count(parsed, judged)
        if counts.set_aside:
            self._append(air_quality.set_aside(parsed), "set_aside", "enqueued_at", batch)
        if counts.readings:
            self._append(judged.where("verdict = 'new'").drop("verdict"), "readings", "time", batch)
        if counts.late:
            self._append(judged.where("verdict = 'late'").drop("verdict"), "late", "time", batch)
        watermark_us = _advance(before.watermark_us, latest_us, self._settings)
        open_now = judged.where("verdict in ('open', 'new')").drop("verdict")
        runs = self._history.state_table(judged.sparkSession, batch - 1, "runs", air_quality.RUN_SCHEMA)
        if watermark_us is not None and _closes_windows(before.watermark_us, watermark_us, self._settings):
            is_closed = air_quality.is_closed(air_quality.window_end(F.col("time"), self._settings), watermark_us)
            runs, closed = self._close(open_now.where(is_closed), runs, watermark_us, batch)
            open_now, counts = open_now.where(~is_closed), counts + closed
        self._history.save_state(batch, State(watermark_us, before.totals + counts), open=open_now, runs=runs)

    def _close(
        self, open_readings: DataFrame, runs: DataFrame, watermark_us: int, batch: int
    ) -> tuple[DataFrame, Totals]:
        """Writes the closed windows, their index and their alerts. Returns the runs still open, and the counts."""
        settings = self._settings
        window_parts = self._append(air_quality.windows(open_readings, settings), "windows", "start", batch)
        # Read the windows back from the files: the last bit of a mean depends on the order of its rows, which may
        # differ when a batch is repeated.
        closed = self._history.read(runs.sparkSession, window_parts, air_quality.WINDOW_SCHEMA)
        self._append(air_quality.index(closed), "index", "start", batch)
        exceeding = air_quality.exceedances(closed, runs, settings)
        alert_parts = self._append(air_quality.alerts(exceeding, watermark_us, settings), "alerts", "until", batch)
        counts = Totals(windows=count_rows(window_parts), alerts=count_rows(alert_parts))
        return air_quality.open_runs(exceeding, watermark_us, settings), counts

    def _append(self, rows: DataFrame, table: str, time: str, batch: int) -> list[str]:
        return self._history.append(rows.withColumn("day", F.to_date(time)), table, batch)


def _count(parsed: DataFrame, judged: DataFrame) -> tuple[Totals, int | None]:
    """Returns the counts of a batch, and the latest time among its readings and the open ones."""
    messages, set_aside = parsed.agg(F.count("*"), F.count("reason")).collect()[0]
    verdicts = judged.groupBy("verdict").agg(F.count("*"), F.max(F.unix_micros("time"))).collect()
    rows = {verdict: count for verdict, count, _latest_us in verdicts}
    counts = Totals(
        messages=messages,
        set_aside=set_aside,
        readings=rows.get("new", 0),
        duplicates=rows.get("duplicate", 0),
        late=rows.get("late", 0),
    )
    return counts, max((latest_us for _verdict, _count, latest_us in verdicts), default=None)


def _advance(watermark_us: int | None, latest_us: int | None, settings: Settings) -> int | None:
    """Returns the new watermark, which is never earlier than the old one."""
    reached = [] if latest_us is None else [latest_us - settings.watermark_s * _US_PER_S]
    return max(reached + ([] if watermark_us is None else [watermark_us]), default=None)


def _closes_windows(before_us: int | None, after_us: int, settings: Settings) -> bool:
    """Returns whether the watermark passes the end of a window between these two times."""
    width_us = settings.window_s * _US_PER_S
    return before_us is None or before_us // width_us < after_us // width_us
