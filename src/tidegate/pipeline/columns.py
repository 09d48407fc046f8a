"""Columns: turns a page of a range read into the rows of the source, as one Arrow batch.

Columns about the message have names that begin with an underscore. Every other column is an attribute of the body,
which is a map in MessagePack. A body that is not a map, or has an attribute of another type, gives nulls and an
`_error`; no row is dropped.

A kernel builds the columns about messages, from bytes to bytes. Bodies are decoded one by one, and only when the schema
has a column of the body.

What may go wrong: a page is malformed. That is ProtocolError P303; the lengths are checked before a kernel
reads the page.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tidegate.errors import ConfigError, ProtocolError, QueueError
from tidegate.messages import Page, Record
from tidegate.pipeline import page_kernel
from tidegate.pipeline.page_kernel import BODY, CHECKSUM_BYTES, DEVICE, DEVICE_SEQUENCE, GROUP, HEADERS

ERROR: Final = "_error"
# The largest time whose microseconds fit into 64 bits.
TIME_S_MAX: Final = 9e12
MESSAGE_COLUMNS: Final[dict[str, DataType]] = {
    "_queue": IntegerType(),
    "_sequence": LongType(),
    "_enqueued_at": TimestampType(),
    "_group": StringType(),
    "_device": StringType(),
    "_device_sequence": LongType(),
    "_headers": MapType(StringType(), StringType()),
    "_body": BinaryType(),
    ERROR: StringType(),
}

_PYTHON_TYPES: Final[dict[type[DataType], Any]] = {
    StringType: str,
    BooleanType: bool,
    ByteType: int,
    ShortType: int,
    IntegerType: int,
    LongType: int,
    FloatType: float,
    DoubleType: float,
    BinaryType: bytes,
    DateType: datetime.date,
    TimestampType: datetime.datetime,
}
_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode


def full_schema(body: str) -> str:
    """Returns Spark's text of the schema: the columns of the body that the user named, then all message columns."""
    message = [f"{name} {kind.simpleString()}" for name, kind in MESSAGE_COLUMNS.items()]
    return ", ".join([body, *message] if body else message)


def check_schema(schema: StructType) -> None:
    """Raises ConfigError if a message column has the wrong type, or a body column one that bodies cannot hold."""
    for field in schema.fields:
        if field.name in MESSAGE_COLUMNS:
            expected = MESSAGE_COLUMNS[field.name]
            if field.dataType != expected:
                found = field.dataType.simpleString()
                raise ConfigError(
                    "C420", f"column {field.name} has the type {found}", f"declare it as {expected.simpleString()}"
                )
        elif field.name.startswith("_"):
            raise ConfigError(
                "C420", f"{field.name} is not a message column", f"use one of: {', '.join(MESSAGE_COLUMNS)}"
            )
        else:
            _python_type(field.name, field.dataType)


class Columns:
    """Makes the columns of one schema from messages of one physical queue."""

    def __init__(self, schema: StructType, physical: int, *, is_strict: bool) -> None:
        self._arrow = to_arrow_schema(schema, timezone="UTC")
        self._physical = physical
        self._is_strict = is_strict
        self._body_fields = [field for field in schema.fields if field.name not in MESSAGE_COLUMNS]
        self._decode = msgspec.msgpack.Decoder(_body_type(self._body_fields)).decode

    def batch(self, page: Page) -> pa.RecordBatch:
        found = _Records.of(page)
        made: dict[str, Callable[[], Any]] = {
            "_queue": lambda: np.full(len(found), self._physical, np.int32),
            "_sequence": lambda: found.sequences,
            "_enqueued_at": lambda: np.rint(1e6 * found.times).astype(np.int64),
            "_group": lambda: found.texts(GROUP, pa.string()),
            "_device": lambda: found.texts(DEVICE, pa.string()),
            "_device_sequence": lambda: found.parts[:, DEVICE_SEQUENCE],
            "_headers": found.headers,
            "_body": lambda: found.texts(BODY, pa.binary()),
        }
        bodies = self._bodies(found) if self._body_fields else {ERROR: pa.nulls(len(found), pa.string())}
        arrays = []
        for field in self._arrow:
            values = bodies[field.name] if field.name in bodies else made[field.name]()
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _bodies(self, found: _Records) -> dict[str, Sequence[Any]]:
        """Decodes the bodies into columns, and adds the column of errors."""
        rows: list[tuple[Any, ...]] = []
        errors: list[str | None] = []
        nothing = (None,) * len(self._body_fields)
        for index, body in enumerate(found.pieces(BODY)):
            try:
                rows.append(msgspec.structs.astuple(self._decode(body)))
                errors.append(None)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
                if self._is_strict:
                    raise QueueError(
                        "Q913",
                        f"message {self._physical}/{found.sequences[index]} does not fit the schema: {error}",
                        "correct the schema, or read with mode = permissive and check the column _error",
                    ) from error
                rows.append(nothing)
                errors.append(str(error))
        columns = zip(*rows, strict=True) if rows else ([] for _ in self._body_fields)
        return dict(zip([field.name for field in self._body_fields], columns, strict=True)) | {ERROR: errors}


class _Records:
    """The records of a page, and where each of their parts starts and ends in its bytes."""

    def __init__(
        self, page: Page, data: bytes | memoryview, parts: NDArray[np.int64], times: NDArray[np.float64]
    ) -> None:
        self.sequences = np.frombuffer(page.sequences, "<u8").astype(np.int64)
        if not (np.abs(times) < TIME_S_MAX).all():
            raise _malformed("the time of a record is out of range")
        self.parts = parts
        self.times = times
        self.have_headers = True
        self._data = data

    def __len__(self) -> int:
        return len(self.sequences)

    @classmethod
    def of(cls, page: Page) -> _Records:
        ends = _ends(page)
        parts = np.empty((len(ends), page_kernel.PARTS), np.int64)
        times = np.empty(len(ends), np.uint64)
        understood, with_headers = page_kernel.find_parts(np.frombuffer(page.records, np.uint8), ends, parts, times)
        if understood < len(ends):
            return cls._decode_each(page, ends.tolist())
        found = cls(page, page.records, parts, times.view(np.float64))
        found.have_headers = with_headers > 0
        return found

    @classmethod
    def _decode_each(cls, page: Page, ends: list[int]) -> _Records:
        """Decodes the records one by one, for a page with a record that the kernel rejects.

        Such a record may still be valid: a body may be any bytes that its producer took for MessagePack. The parts are
        copied into new bytes, in the form that the kernel accepts."""
        data = bytearray()
        parts = np.empty((len(ends), page_kernel.PARTS), np.int64)
        times = np.empty(len(ends), np.float64)
        start = 0
        for index, end in enumerate(ends):
            try:
                record = _decode_record(page.records[start + CHECKSUM_BYTES : end])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise _malformed(f"record {index}: {error}") from error
            start = end
            if not 0 <= record.sequence < 1 << 63:
                raise _malformed(f"record {index}: {record.sequence} is not a valid sequence")
            times[index] = record.enqueued_at
            parts[index, DEVICE_SEQUENCE] = record.sequence
            for column, piece in (
                (GROUP, record.group.encode()),
                (BODY, bytes(record.body)),
                (DEVICE, record.device.encode()),
                (HEADERS, msgspec.msgpack.encode(record.headers)),
            ):
                parts[index, column] = len(data)
                data += piece
                parts[index, column + 1] = len(data)
        return cls(page, bytes(data), parts, times)

    def texts(self, column: int, kind: Any) -> pa.Array:
        """Returns a column of texts or bytes as an Arrow array."""
        starts, stops = self.parts[:, column], self.parts[:, column + 1]
        gathered = np.empty(int((stops - starts).sum()), np.uint8)
        offsets = np.empty(len(self) + 1, np.int32)
        page_kernel.gather(np.frombuffer(self._data, np.uint8), starts, stops, gathered, offsets)
        return pa.Array.from_buffers(kind, len(self), [None, pa.py_buffer(offsets), pa.py_buffer(gathered)])

    def pieces(self, column: int) -> list[memoryview]:
        view = memoryview(self._data)
        bounds = self.parts[:, column : column + 2].tolist()
        return [view[start:stop] for start, stop in bounds]

    def headers(self) -> pa.Array:
        if not self.have_headers:
            nothing = pa.array([], pa.string())
            return pa.MapArray.from_arrays(pa.array(np.zeros(len(self) + 1, np.int32)), nothing, nothing)
        try:
            decoded = [list(_decode_headers(piece).items()) for piece in self.pieces(HEADERS)]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(f"headers: {error}") from error
        return pa.array(decoded, pa.map_(pa.string(), pa.string()))


def _ends(page: Page) -> NDArray[np.uint32]:
    """Returns where the records of a page end: ascending, within its bytes, and as many as there are sequences."""
    if len(page.ends) % 4 or len(page.sequences) != 2 * len(page.ends):
        raise _malformed(f"{len(page.ends)} bytes of ends, {len(page.sequences)} of sequences")
    ends = np.frombuffer(page.ends, "<u4")
    if len(ends) and (ends[-1] != len(page.records) or (ends[1:] < ends[:-1]).any()):
        raise _malformed(f"the ends of {len(ends)} records do not fit {len(page.records)} bytes")
    return ends


def _malformed(why: str) -> ProtocolError:
    return ProtocolError(
        "P303", f"a page of a queue is malformed: {why}", "run the same Tidegate version on the broker and in Spark"
    )


def _body_type(fields: Sequence[StructField]) -> type[msgspec.Struct]:
    """Returns a struct with an optional field per column. Attribute names need not be identifiers of Python."""
    kinds = [_python_type(field.name, field.dataType) for field in fields]
    members = [(f"c{index}", kind | None, None) for index, kind in enumerate(kinds)]
    names = {f"c{index}": field.name for index, field in enumerate(fields)}
    return msgspec.defstruct("Body", members, rename=names, gc=False)


def _python_type(name: str, kind: DataType) -> Any:
    if isinstance(kind, ArrayType):
        return list[_python_type(name, kind.elementType) | None]  # type: ignore[misc]
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        return dict[str, _python_type(name, kind.valueType) | None]  # type: ignore[misc]
    found = _PYTHON_TYPES.get(type(kind))
    if found is None:
        raise ConfigError(
            "C420",
            f"column {name} has the type {kind.simpleString()}, which no body can hold",
            "use string, boolean, numbers, binary, date, timestamp, and arrays and maps of them",
        )
    return found
