"""Columns that the kernel makes from pages, compared with the records themselves."""

from __future__ import annotations

import datetime
from array import array
from itertools import accumulate
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tidegate.errors import ConfigError, ProtocolError, QueueError
from tidegate.messages import Page, Record
from tidegate.pipeline.columns import MESSAGE_COLUMNS, Columns, check_schema
from tidegate.queues.records import seal

MESSAGE = StructType([StructField(name, kind) for name, kind in MESSAGE_COLUMNS.items()])
texts = st.text(max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
records = st.builds(
    Record,
    group=texts,
    enqueued_at=st.floats(0, 4e9),
    body=values.map(lambda value: msgspec.Raw(msgspec.msgpack.encode(value))),
    device=texts,
    sequence=st.integers(0, 2**63 - 1),
    headers=st.dictionaries(texts, texts, max_size=3),
)


def page_of(kept: list[Record], first: int = 1) -> Page:
    sealed = [seal(record) for record in kept]
    ends = array("I", accumulate(map(len, sealed)))
    return Page(array("Q", range(first, first + len(kept))).tobytes(), ends.tobytes(), memoryview(b"".join(sealed)))


def record(body: Any, group: str = "", headers: dict[str, str] | None = None) -> Record:
    return Record(group, 0.0, msgspec.Raw(msgspec.msgpack.encode(body)), headers=headers or {})


def rows(schema: StructType, *bodies: Any, is_strict: bool = False) -> list[dict[str, Any]]:
    batch = Columns(schema, 3, is_strict=is_strict).batch(page_of([record(body) for body in bodies]))
    found: list[dict[str, Any]] = batch.to_pylist()
    return found


def typed(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


@given(st.lists(records, max_size=8))
def test_every_part_of_a_record_is_a_column(kept: list[Record]) -> None:
    batch: pa.RecordBatch = Columns(MESSAGE, 3, is_strict=False).batch(page_of(kept, first=7))
    batch.validate(full=True)
    assert batch.schema.names == list(MESSAGE_COLUMNS)
    for index, (row, each) in enumerate(zip(batch.to_pylist(), kept, strict=True)):
        came = row["_enqueued_at"].timestamp()
        assert abs(came - each.enqueued_at) < 2e-6
        assert row | {"_enqueued_at": None} == {
            "_queue": 3,
            "_sequence": 7 + index,
            "_enqueued_at": None,
            "_group": each.group,
            "_device": each.device,
            "_device_sequence": each.sequence,
            "_headers": list(each.headers.items()),
            "_body": bytes(each.body),
            "_error": None,
        }


def test_a_body_that_the_kernel_does_not_take_is_kept_as_it_is() -> None:
    """A producer may have written a text that is not UTF-8. The rest of the page is not affected."""
    kept = [record(1, headers={"a": "b"}), record(0), record("x", group="g")]
    kept[1].body = msgspec.Raw(b"\xa2\xff\xff")
    found = Columns(MESSAGE, 0, is_strict=False).batch(page_of(kept)).to_pylist()
    assert [row["_body"] for row in found] == [b"\x01", b"\xa2\xff\xff", b"\xa1x"]
    assert [row["_headers"] for row in found] == [[("a", "b")], [], []]
    assert [row["_group"] for row in found] == ["", "", "g"]
    errors = [row["_error"] is None for row in Columns(
        typed(NO2=DoubleType(), _error=StringType()), 0, is_strict=False
    ).batch(page_of(kept)).to_pylist()]  # fmt: skip
    assert errors == [False, False, False]


@given(st.lists(records, min_size=1, max_size=3), st.data())
def test_a_page_that_is_cut_off_is_never_read_beyond_its_end(kept: list[Record], data: st.DataObject) -> None:
    """The broker sends complete records. Other input must not make the kernel read beyond the page."""
    whole = page_of(kept)
    cut = data.draw(st.integers(0, len(whole.records) - 1))
    ends = [min(end, cut) for end in array("I", whole.ends)]
    page = Page(whole.sequences, array("I", ends).tobytes(), whole.records[:cut])
    with pytest.raises(ProtocolError, match="P303"):
        Columns(MESSAGE, 0, is_strict=False).batch(page)


class TestBodies:
    def test_attributes_are_typed_columns_and_what_is_missing_is_null(self) -> None:
        schema = typed(**{"station": StringType(), "PM2.5": DoubleType(), "n": LongType()})
        found = rows(schema, {"station": "28", "PM2.5": 3, "n": 1, "other": []}, {"n": None}, {})
        assert found == [
            {"station": "28", "PM2.5": 3.0, "n": 1},
            {"station": None, "PM2.5": None, "n": None},
            {"station": None, "PM2.5": None, "n": None},
        ]

    def test_times_are_read_from_texts_in_utc(self) -> None:
        found = rows(
            typed(time=TimestampType()), {"time": "2026-01-02T03:04:05Z"}, {"time": "2026-01-02T05:04:05+02:00"}
        )
        assert {row["time"] for row in found} == {datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)}

    def test_lists_and_maps(self) -> None:
        schema = typed(a=ArrayType(LongType()), m=MapType(StringType(), DoubleType()))
        [row] = rows(schema, {"a": [1, None], "m": {"x": 1.5}})
        assert row == {"a": [1, None], "m": [("x", 1.5)]}

    @pytest.mark.parametrize("body", [{"NO2": "much"}, [1], 5, "text", None])
    def test_what_does_not_fit_gives_nulls_and_says_why(self, body: Any) -> None:
        schema = typed(NO2=DoubleType(), station=StringType(), _error=StringType())
        good, bad = rows(schema, {"NO2": 1.0, "station": "a"}, body)
        assert good == {"NO2": 1.0, "station": "a", "_error": None}
        assert (bad["NO2"], bad["station"]) == (None, None)
        assert "Expected" in bad["_error"]

    def test_or_fails_when_it_shall(self) -> None:
        with pytest.raises(QueueError, match=r"Q913.*message 3/2.*NO2"):
            rows(typed(NO2=DoubleType()), {"NO2": 1}, {"NO2": "much"}, is_strict=True)


class TestSchema:
    @pytest.mark.parametrize(
        ("schema", "reason"),
        [
            (typed(_sequence=StringType()), "_sequence has the type string; declare it as bigint"),
            (typed(_nothing=StringType()), "_nothing is not a message column"),
            (typed(price=DecimalType()), "price has the type decimal"),
        ],
    )
    def test_columns_that_no_message_has(self, schema: StructType, reason: str) -> None:
        with pytest.raises(ConfigError, match=f"C420.*{reason}"):
            check_schema(schema)
