"""Source: a logical queue as a table and as a stream of Spark. One partition a physical queue, offsets are sequences.

    spark.readStream.format("tidegate").option("queue", "air").load()

A streaming query reads ranges, which can be read again, and deletes what lies below the last finished batch:

    latestOffset(start) ─► [Spark logs the offsets] ─► commit(end of the batch before) ─► partitions ─► read ─► sink
         └ deletes below start                            └ deletes below it

Spark calls `commit` for a batch when the next one has data, so the last batch of an idle or finished query would stay
in the queue for ever; hence `latestOffset` deletes too: its `start` is the end of the last batch that is done. After a
crash Spark asks for exactly the logged range again, before it asks for a latest offset.

What may go wrong here: the broker is away (tried again, then an error), somebody else takes messages of the queue or
it drops them (failOnDataLoss), the checkpoint is of another queue.
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
from tidegate.pipeline.python_worker import keep_what_is_loaded
from tidegate.pipeline.sink import RowStreamWriter, RowWriter


class TidegateSource(DataSource):
    """`format("tidegate")`. Made anew for every use, on the driver."""

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
    """What is in the queue now, as a table. Nothing is deleted."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema

    def partitions(self) -> list[Range]:
        levels = _look(self._options).levels
        return [Range(number, level.first, level.next) for number, level in enumerate(levels)]

    def read(self, partition: Range) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        # Consumers may go on meanwhile: what they delete is not there.
        return read_range(self._options, self._schema, partition, is_loss_fatal=False)


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives on the driver, in a Python process of its own; `read` runs on executors, with a copy."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._target: Offset | None = None
        # What was seen last, how far the queue was deleted since this process began, and a deletion under way.
        self._seen: Levels | None = None
        self._deleted: Offset | None = None
        self._deleting: Future[None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For the executors, which only read."""
        return self.__dict__ | {"_deleting": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        found = _look(self._options)
        return Offset(self._options.queue, found.id, [level.first for level in found.levels]).to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._options.rows_per_trigger
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        found = self._seen = _look(self._options)
        first = self._parse(start, found)
        ends = self._ends(found).sequences
        if self._target is not None:
            ends = [min(end, target) for end, target in zip(ends, self._target.sequences, strict=True)]
        if isinstance(limit, ReadMaxRows):
            ends = allot(first.sequences, ends, limit.max_rows)
        ends = [max(end, begin) for end, begin in zip(ends, first.sequences, strict=True)]
        # While there is more to read, nobody need wait for a deletion; when there is not, this process may end.
        self._delete_below(first, found.levels, waits=ends == first.sequences)
        return Offset(self._options.queue, found.id, ends).to_dict()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._ends(_look(self._options)).to_dict()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._ends(_look(self._options))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Range]:
        found = self._seen or _look(self._options)
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
            found = _look(self._options)
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
    """Runs on an executor. Batches as large as the broker's replies."""
    columns = Columns(schema, place.physical, is_strict=options.mode == "failfast")
    found = 0
    for page in _pages(options, place):
        batch = columns.batch(page)
        found += len(batch)
        yield batch
    keep_what_is_loaded()
    missing = place.stop - place.start - found
    if missing and is_loss_fatal:
        raise QueueError(
            "Q914",
            f"{missing} of the messages {place.start} to {place.stop - 1} of physical queue {place.physical} of "
            f"{options.queue!r} are gone, unread",
            "let nobody else take from this queue, or read on with failOnDataLoss = false",
        )


def _pages(options: SourceOptions, place: Range) -> Iterator[Page]:
    """While columns are made of one page, the next is on its way."""

    def read(start: int) -> Future[Page]:
        queue, stop = options.queue, place.stop
        return ask_soon(options.broker, lambda broker: broker.queue(queue).read_page(place.physical, start, stop))

    start = place.start
    coming = read(start) if start < place.stop else None
    while coming is not None and (page := answer(options.broker, coming)).ends:
        start = int.from_bytes(page.sequences[-8:], "little") + 1
        coming = read(start) if start < place.stop else None
        yield page


def _look(options: SourceOptions) -> Levels:
    return ask(options.broker, lambda broker: broker.queue(options.queue).look())
