"""Rows: how the sink encodes each row of a DataFrame, as a message of a queue or as a notification.

Every column is an attribute, and nulls are left out. Columns whose names begin with an underscore describe the message.
Times become ISO text in UTC, decimals become floats. Columns are checked when the query starts, so a column that cannot
be sent fails there. An invalid value fails its task before anything is sent.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    FractionalType,
    IntegralType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from tidegate.errors import ConfigError, NotificationError, QueueError
from tidegate.messages import (
    HEADER_CHARACTERS_MAX,
    HEADERS_MAX,
    MESSAGE_BYTES_MAX,
    TEXT_CHARACTERS_MAX,
    NewMessage,
)
from tidegate.notification import INTEGER_MAX, NOTIFICATION_BYTES_MAX, PAYLOAD, TEXT_BYTES_MAX, check

GROUP: Final = "_group"
HEADERS: Final = "_headers"
BODY: Final = "_body"
PAYLOAD_COLUMN: Final = "_payload"
_MESSAGE_COLUMNS: Final[dict[str, DataType]] = {
    GROUP: StringType(),
    HEADERS: MapType(StringType(), StringType()),
    BODY: BinaryType(),
}
_NOTIFICATION_COLUMNS: Final[dict[str, DataType]] = {PAYLOAD_COLUMN: BinaryType()}

# Types that a filter can compare, directly or as text.
_PLAIN: Final = (
    StringType,
    BooleanType,
    IntegralType,
    FractionalType,
    DateType,
    TimestampType,
    TimestampNTZType,
)
# Types without a MessagePack value that every reader understands.
_CONVERTED: Final = (DecimalType, DateType, TimestampType, TimestampNTZType)
_EMPTY_MAP: Final = b"\x80"

_encode = msgspec.msgpack.Encoder().encode


class Rows(Protocol):
    """Encodes rows of one schema. `first` is the place of a batch's first row in its partition, for error messages."""

    def encode(self, batch: pa.RecordBatch, first: int) -> list[bytes]: ...


class MessageRows:
    """Encodes rows as messages, each a NewMessage."""

    def __init__(self, schema: StructType) -> None:
        attributes = _attributes(schema, _MESSAGE_COLUMNS, "message")
        for field in attributes:
            if not _fits_body(field.dataType):
                raise ConfigError(
                    "C422",
                    f"column {field.name} has the type {field.dataType.simpleString()}, which no body can hold",
                    "cast it to string, a number, binary or a time, or to arrays, structs and maps by string of these",
                )
        self._has_body = BODY in schema.names
        if self._has_body and attributes:
            names = ", ".join(field.name for field in attributes)
            raise ConfigError("C422", f"_body cannot be combined with {names}", "write either _body or attributes")
        if not self._has_body and not attributes:
            raise _no_attribute("message")
        self._maps = _Maps({field.name: field for field in attributes})
        self._has_details = not {GROUP, HEADERS}.isdisjoint(schema.names)

    def encode(self, batch: pa.RecordBatch, first: int) -> list[bytes]:
        bodies = batch.column(BODY).to_pylist() if self._has_body else self._maps.encode(batch)
        nothing = (None, b"") if self._has_body else (_EMPTY_MAP,)
        groups, headers = _column(batch, GROUP), _column(batch, HEADERS)
        messages = []
        for row, body in enumerate(bodies, first):
            if body in nothing:
                raise QueueError("Q917", f"row {row} of its partition has no value", "filter such rows out")
            message = NewMessage(msgspec.Raw(body))
            if self._has_details:
                message.group = groups[row - first] or ""
                message.headers = {name: text for name, text in headers[row - first] or () if text is not None}
            if self._has_details or len(body) > MESSAGE_BYTES_MAX:
                _check_sizes(message, row)
            messages.append(_encode(message))
        return messages


class NotificationRows:
    """Encodes rows as notifications, each a map."""

    def __init__(self, schema: StructType) -> None:
        attributes = _attributes(schema, _NOTIFICATION_COLUMNS, "notification")
        for field in attributes:
            if not isinstance(field.dataType, _PLAIN):
                raise ConfigError(
                    "C422",
                    f"column {field.name} has the type {field.dataType.simpleString()}, which no filter can compare",
                    "flatten it, write it as text with to_json, or send it as the binary column _payload",
                )
        named = {field.name: field for field in attributes}
        if PAYLOAD_COLUMN in schema.names:
            named[PAYLOAD] = schema[PAYLOAD_COLUMN]
        if not named:
            raise _no_attribute("notification")
        check({name: b"" if name == PAYLOAD else True for name in named})
        self._maps = _Maps(named)

    def encode(self, batch: pa.RecordBatch, first: int) -> list[bytes]:
        encoded = self._maps.encode(batch)
        if any(map(_is_suspect, batch.columns)) or _EMPTY_MAP in encoded:
            for row, each in enumerate(encoded, first):
                _check_notification(each, row)
        if encoded and (size := max(map(len, encoded))) > NOTIFICATION_BYTES_MAX:
            raise NotificationError(
                "N211",
                f"row {first + [len(each) for each in encoded].index(size)} of its partition has {size} bytes",
                f"send at most {NOTIFICATION_BYTES_MAX} bytes per notification",
            )
        return encoded


@lru_cache(16)
def map_shape(names: tuple[str, ...]) -> type[msgspec.Struct]:
    """Returns a type that encodes a row as a map of these attributes, without those that are None. Encoding a struct
    that omits its defaults is faster than encoding a dict. Attributes may have any name."""
    renamed = {f"c{index}": name for index, name in enumerate(names)}
    members: list[tuple[str, Any, Any]] = [(field, Any, None) for field in renamed]
    return msgspec.defstruct("Row", members, rename=renamed, omit_defaults=True, gc=False)


class _Maps:
    """Encodes rows as MessagePack maps without their nulls. `named` has the column of each attribute."""

    def __init__(self, named: Mapping[str, StructField]) -> None:
        self._columns = [field.name for field in named.values()]
        self._is_converted = [_has(field.dataType, _CONVERTED) for field in named.values()]
        self._row = map_shape(tuple(named))

    def encode(self, batch: pa.RecordBatch) -> list[bytes]:
        columns = [
            _values(batch.column(name), is_converted)
            for name, is_converted in zip(self._columns, self._is_converted, strict=True)
        ]
        row = self._row
        return [_encode(row(*values)) for values in zip(*columns, strict=True)]


def _attributes(schema: StructType, special: Mapping[str, DataType], what: str) -> list[StructField]:
    """Returns the columns that are attributes, and checks the others."""
    attributes = []
    for field in schema.fields:
        if schema.names.count(field.name) > 1:
            raise ConfigError("C422", f"two columns are named {field.name}", "rename one of them")
        if not field.name.startswith("_"):
            attributes.append(field)
        elif field.name not in special:
            raise ConfigError(
                "C422",
                f"column {field.name} has no meaning for a {what}",
                f"drop or rename it, or use one of: {', '.join(special)}",
            )
        elif not _is_same(field.dataType, special[field.name]):
            raise ConfigError(
                "C422",
                f"column {field.name} has the type {field.dataType.simpleString()}",
                f"cast it to {special[field.name].simpleString()}",
            )
    return attributes


def _is_same(given: DataType, wanted: DataType) -> bool:
    """Compares two types, ignoring whether a map may hold nulls."""
    return given.simpleString() == wanted.simpleString()


def _fits_body(kind: DataType) -> bool:
    """Returns whether a body can hold this type."""
    if isinstance(kind, ArrayType):
        return _fits_body(kind.elementType)
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and _fits_body(kind.valueType)
    if isinstance(kind, StructType):
        return all(_fits_body(field.dataType) for field in kind.fields)
    return isinstance(kind, (*_PLAIN, BinaryType))


def _has(kind: DataType, wanted: tuple[type[DataType], ...]) -> bool:
    """Returns whether the type is, or contains, one of the wanted types."""
    if isinstance(kind, ArrayType):
        return _has(kind.elementType, wanted)
    if isinstance(kind, MapType):
        return _has(kind.valueType, wanted)
    if isinstance(kind, StructType):
        return any(_has(field.dataType, wanted) for field in kind.fields)
    return isinstance(kind, wanted)


def _values(column: pa.Array, is_converted: bool) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        return times_as_text(column)
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return list(map(_convert, values)) if is_converted else values


def times_as_text(column: pa.Array) -> list[str | None]:
    """Converts a column of times as `_convert` does. Arrow writes the texts thirty times faster than Python via
    datetimes."""
    in_utc = column if column.type.tz is None else column.cast(pa.timestamp("us", "UTC"))
    text = pc.replace_substring(in_utc.cast(pa.string()), " ", "T", max_replacements=1)
    found: list[str | None] = pc.replace_substring(text, ".000000", "").to_pylist()
    return found


def _convert(value: Any) -> Any:
    """Converts times to text and decimals to floats, also inside lists and maps."""
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            return value.isoformat()
        return value.astimezone(datetime.UTC).replace(tzinfo=None).isoformat() + "Z"
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {name: _convert(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_convert(each) for each in value]
    return value


def _column(batch: pa.RecordBatch, name: str) -> Sequence[Any]:
    """Returns the values of a column; nulls if the column does not exist."""
    return batch.column(name).to_pylist() if name in batch.schema.names else [None] * len(batch)


def _is_suspect(column: pa.Array) -> bool:
    """Returns whether a filter might be unable to compare a value of this column. If so, each row is checked."""
    kind = column.type
    if pa.types.is_floating(kind):
        return pc.all(pc.is_finite(column)).as_py() is False
    if pa.types.is_int64(kind):
        bounds = pc.min_max(column).as_py()
        return bounds["max"] is not None and max(-bounds["min"], bounds["max"]) > INTEGER_MAX
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return (pc.max(pc.binary_length(column)).as_py() or 0) > TEXT_BYTES_MAX
    return False


def _check_notification(encoded: bytes, row: int) -> None:
    try:
        check(msgspec.msgpack.decode(encoded))
    except NotificationError as error:
        raise NotificationError(error.code, f"row {row} of its partition: {error.message}", error.remedy) from error


def _check_sizes(message: NewMessage, row: int) -> None:
    for size, size_max, what in (
        (len(memoryview(message.body)), MESSAGE_BYTES_MAX, "bytes in its body"),
        (len(message.group), TEXT_CHARACTERS_MAX, "characters in its group"),
        (len(message.headers), HEADERS_MAX, "headers"),
        (
            max((len(name) + len(text) for name, text in message.headers.items()), default=0),
            HEADER_CHARACTERS_MAX,
            "characters in a header",
        ),
    ):
        if size > size_max:
            raise QueueError("Q905", f"row {row} of its partition has {size} {what}", f"send at most {size_max}")


def _no_attribute(what: str) -> ConfigError:
    return ConfigError("C422", f"the DataFrame has no column that is an attribute of a {what}", "select at least one")
