"""The job `match`: matches a Parquet table of subscriptions against a table of notifications, or a queue of the broker.

    tables:  OUT/part-….parquet
    queue:   OUT/batch=0/part-….parquet …       one directory per micro-batch; the checkpoint records progress

A micro-batch that Spark repeats after a crash overwrites its own directory, so every message is in the result once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from tidegate.errors import ConfigError
from tidegate.pipeline.index_files import IndexFiles
from tidegate.pipeline.matching import ERROR, SUBSCRIBERS, match, match_stream
from tidegate.pipeline.progress import follow, spark_failures_as_errors

QUEUE_KEYS: Final = ("_queue", "_sequence")
QUEUE_BODY: Final = "_body"
TRIGGER: Final = "500 milliseconds"


class Summary(msgspec.Struct):
    """`matches` counts pairs of a notification and a subscription; `refused` counts invalid notifications."""

    notifications: int = 0
    matches: int = 0
    unmatched: int = 0
    refused: int = 0
    seconds: float = 0.0

    def add(self, counted: dict[str, Any]) -> None:
        self.notifications += counted["notifications"]
        self.matches += counted["matches"] or 0
        self.unmatched += counted["unmatched"]
        self.refused += counted["refused"]


def read_table(spark: SparkSession, path: str) -> DataFrame:
    try:
        return spark.read.parquet(path)
    except AnalysisException as error:
        raise ConfigError("C433", f"{path!r} cannot be read: {error.getCondition()}", "name a Parquet table") from error


def match_table(
    notifications: DataFrame, index: IndexFiles, out: str, *, keys: Sequence[str], is_counted: bool
) -> Summary:
    cores = notifications.sparkSession.sparkContext.defaultParallelism
    # A small table is often a single file, which a single task would read and match on one core.
    if notifications.rdd.getNumPartitions() < cores:
        notifications = notifications.repartition(cores)
    summary, began_s = Summary(), time.monotonic()
    with spark_failures_as_errors():
        _write(match(notifications, index, keys=keys, is_counted=is_counted), out, summary)
    summary.seconds = time.monotonic() - began_s
    return summary


def match_queue(
    messages: DataFrame, index: IndexFiles, out: str, checkpoint: str, *, is_counted: bool, is_once: bool
) -> Summary:
    """Matches the messages of a queue until Ctrl-C, or with `is_once` only those in the queue now."""
    summary, began_s = Summary(), time.monotonic()

    def handle(matched: DataFrame, number: int) -> None:
        _write(matched, f"{out}/batch={number}", summary)

    writer = match_stream(messages, index, handle, keys=QUEUE_KEYS, body=QUEUE_BODY, is_counted=is_counted)
    writer = writer.queryName("match").option("checkpointLocation", checkpoint)
    trigger = {"availableNow": True} if is_once else {"processingTime": TRIGGER}
    with suppress(KeyboardInterrupt):
        follow([writer.trigger(**trigger).start()])
    summary.seconds = time.monotonic() - began_s
    return summary


def _write(matched: DataFrame, out: str, summary: Summary) -> None:
    """Writes the result and counts it in the same pass, so that Spark computes it once."""
    is_counted = matched.schema[SUBSCRIBERS].dataType.typeName() == "long"
    size = F.col(SUBSCRIBERS) if is_counted else F.size(SUBSCRIBERS)
    is_good = F.col(ERROR).isNull()
    observed = Observation()
    matched.observe(
        observed,
        F.count("*").alias("notifications"),
        F.sum(F.when(is_good, size)).alias("matches"),
        F.count_if(is_good & (size == 0)).alias("unmatched"),
        F.count_if(~is_good).alias("refused"),
    ).write.mode("overwrite").parquet(out)
    summary.add(observed.get)
