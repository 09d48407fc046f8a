"""Rows as the sink sends them, compared with Python's conversion one by one; and rows that it cannot send."""

from __future__ import annotations

import datetime
import functools
import itertools
import math
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from tidegate.errors import ConfigError, NotificationError, QueueError
from tidegate.messages import NewMessage
from tidegate.pipeline.rows import MessageRows, NotificationRows
from tidegate.pipeline.sink import PART_BYTES, PART_MESSAGES, Key, _cut

COLUMNS = "text string, flag boolean, small short, big bigint, real double, at timestamp, day date, price decimal(9,2)"
# Spark's own parser reads the schemas.
pytestmark = pytest.mark.usefixtures("spark")

IN_MADRID = datetime.timezone(datetime.timedelta(hours=2))


@functools.cache
def parse(schema: str) -> StructType:
    parsed = StructType.fromDDL(schema)
    assert isinstance(parsed, StructType)
    return parsed


def batch_of(schema: str, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    arrow = to_arrow_schema(parse(schema), timezone="UTC")
    return pa.RecordBatch.from_pylist(rows, schema=arrow)


def notifications(schema: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    encoded = NotificationRows(parse(schema)).encode(batch_of(schema, rows), 0)
    return [msgspec.msgpack.decode(each) for each in encoded]


def messages(schema: str, rows: list[dict[str, Any]]) -> list[NewMessage]:
    encoded = MessageRows(parse(schema)).encode(batch_of(schema, rows), 0)
    return [msgspec.msgpack.decode(each, type=NewMessage) for each in encoded]


def body_of(message: NewMessage) -> Any:
    return msgspec.msgpack.decode(message.body)


def expected(value: Any) -> Any:
    """Returns a value as Python converts it, without Arrow."""
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).isoformat().replace("+00:00", "Z")
    return (
        value.isoformat() if isinstance(value, datetime.date) else float(value) if isinstance(value, Decimal) else value
    )


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.none() | st.text(st.characters(codec="utf-8")),
            "flag": st.none() | st.booleans(),
            "small": st.none() | st.integers(-(2**15), 2**15 - 1),
            "big": st.none() | st.integers(-(2**53), 2**53),
            "real": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "at": st.none() | st.datetimes(timezones=st.just(datetime.UTC)),
            "day": st.none() | st.dates(),
            "price": st.none() | st.decimals(-9_999_999, 9_999_999, places=2),
        }
    ).filter(lambda row: any(value is not None for value in row.values())),
    max_size=20,
)


@given(ROWS)
def test_a_row_is_its_columns_without_nulls(rows: list[dict[str, Any]]) -> None:
    wanted = [{name: expected(value) for name, value in row.items() if value is not None} for row in rows]
    assert notifications(COLUMNS, rows) == wanted
    assert [body_of(message) for message in messages(COLUMNS, rows)] == wanted


def test_times_are_in_utc_whatever_the_zone() -> None:
    at = datetime.datetime(2026, 7, 1, 14, 0, 0, 250_000, IN_MADRID)
    arrow = pa.schema([("at", pa.timestamp("us", "Europe/Madrid")), ("local", pa.timestamp("us"))])
    row = {"at": at, "local": datetime.datetime(2026, 7, 1, 14)}
    rows = NotificationRows(parse("at timestamp, local timestamp_ntz"))
    (encoded,) = rows.encode(pa.RecordBatch.from_pylist([row], schema=arrow), 0)
    assert msgspec.msgpack.decode(encoded) == {"at": "2026-07-01T12:00:00.250000Z", "local": "2026-07-01T14:00:00"}


def test_a_body_may_be_nested() -> None:
    schema = "raw binary, list array<timestamp>, map map<string, decimal(4,1)>, record struct<day: date, n: int>"
    row = {
        "raw": b"\x00",
        "list": [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), None],
        "map": {"a": Decimal("1.5")},
        "record": {"day": datetime.date(2026, 1, 1), "n": None},
    }
    (message,) = messages(schema, [row])
    assert body_of(message) == {
        "raw": b"\x00",
        "list": ["2026-01-01T00:00:00Z", None],
        "map": {"a": 1.5},
        "record": {"day": "2026-01-01", "n": None},
    }


def test_a_message_has_what_its_columns_say() -> None:
    rows: list[dict[str, Any]] = [
        {"n": 1, "_group": "g", "_headers": {"kind": "alert", "none": None}},
        {"n": 2, "_group": None, "_headers": None},
    ]
    found = messages("n int, _group string, _headers map<string, string>", rows)
    assert [(body_of(each), each.group, each.headers) for each in found] == [
        ({"n": 1}, "g", {"kind": "alert"}),
        ({"n": 2}, "", {}),
    ]
    bodies = [b"\xa1x", b"\x80"]
    ready = messages("_body binary, _group string", [{"_body": body, "_group": "g"} for body in bodies])
    assert [(bytes(each.body), each.group) for each in ready] == [(body, "g") for body in bodies]


def test_a_payload_is_the_notifications() -> None:
    rows: list[dict[str, Any]] = [
        {"n": 1, "_payload": b"raw"},
        {"n": None, "_payload": b"alone"},
        {"n": 3, "_payload": None},
    ]
    assert notifications("n int, _payload binary", rows) == [
        {"n": 1, "$payload": b"raw"},
        {"$payload": b"alone"},
        {"n": 3},
    ]


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ("n int, raw binary", "raw has the type binary"),
        ("n int, list array<int>", "list has the type array<int>"),
        ("n int, map map<string, int>", "map has the type map<string,int>"),
        ("n int, record struct<a: int>", "record has the type struct<a:int>"),
        ("n int, pause interval day to second", "pause has the type interval"),
        ("n int, _group string", "_group has no meaning for a notification"),
        ("n int, _queue int", "_queue has no meaning"),
        ("n int, _payload string", "_payload has the type string"),
        ("a int, a string", "two columns are named a"),
    ],
)
def test_what_cannot_be_published_is_told_at_the_start(schema: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"C422.*{shown}"):
        NotificationRows(parse(schema))


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ("n int, pause interval day to second", "pause has the type interval"),
        ("n int, list array<interval year to month>", "list has the type array"),
        ("n int, map map<int, string>", "map has the type map<int,string>"),
        ("n int, _payload binary", "_payload has no meaning for a message"),
        ("n int, _group int", "_group has the type int"),
        ("n int, _headers map<string, int>", "_headers has the type map<string,int>"),
        ("_body string", "_body has the type string"),
        ("_body binary, a int, b int", "_body cannot be combined with a, b"),
        ("_group string", "no column that is an attribute of a message"),
    ],
)
def test_what_cannot_be_enqueued_is_told_at_the_start(schema: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"C422.*{shown}"):
        MessageRows(parse(schema))


def test_names_and_numbers_of_attributes_are_told_at_the_start() -> None:
    with pytest.raises(NotificationError, match=r"N204.*\$n"):
        NotificationRows(parse("`$n` int"))
    with pytest.raises(NotificationError, match=r"N202.*65 attributes"):
        NotificationRows(parse(", ".join(f"a{n} int" for n in range(65))))


@pytest.mark.parametrize(
    ("row", "code", "shown"),
    [
        ({"real": math.nan}, "N208", "row 8 .*real=nan"),
        ({"real": -math.inf}, "N208", "row 8 .*real=-inf"),
        ({"big": 2**53 + 1}, "N207", "row 8 .*big = 9007199254740993"),
        ({"big": -(2**63)}, "N207", "row 8 .*big = -9223372036854775808"),
        ({"text": "x" * 65_536}, "N206", "row 8 .*'text'"),
        ({"text": None}, "N201", "row 8 .*no attribute"),
        ({"_payload": bytes(262_144)}, "N211", "row 8 .*262"),
    ],
)
def test_what_a_value_breaks_is_told_with_its_row_before_anything_is_sent(
    row: dict[str, Any], code: str, shown: str
) -> None:
    schema = "text string, real double, big bigint, _payload binary"
    rows = NotificationRows(parse(schema))
    with pytest.raises(NotificationError, match=f"{code}.*{shown}"):
        rows.encode(batch_of(schema, [{"text": "fine"}, row]), 7)


@pytest.mark.parametrize(
    ("schema", "row", "code", "shown"),
    [
        ("n int", {"n": None}, "Q917", "row 8 "),
        ("_body binary", {"_body": None}, "Q917", "row 8 "),
        ("_body binary", {"_body": b""}, "Q917", "row 8 "),
        ("_body binary", {"_body": bytes(300_000)}, "Q905", "row 8 .*300000 bytes in its body"),
        ("n int, _group string", {"n": 1, "_group": "g" * 257}, "Q905", "row 8 .*257 characters in its group"),
        (
            "n int, _headers map<string, string>",
            {"n": 1, "_headers": {"k": "v" * 1024}},
            "Q905",
            "row 8 .*1025 characters in a header",
        ),
        (
            "n int, _headers map<string, string>",
            {"n": 1, "_headers": {str(number): "" for number in range(33)}},
            "Q905",
            "row 8 .*33 headers",
        ),
    ],
)
def test_what_no_queue_takes_is_told_with_its_row(schema: str, row: dict[str, Any], code: str, shown: str) -> None:
    rows = MessageRows(parse(schema))
    fine = {"_body": b"\x01"} if schema.startswith("_body") else {"n": 1}
    with pytest.raises(QueueError, match=f"{code}.*{shown}"):
        rows.encode(batch_of(schema, [fine, row]), 7)


def test_integers_and_floats_of_a_body_are_those_of_messagepack() -> None:
    (message,) = messages("big bigint, real double", [{"big": -(2**63), "real": math.inf}])
    assert body_of(message) == {"big": -(2**63), "real": math.inf}


@given(
    st.lists(st.sampled_from([1, 100, PART_BYTES // 2, PART_BYTES // 2 + 1, PART_BYTES, PART_BYTES + 1]), min_size=1)
)
def test_parts_are_as_large_as_a_frame_may_be(sizes: list[int]) -> None:
    rows = [bytes(size) for size in sizes]
    parts = list(_cut(rows))
    assert [row for part in parts for row in part] == rows
    assert all(len(part) == 1 or sum(map(len, part)) <= PART_BYTES for part in parts)
    for part, after in itertools.pairwise(parts):
        assert sum(map(len, part)) + len(after[0]) > PART_BYTES


def test_parts_have_a_bounded_number_of_messages() -> None:
    assert [len(part) for part in _cut([b"x"] * (2 * PART_MESSAGES + 1))] == [PART_MESSAGES, PART_MESSAGES, 1]


def test_numbers_go_up_over_places_and_batches() -> None:
    last = (1 << 20) - 1
    numbers = [Key("q", batch, 0).number(place) for batch in (0, 1, 2) for place in (0, 1, last)]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 1
    assert Key("q", 5, 3).producer == "spark-q-3"
