"""A page of a queue is refused, or its columns are within its bytes."""

from __future__ import annotations

from array import array
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructField, StructType

from tidegate.errors import ProtocolError
from tidegate.messages import Page, Record
from tidegate.pipeline.columns import MESSAGE_COLUMNS, Columns
from tidegate.queues.records import seal

MESSAGE = StructType([StructField(name, kind) for name, kind in MESSAGE_COLUMNS.items()])
COLUMNS = Columns(MESSAGE, 0, is_strict=False)
edges = st.sampled_from([0, 1, 3, 4, 5, 40, 2**31 - 1, 2**31, 2**32 - 1])


@st.composite
def forged_pages(draw: st.DrawFn) -> Page:
    bodies = draw(st.lists(st.sampled_from([1, "x", {"a": 1.5}, [1, 2], None]), min_size=1, max_size=4))
    sealed = [seal(Record("g", 1.0, msgspec.Raw(msgspec.msgpack.encode(body)), "d", 1, {"h": "v"})) for body in bodies]
    ends = array("I", accumulate(map(len, sealed)))
    records = bytearray(b"".join(sealed))
    for _ in range(draw(st.integers(1, 2))):
        match draw(st.sampled_from(["end", "byte", "cut", "swap"])):
            case "end":
                ends[draw(st.integers(0, len(ends) - 1))] = draw(edges)
            case "byte" if records:
                records[draw(st.integers(0, len(records) - 1))] = draw(st.integers(0, 255))
            case "cut":
                records = records[: draw(st.integers(0, len(records)))]
            case "swap":
                ends.reverse()
    sequences = array("Q", range(1, 1 + draw(st.sampled_from([len(ends), len(ends), len(ends) + 1, 0]))))
    return Page(sequences.tobytes(), ends.tobytes()[draw(st.sampled_from([0, 0, 0, 1])) :], memoryview(bytes(records)))


@given(forged_pages())
def test_a_page_is_refused_or_gives_a_row_for_each_record(page: Page) -> None:
    try:
        batch = COLUMNS.batch(page)
    except ProtocolError:
        return
    assert batch.num_rows == len(page.ends) // 4
    batch.validate(full=True)


def test_records_that_end_behind_the_page_are_refused() -> None:
    sealed = seal(Record("g", 1.0, msgspec.Raw(b"\x01")))
    for end in (len(sealed) + 1, 2**32 - 1, 0):
        with pytest.raises(ProtocolError, match="P303"):
            COLUMNS.batch(Page(bytes(8), end.to_bytes(4, "little"), memoryview(sealed)))
