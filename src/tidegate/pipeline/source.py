"""Source: reads a logical queue as a Spark table or stream. Each physical queue is a partition; offsets are sequences.

    spark.readStream.format("tidegate").option("queue", "air").load()

A streaming query reads ranges, which can be read again, and deletes the messages of finished batches:

    latestOffset(start) ─► [Spark logs the offsets] ─► commit(end of the batch before) ─► partitions ─► read ─► sink
         └ deletes below start                            └ deletes below it

Spark calls `commit` for a batch only when the next one has data, so the last batch of an idle or finished query would
never be deleted. Hence `latestOffset` deletes too: its `start` is the end of the last finished batch. After a crash
Spark first asks for exactly the logged range again, and only then for a latest offset.

What may go wrong: the broker is unavailable (retried, then an error); another consumer takes messages of the queue, or
the queue drops them (failOnDataLoss); the checkpoint belongs to another queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from tidegate.client import Connection
from tidegate.errors import QueueError
from tidegate.messages import Level, Levels, Page
from tidegate.pipeline.broker_link import answer, ask, ask_soon
from tidegate.pipeline.columns import Columns, check_schema, full_schema
from tidegate.pipeline.offsets import Offset, allot
from tidegate.pipeline.options import SourceOptions, parse_sink_options, parse_source_options
from tidegate.pipeline.python_worker import freeze_loaded_objects
from tidegate.pipeline.sink import RowStreamWriter, RowWriter


class TidegateSource(DataSource):
    """Implements `format("tidegate")`. Spark creates a new instance for every use, on the driver."""

    @classmethod
    def name(cls) -> str:
        return "tidegate"

    def schema(self) -> str:
        return full_schema(parse_source_options(self.options).schema)

    def reader(self, schema: StructType) -> QueueReader:
        return QueueReader(parse_source_options(self.options), schema)

    def streamReader(self, schema: StructType) -> QueueStreamReader:  # noqa: N802
        return QueueStreamReader(parse_source_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> RowWriter:
        return RowWriter(parse_sink_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> RowStreamWriter:  # noqa: N802
        return RowStreamWriter(parse_sink_options(self.options), schema, overwrite)


@dataclass
class Range(InputPartition):
    """Messages of a physical queue, from `start` to below `stop`."""

    physical: int
    start: int
    stop: int


class QueueReader(DataSourceReader):
    """Reads what is in the queue now, as a table. Deletes nothing."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema

    def partitions(self) -> list[Range]:
        levels = _read_levels(self._options).levels
        return [Range(number, level.first, level.next) for number, level in enumerate(levels)]

    def read(self, partition: Range) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        # Other consumers may delete messages while this reads, so missing ones are not an error.
        return read_range(self._options, self._schema, partition, is_loss_fatal=False)


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives on the driver, in a separate Python process; `read` runs on executors, with a copy."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._target: Offset | None = None
        # The levels seen last, how far this process has deleted the queue, and the deletion in flight.
        self._seen: Levels | None = None
        self._deleted: Offset | None = None
        self._deleting: Future[None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the copy for the executors, which only read."""
        return self.__dict__ | {"_deleting": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        found = _read_levels(self._options)
        return Offset(self._options.queue, found.id, [level.first for level in found.levels]).to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._options.rows_per_trigger
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        found = self._seen = _read_levels(self._options)
        first = self._parse(start, found)
        ends = self._ends(found).sequences
        if self._target is not None:
            ends = [min(end, target) for end, target in zip(ends, self._target.sequences, strict=True)]
        if isinstance(limit, ReadMaxRows):
            ends = allot(first.sequences, ends, limit.max_rows)
        ends = [max(end, begin) for end, begin in zip(ends, first.sequences, strict=True)]
        # Wait for the deletion only if there is nothing more to read, because then this process may end.
        self._delete_below(first, found.levels, waits=ends == first.sequences)
        return Offset(self._options.queue, found.id, ends).to_dict()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._ends(_read_levels(self._options)).to_dict()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._ends(_read_levels(self._options))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Range]:
        found = self._seen or _read_levels(self._options)
        begins, ends = self._parse(start, found), self._parse(end, found)
        return [
            Range(number, begin, stop)
            for number, (begin, stop) in enumerate(zip(begins.sequences, ends.sequences, strict=True))
            if stop > begin
        ]

    def read(self, partition: Range) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        return read_range(self._options, self._schema, partition, is_loss_fatal=self._options.is_loss_fatal)

    def commit(self, end: dict[str, Any]) -> None:
        if Offset.from_dict(end) != self._deleted:
            found = _read_levels(self._options)
            self._delete_below(self._parse(end, found), found.levels, waits=True)

    def _parse(self, logged: Mapping[str, Any], found: Levels) -> Offset:
        offset = Offset.from_dict(logged)
        offset.check(self._options.queue, found)
        return offset

    def _ends(self, found: Levels) -> Offset:
        return Offset(self._options.queue, found.id, [level.next for level in found.levels])

    def _delete_below(self, offset: Offset, levels: Sequence[Level], *, waits: bool) -> None:
        due = [
            (number, below)
            for number, (below, level) in enumerate(zip(offset.sequences, levels, strict=True))
            if level.first < below
        ]

        async def delete(broker: Connection) -> None:
            queue = broker.queue(self._options.queue)
            await asyncio.gather(*(queue.delete_below(number, below) for number, below in due))

        self._deleted = offset
        if self._deleting is not None:
            answer(self._options.broker, self._deleting)
            self._deleting = None
        if due and self._options.deletes:
            self._deleting = ask_soon(self._options.broker, delete)
            if waits:
                answer(self._options.broker, self._deleting)


def read_range(
    options: SourceOptions, schema: StructType, place: Range, *, is_loss_fatal: bool
) -> Iterator[pa.RecordBatch]:
    """Reads a range on an executor. Yields batches as large as the broker's replies."""
    columns = Columns(schema, place.physical, is_strict=options.mode == "failfast")
    found = 0
    for page in _pages(options, place):
        batch = columns.batch(page)
        found += len(batch)
        yield batch
    freeze_loaded_objects()
    missing = place.stop - place.start - found
    if missing and is_loss_fatal:
        raise QueueError(
            "Q914",
            f"{missing} of the messages {place.start} to {place.stop - 1} of physical queue {place.physical} of "
            f"{options.queue!r} were deleted before they were read",
            "let no other consumer take from this queue, or continue with failOnDataLoss = false",
        )


def _pages(options: SourceOptions, place: Range) -> Iterator[Page]:
    """Reads pages one ahead: the next page is in flight while the caller makes columns of the current one."""

    def read(start: int) -> Future[Page]:
        queue, stop = options.queue, place.stop
        return ask_soon(options.broker, lambda broker: broker.queue(queue).read_page(place.physical, start, stop))

    start = place.start
    coming = read(start) if start < place.stop else None
    while coming is not None and (page := answer(options.broker, coming)).ends:
        start = int.from_bytes(page.sequences[-8:], "little") + 1
        coming = read(start) if start < place.stop else None
        yield page


def _read_levels(options: SourceOptions) -> Levels:
    return ask(options.broker, lambda broker: broker.queue(options.queue).look())
