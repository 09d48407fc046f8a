"""A data source that yields the same Arrow batches as Tidegate's, from memory: the limit of any source in Python.

benchmarks/spark_source.py uses it. Each worker creates its batch once, from a page like those that a broker sends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from tidegate.messages import PAGE_BYTES_MAX, Page, Record
from tidegate.pipeline.columns import Columns, full_schema
from tidegate.queues.records import seal

BODY_BYTES: Final = 1024
PARTITIONS: Final = 2


def body() -> bytes:
    """Returns a text as MessagePack of 1 KB."""
    return msgspec.msgpack.encode("x" * (BODY_BYTES - 3))


class MemorySource(DataSource):
    """The format `memory_batches`. Its option `rows` is the number of rows of the whole stream or table."""

    @classmethod
    def name(cls) -> str:
        return "memory_batches"

    def schema(self) -> str:
        return full_schema("")

    def reader(self, schema: StructType) -> MemoryReader:
        return MemoryReader(schema, int(self.options["rows"]))

    def streamReader(self, schema: StructType) -> MemoryStreamReader:  # noqa: N802
        return MemoryStreamReader(schema, int(self.options["rows"]), int(self.options["rowsPerTrigger"]))


@dataclass
class Rows(InputPartition):
    count: int


class MemoryReader(DataSourceReader):
    def __init__(self, schema: StructType, rows: int) -> None:
        self._schema, self._rows = schema, rows

    def partitions(self) -> list[Rows]:
        return [Rows(self._rows // PARTITIONS)] * PARTITIONS

    def read(self, partition: Rows) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        return _batches(self._schema, partition.count)


class MemoryStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, schema: StructType, rows: int, per_trigger: int) -> None:
        self._schema, self._rows, self._per_trigger = schema, rows, per_trigger

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"rows": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Does nothing, because all rows exist from the beginning."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._per_trigger)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        step = self._rows if isinstance(limit, ReadAllAvailable) else self._per_trigger
        return {"rows": min(self._rows, start["rows"] + step)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Rows]:
        return [Rows((end["rows"] - start["rows"]) // PARTITIONS)] * PARTITIONS

    def read(self, partition: Rows) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        return _batches(self._schema, partition.count)


def _batches(schema: StructType, count: int) -> Iterator[pa.RecordBatch]:
    whole = _batch(schema.json())
    while count > 0:
        batch = whole.slice(0, min(count, len(whole)))
        count -= len(batch)
        yield batch


@cache
def _batch(schema_json: str) -> pa.RecordBatch:
    """Returns a batch as large as a page of a range read."""
    record = seal(Record("", 1.7e9, msgspec.Raw(body()), "spark_source-0123456789ab", 100_000))
    count = PAGE_BYTES_MAX // len(record)
    ends = array("I", accumulate([len(record)] * count))
    page = Page(array("Q", range(count)).tobytes(), ends.tobytes(), memoryview(record * count))
    schema = StructType.fromJson(msgspec.json.decode(schema_json))
    return Columns(schema, 0, is_strict=False).batch(page)
