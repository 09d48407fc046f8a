"""Frames between slices come out as they went in, and nothing else comes out of other bytes than an error."""

from __future__ import annotations

import contextlib
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.errors import Overloaded, ProtocolError, TidegateError
from tidegate.frames import HEADER, HEADER_BYTES
from tidegate.layers import control, frames
from tidegate.layers.batch import Batch, BatchReader
from tidegate.layers.frames import LayerFrame
from tidegate.layers.selector import Configuration
from tidegate.layers.wire import KINDS, decode, encode

names = st.text(min_size=1, max_size=12)
counts = st.integers(0, 2**62)
configurations = st.builds(
    Configuration,
    counts,
    st.tuples(names),
    st.tuples(names, names),
    st.tuples(names),
    counts,
)
transactions = st.builds(
    control.Transaction,
    configurations,
    configurations,
    st.tuples(configurations, configurations),
    st.frozensets(names, max_size=3),
    st.booleans(),
    st.booleans(),
)
maps = st.lists(st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 9), min_size=1), min_size=1, max_size=5)
numbers = st.lists(counts, max_size=6).map(lambda values: np.array(values, np.int64))
errors = st.builds(lambda code: Overloaded(code, "full", "wait", retry_after_s=2.0), names)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Some notifications of a batch, so that its bytes are not all that was read."""
    whole = BatchReader().read_array(draw(names), draw(st.integers(1, 99)), msgspec.msgpack.encode(draw(maps)))
    start = draw(st.integers(0, len(whole) - 1))
    return whole.part(start, draw(st.integers(start + 1, len(whole))))


STRATEGIES: dict[Any, st.SearchStrategy[Any]] = {
    Batch: batches(),
    NDArray[np.int64]: numbers,
    TidegateError: errors,
    control.Transaction: transactions,
    Configuration: configurations,
    str: names,
    int: counts,
    float: st.floats(allow_nan=False),
    tuple[int, ...]: st.lists(counts, max_size=5).map(tuple),
    dict[str, frames.Load]: st.dictionaries(names, st.builds(frames.Load, st.floats(0, 9), st.floats(0, 9), counts)),
    dict[str, int]: st.dictionaries(names, counts, max_size=3),
    dict[str, dict[str, int]]: st.dictionaries(names, st.dictionaries(names, counts, max_size=3), max_size=3),
    list[control.Entry]: st.lists(st.builds(control.Entry, counts, counts, st.binary(max_size=9)), max_size=3),
}


def frame_of(kind: type[Any]) -> st.SearchStrategy[LayerFrame]:
    hints = get_type_hints(kind)
    fields = {name: STRATEGIES.get(hints[name], st.from_type(hints[name])) for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


def plain(value: Any) -> Any:
    """Something that can be compared."""
    match value:
        case Batch():
            return value.publisher, value.first, [*value.notifications()]
        case np.ndarray():
            return value.tolist()
        case Overloaded():
            return value.code, value.message, value.remedy, value.retry_after_s
    return value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_frames_come_out_as_they_went_in(kind: type[Any], data: st.DataObject) -> None:
    frame = data.draw(frame_of(kind))
    encoded = encode(frame)
    length, number, *_rest = HEADER.unpack_from(encoded)
    assert length == len(encoded) - HEADER_BYTES
    found = decode(number, memoryview(encoded)[HEADER_BYTES:])
    assert type(found) is kind
    for name in kind.__struct_fields__:
        assert plain(getattr(found, name)) == plain(getattr(frame, name))


@given(st.integers(0, 255), st.binary(max_size=200))
def test_other_bytes_are_an_error(number: int, body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        encode(decode(number, memoryview(body)))


def test_a_batch_whose_notifications_lie_elsewhere_is_an_error() -> None:
    batch = BatchReader().read_array("p", 1, msgspec.msgpack.encode([{"a": 1}]))
    encoded = bytearray(encode(frames.Submit(batch)))
    encoded[-4:] = (1000).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="outside"):
        decode(0, memoryview(encoded)[HEADER_BYTES:])
