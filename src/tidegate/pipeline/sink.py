"""Sink: writes the rows of a DataFrame into a logical queue, or publishes them as notifications.

    stream.writeStream.format("tidegate").option("queue", "alerts").option("checkpointLocation", …).start()

    rows of a partition ─► encoded ─► sorted ─► cut and numbered ─► the broker, which keeps each number once

Writes are exactly-once in effect. Spark repeats a failed task, and after a crash the whole last micro-batch. A
repetition has the same query id, batch id and partitions, but maybe another order of rows within a partition. So rows
are sorted by their bytes and numbered by batch id and place. A row that was sent before gets the same number again, and
the broker discards it as a duplicate.

`write` returns when its rows are durable. So a commit has nothing left to do. An abort must not undo anything, because
the repetition expects to find the rows. Consumers may therefore see rows of a batch before Spark commits it, each once.

What may go wrong: the broker is unavailable or its queue is full (retried for retryTimeoutS, then an error); a batch is
repeated with other rows, because the query was changed or is not deterministic, or with other partitions.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tidegate.client import Connection
from tidegate.client.refusals import until_accepted
from tidegate.errors import ConfigError
from tidegate.pipeline.broker_link import ask, run, within
from tidegate.pipeline.options import SinkOptions
from tidegate.pipeline.python_worker import freeze_loaded_objects
from tidegate.pipeline.rows import MessageRows, NotificationRows, Rows

# How a partition is cut into numbered batches. Every broker accepts frames of this size, so the cut does not depend on
# the broker. Do not change these values: the rows of an unfinished micro-batch would get other numbers.
PART_BYTES: Final = 256 * 1024
PART_MESSAGES: Final = 10_000
# A number is the number of the micro-batch, then this many bits for the place of the part or row in its partition.
PLACE_BITS: Final = 20
# Rows that are published in one step. The time limit of a step is retryTimeoutS.
STEP_ROWS: Final = 10_000


@dataclass
class Written(WriterCommitMessage):
    """The result of a task: how many rows it wrote, and how many of them the broker already had."""

    rows: int
    repeated: int


@dataclass(frozen=True)
class Key:
    """Identifies the rows of a task: equal whenever Spark repeats the task, and different for every other task."""

    writer: str
    batch: int
    partition: int

    @property
    def producer(self) -> str:
        return f"spark-{self.writer}-{self.partition}"

    def number(self, place: int) -> int:
        """Returns the number of a place, from 1. `place` counts from 0 in the partition."""
        assert place < 1 << PLACE_BITS, place
        return (self.batch << PLACE_BITS | place) + 1


class RowWriter(DataSourceArrowWriter):
    """Implements `df.write`. The driver gives each write a unique name, so that the broker recognises what a repeated
    task sends again."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        _check(options, schema, overwrite)
        self._options = options
        self._schema = schema
        self._name = secrets.token_hex(16)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return write_rows(self._options, self._schema, Key(self._name, 0, _context().partitionId()), iterator)


class RowStreamWriter(DataSourceStreamArrowWriter):
    """Implements `stream.writeStream`. Rows are named by the query's id, which the checkpoint keeps."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        _check(options, schema, overwrite)
        self._options = options
        self._schema = schema

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = _context()
        query, batch = (context.getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        assert query is not None
        assert batch is not None
        return write_rows(self._options, self._schema, Key(query, int(batch), context.partitionId()), iterator)


def write_rows(options: SinkOptions, schema: StructType, key: Key, batches: Iterator[pa.RecordBatch]) -> Written:
    """Sends the rows of one partition. Runs on an executor, and holds all rows of the partition in memory to sort
    them."""
    rows = _rows(options, schema)
    encoded: list[bytes] = []
    for batch in batches:
        encoded += rows.encode(batch, len(encoded))
    encoded.sort()
    if not encoded:
        return Written(0, 0)
    repeated = _enqueue(options, key, encoded) if options.queue else _publish(options, key, encoded)
    freeze_loaded_objects()
    return Written(len(encoded), repeated)


def _enqueue(options: SinkOptions, key: Key, messages: list[bytes]) -> int:
    """Sends one part after another. Parts must not overtake each other: the queue ignores a number that is not above
    the last one it kept of this producer."""
    return sum(_put(options, part, key.producer, key.number(place)) for place, part in enumerate(_cut(messages)))


def _cut(messages: list[bytes]) -> Iterator[list[bytes]]:
    part: list[bytes] = []
    size = 0
    for message in messages:
        if part and (size + len(message) > PART_BYTES or len(part) == PART_MESSAGES):
            yield part
            part, size = [], 0
        part.append(message)
        size += len(message)
    yield part


def _put(options: SinkOptions, part: list[bytes], producer: str, number: int) -> int:
    """Sends one part and returns how many messages the queue already had. Retries with growing pauses while the queue
    is full."""
    messages = [msgspec.Raw(message) for message in part]

    async def put(broker: Connection) -> int:
        enqueued = await broker.queue(options.queue).put_batch(messages, producer=producer, number=number)
        return enqueued.duplicates

    return until_accepted(lambda: ask(options.broker, put), options.broker.retry_timeout_s)


def _publish(options: SinkOptions, key: Key, notifications: list[bytes]) -> int:
    if len(notifications) > 1 << PLACE_BITS:
        raise ConfigError(
            "C424",
            f"partition {key.partition} has {len(notifications)} rows to publish in one batch",
            f"publish at most {1 << PLACE_BITS}: repartition, or read fewer with maxRowsPerTrigger",
        )

    async def publish(broker: Connection) -> int:
        publisher = broker.numbered_publisher(key.producer)
        await within(options.broker, publisher.__aenter__())
        try:
            fresh = 0
            for place in range(0, len(notifications), STEP_ROWS):
                step = publisher.publish(key.number(place), notifications[place : place + STEP_ROWS])
                fresh += await within(options.broker, step)
            return len(notifications) - fresh
        finally:
            publisher.close()

    return run(options.broker, publish)


def _check(options: SinkOptions, schema: StructType, overwrite: bool) -> None:
    if overwrite:
        raise ConfigError(
            "C423",
            "messages that were sent cannot be overwritten",
            'write with mode("append"), stream with outputMode("append") or outputMode("update")',
        )
    _rows(options, schema)


def _rows(options: SinkOptions, schema: StructType) -> Rows:
    return MessageRows(schema) if options.queue else NotificationRows(schema)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None
    return context
