"""Frames between slices survive a round trip, and other bytes only cause an error."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.cluster.wire import decode, encode
from tidegate.errors import Overloaded, ProtocolError, TidegateError
from tidegate.filters import Filter
from tidegate.frames import HEADER, HEADER_BYTES
from tidegate.index.packing import pack
from tidegate.layers import control, frames
from tidegate.layers.batch import Batch, BatchReader
from tidegate.layers.frames import NUMBERED, LayerFrame
from tidegate.layers.selector import Configuration
from tidegate.layers.subscription_table import connection_point_name

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
packed = st.sampled_from(["*", "a==1", "a<2;b^='x'"]).map(lambda text: pack(Filter.parse(text)))
errors = st.builds(lambda code: Overloaded(code, "full", "wait", retry_after_s=2.0), names)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draws part of the notifications of a batch, so that the batch does not use all bytes that were read."""
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
    list[frames.Refused]: st.lists(st.builds(frames.Refused, names, counts, counts), max_size=3),
    list[control.Entry]: st.lists(st.builds(control.Entry, counts, counts, packed), max_size=3),
    bytes | None: packed | st.none(),
}


@st.composite
def matches(draw: st.DrawFn, notifications: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draws offsets, and the ids that they divide into one part per notification."""
    sizes = draw(st.lists(st.integers(0, 3), min_size=notifications, max_size=notifications))
    offsets = np.cumsum([0, *sizes], dtype=np.int64)
    return offsets, np.array(draw(st.lists(counts, min_size=int(offsets[-1]), max_size=int(offsets[-1]))), np.int64)


def with_matches(kind: type[Any], fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[LayerFrame]:
    def complete(values: dict[str, Any]) -> st.SearchStrategy[LayerFrame]:
        count = len(values["batch"]) if "batch" in values else 2
        return matches(count).map(lambda found: kind(**values, offsets=found[0], ids=found[1]))

    return st.fixed_dictionaries(fields).flatmap(complete)


def frame_of(kind: type[Any]) -> st.SearchStrategy[LayerFrame]:
    hints = get_type_hints(kind)
    fields = {name: STRATEGIES.get(hints[name], st.from_type(hints[name])) for name in kind.__struct_fields__}
    if kind is control.Buried:
        fields["connection_point"] = st.integers(1, 999).map(connection_point_name)
    if "offsets" in fields:
        return with_matches(kind, {name: each for name, each in fields.items() if name not in ("offsets", "ids")})
    return st.builds(kind, **fields)


def plain(value: Any) -> Any:
    """Returns a value that can be compared."""
    match value:
        case Batch():
            return value.publisher, value.first, [*value.notifications()]
        case np.ndarray():
            return value.tolist()
        case Overloaded():
            return value.code, value.message, value.remedy, value.retry_after_s
    return value


def test_the_numbers_on_the_wire_stay_as_they_are() -> None:
    """Slices of two versions may meet: a number must not get another meaning."""
    names = """
        Submit SubmitAck Publish Body Partial Deliver DeliverAck Ack Change ChangeOk ChangeRefused
        Fence Prepare Switch Drain Release Strict Go End Retire Reply Marker Share ReadShare Buried Suspect
        Load AskLoads Loads
    """
    assert [(number, kind.__name__) for number, kind in sorted(NUMBERED.items())] == list(enumerate(names.split()))


def test_a_frame_is_declared_once() -> None:
    """Its handler follows from its name, and no two frames share a number."""
    assert (frames.SubmitAck.handler, control.NextPart.handler) == ("on_submit_ack", "on_next_part")
    with pytest.raises(AssertionError, match="number of another frame"):
        type("Intruder", (LayerFrame,), {"number": frames.Submit.number})


@pytest.mark.parametrize("kind", NUMBERED.values(), ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_frames_come_out_as_they_went_in(kind: type[Any], data: st.DataObject) -> None:
    frame = data.draw(frame_of(kind))
    encoded = encode(frame)
    length, number, *_rest = HEADER.unpack_from(encoded)
    assert length == len(encoded) - HEADER_BYTES
    found: Any = decode(number, memoryview(encoded)[HEADER_BYTES:])
    assert type(found) is kind
    for name in kind.__struct_fields__:
        assert plain(getattr(found, name)) == plain(getattr(frame, name))


@given(st.integers(0, 255), st.binary(max_size=200))
def test_other_bytes_decode_to_a_frame_that_encodes_again_or_are_an_error(number: int, body: bytes) -> None:
    try:
        frame: Any = decode(number, memoryview(body))
    except ProtocolError:
        return
    encoded = encode(frame)
    again: Any = decode(number, memoryview(encoded)[HEADER_BYTES:])
    assert type(again) is type(frame)
    for name in type(frame).__struct_fields__:
        assert plain(getattr(again, name)) == plain(getattr(frame, name))


def test_a_batch_whose_notifications_lie_elsewhere_is_an_error() -> None:
    batch = BatchReader().read_array("p", 1, msgspec.msgpack.encode([{"a": 1}]))
    encoded = bytearray(encode(frames.Submit(batch)))
    encoded[-4:] = (1000).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="outside"):
        decode(0, memoryview(encoded)[HEADER_BYTES:])
