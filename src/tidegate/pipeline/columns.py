"""Columns: what a row of the source has, made from the messages of a range read as one Arrow batch.

Columns about the message have names that begin with an underscore; every other column is an attribute of its body,
which is a map in MessagePack. A body that is none, or has an attribute of another type, gives nulls and an `_error`;
nothing is dropped.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
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

from tidegate.client.queue import KeptRecord
from tidegate.errors import ConfigError, QueueError

ERROR: Final = "_error"
BODY: Final = "_body"
# Name, type, and how it is read from a message.
MESSAGE_COLUMNS: Final[dict[str, tuple[DataType, Callable[[int, KeptRecord], Any]]]] = {
    "_queue": (IntegerType(), lambda physical, _kept: physical),
    "_sequence": (LongType(), lambda _physical, kept: kept.sequence),
    "_enqueued_at": (TimestampType(), lambda _physical, kept: int(1e6 * kept.record.enqueued_at)),
    "_group": (StringType(), lambda _physical, kept: kept.record.group),
    "_device": (StringType(), lambda _physical, kept: kept.record.device),
    "_device_sequence": (LongType(), lambda _physical, kept: kept.record.sequence),
    "_headers": (MapType(StringType(), StringType()), lambda _physical, kept: kept.record.headers),
    BODY: (BinaryType(), lambda _physical, kept: bytes(kept.record.body)),
    ERROR: (StringType(), lambda _physical, _kept: None),
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


def full_schema(body: str) -> str:
    """The columns of the body that a user names, and behind them all columns about the message. Spark reads it."""
    message = [f"{name} {kind.simpleString()}" for name, (kind, _read) in MESSAGE_COLUMNS.items()]
    return ", ".join([body, *message] if body else message)


class Columns:
    """Reads the columns of one schema. Picklable by its schema; made once a read."""

    def __init__(self, schema: StructType, *, is_strict: bool) -> None:
        self._arrow = to_arrow_schema(schema, timezone="UTC")
        self._is_strict = is_strict
        self._fields = schema.fields
        self._body_fields = [field for field in schema.fields if field.name not in MESSAGE_COLUMNS]
        check_schema(schema)
        self._decode = msgspec.msgpack.Decoder(_body_type(self._body_fields)).decode if self._body_fields else None

    def batch(self, physical: int, kept: Sequence[KeptRecord]) -> pa.RecordBatch:
        values: dict[str, Sequence[Any]] = {}
        if self._decode is not None:
            values, errors = self._bodies(physical, kept)
            values[ERROR] = errors
        arrays = []
        for field in self._arrow:
            found = values.get(field.name)
            if found is None:
                read = MESSAGE_COLUMNS[field.name][1]
                found = [read(physical, each) for each in kept]
            arrays.append(pa.array(found, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _bodies(self, physical: int, kept: Sequence[KeptRecord]) -> tuple[dict[str, Sequence[Any]], list[str | None]]:
        assert self._decode is not None
        rows: list[tuple[Any, ...]] = []
        errors: list[str | None] = []
        nothing = (None,) * len(self._body_fields)
        for each in kept:
            try:
                rows.append(msgspec.structs.astuple(self._decode(each.record.body)))
                errors.append(None)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
                if self._is_strict:
                    raise QueueError(
                        "Q913",
                        f"the body of message {physical}/{each.sequence} does not fit the schema: {error}",
                        "correct the schema, or read with mode = permissive and look at _error",
                    ) from error
                rows.append(nothing)
                errors.append(str(error))
        columns = zip(*rows, strict=True) if rows else ([] for _ in self._body_fields)
        return {field.name: list(column) for field, column in zip(self._body_fields, columns, strict=True)}, errors


def check_schema(schema: StructType) -> None:
    """Raises when a column about the message has another type, or a column of the body one that no body has."""
    for field in schema.fields:
        if field.name in MESSAGE_COLUMNS:
            expected = MESSAGE_COLUMNS[field.name][0]
            if field.dataType != expected:
                raise ConfigError(
                    "C420",
                    f"column {field.name} is {field.dataType.simpleString()}",
                    f"it is {expected.simpleString()}",
                )
        elif field.name.startswith("_"):
            raise ConfigError(
                "C420", f"there is no column {field.name}", f"columns about the message: {', '.join(MESSAGE_COLUMNS)}"
            )
        else:
            _python_type(field.name, field.dataType)


def _body_type(fields: Sequence[StructField]) -> type[msgspec.Struct]:
    """A struct with one optional field a column; attribute names need not be names of Python."""
    members = [
        (f"c{index}", _python_type(field.name, field.dataType) | None, None) for index, field in enumerate(fields)
    ]
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
            f"column {name} is {kind.simpleString()}, which no body has",
            "use string, boolean, numbers, binary, date, timestamp, and arrays and maps of them",
        )
    return found
