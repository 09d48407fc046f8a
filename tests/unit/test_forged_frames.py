"""Batches, matches and filters from another process are refused, or are safe: no kernel accesses memory outside its
arrays because of them.

`test_kernels` also runs these laws with bounds checks, because accepted bytes go through kernels that trust them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import filters, notifications

from tidegate.cluster.channels import NAME, Channels
from tidegate.cluster.wire import decode
from tidegate.errors import ForeignFrame
from tidegate.filters import CONSTRAINTS_MAX, VALUES_MAX, Filter
from tidegate.frames import HEADER
from tidegate.hosts.carrier import Carrier
from tidegate.index import SubscriptionIndex, packed_kernel, record_kernel
from tidegate.index.packing import check_entries, check_packed, pack
from tidegate.layers import frames
from tidegate.layers.batch import BATCH_NOTIFICATIONS_MAX, Batch, BatchReader
from tidegate.layers.control import Buried, Fence
from tidegate.layers.delivery_writer import DeliveryWriter
from tidegate.layers.exit_point import ExitPoint, by_connection_point, union
from tidegate.layers.frames import LayerFrame
from tidegate.layers.matcher import Matcher
from tidegate.layers.selector import Configuration
from tidegate.layers.subscription_table import SubscriptionTable
from tidegate.notification import check

SUBMIT, PARTIAL, DELIVER, CHANGE = (
    each.number for each in (frames.Submit, frames.Partial, frames.Deliver, frames.Change)
)
INDEX = SubscriptionIndex(seed=1)
for place, text in enumerate(("*", "a==1", "b", "a<5;b^=x", "'my attr'*=1", "a==1,'a',true")):
    INDEX.add(place, Filter.parse(text))

edges = st.sampled_from([0, 1, 2, 7, 8, 2**31 - 1, 2**31, 2**32 - 1])
lies = st.sampled_from([-(2**63), -1, 0, 1, 2, 5, 2**31, 2**32, 2**62, 2**63 - 1]) | st.integers(-3, 9)


def on_the_wire(numbers: list[int], kind: str) -> bytes:
    return np.array(numbers, kind).tobytes()


@st.composite
def forged_batches(draw: st.DrawFn) -> list[Any]:
    """Draws an encoded batch of which some parts, or none, were changed."""
    maps = [msgspec.msgpack.encode(each) for each in draw(st.lists(notifications(), min_size=1, max_size=4))]
    data = bytearray(b"".join(maps))
    stops = np.cumsum([len(each) for each in maps]).tolist()
    starts = [0, *stops[:-1]]
    for _ in range(draw(st.integers(0, 2))):
        match draw(st.sampled_from(["start", "stop", "byte", "fewer", "swap", "cut"])):
            case "start":
                starts[draw(st.integers(0, len(starts) - 1))] = draw(edges)
            case "stop":
                stops[draw(st.integers(0, len(stops) - 1))] = draw(edges)
            case "byte" if data:
                data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
            case "fewer":
                starts = starts[: draw(st.integers(1, len(starts)))]
            case "swap":
                starts.reverse()
            case "cut":
                data = data[: draw(st.integers(0, len(data)))]
    first = draw(st.sampled_from([1, 1, 1, 0, 2**62, 2**63, 2**64 - 1, -1]))
    return ["p", first, bytes(data), on_the_wire(starts, "<u4"), on_the_wire(stops, "<u4")]


def decode_frame(number: int, fields: list[Any]) -> Any:
    return decode(number, memoryview(msgspec.msgpack.encode(fields)))


def lies_within_its_bytes(forged: list[Any]) -> None:
    """Checks that notifications are within the bytes. Their content may be anything, because nothing decodes it."""
    try:
        batch: Batch = decode_frame(frames.Body.number, ["access-point-1", 1, 1, 1, forged]).batch
    except ForeignFrame:
        return
    position = 0
    for start, stop in zip(batch.starts.tolist(), batch.stops.tolist(), strict=True):
        assert position <= start <= stop <= len(batch.data)
        position = stop


@given(forged_batches())
def test_a_batch_is_refused_or_holds_what_the_door_lets_in(forged: list[Any]) -> None:
    try:
        batch: Batch = decode_frame(SUBMIT, [forged]).batch
    except ForeignFrame:
        lies_within_its_bytes(forged)
        return
    assert 0 <= batch.first <= 2**62
    assert 0 < len(batch) == len(batch.stops)
    for notification in batch.notifications():
        check(notification)
    offsets, ids = INDEX.match_batch(batch)
    expected = [set(found) for found in INDEX.match(batch.notifications())]
    assert [set(ids[offsets[i] : offsets[i + 1]].tolist()) for i in range(len(batch))] == expected


@given(st.lists(lies, max_size=5), st.lists(lies, max_size=5), st.integers(0, 7), st.integers(1, 3))
def test_matches_are_refused_or_can_be_joined_and_delivered(
    offsets: list[int], ids: list[int], cut: int, notifications_in_batch: int
) -> None:
    reader, table = BatchReader(), SubscriptionTable(connection_point=1)
    ours = [table.add(outbox=place % 2, client_id=place) for place in range(3)]
    body = msgspec.msgpack.encode([{"a": 1}] * notifications_in_batch)
    batch = reader.read_array("p", 1, body)
    data = bytes(batch.data)
    sent = ["p", 1, data, on_the_wire(batch.starts.tolist(), "<u4"), on_the_wire(batch.stops.tolist(), "<u4")]
    cuts = on_the_wire(offsets, "<i8")
    matches = [cuts[: len(cuts) - cut], on_the_wire([*ids, *ours], "<i8")]
    try:
        deliver: frames.Deliver = decode_frame(DELIVER, ["access-point-1", 1, 1, sent, *matches])
    except ForeignFrame:
        pass
    else:
        written = list(DeliveryWriter(table).frames(deliver.batch, deliver.offsets, deliver.ids, 2))
        assert all(outbox in (0, 1) for outbox, _frame, _count in written)
    try:
        partial: frames.Partial = decode_frame(PARTIAL, ["access-point-1", 1, 1, 1, "matcher-1", *matches])
    except ForeignFrame:
        return
    joined = union({"matcher-1": (partial.offsets, partial.ids), "matcher-2": (partial.offsets, partial.ids)})
    assert len(joined[0]) == len(partial.offsets)
    assert sum(len(found) for _name, (_offsets, found) in by_connection_point(*joined)) == len(joined[1])


@given(filters())
def test_every_filter_of_the_language_passes(each: Filter) -> None:
    check_packed(pack(each), 1)
    check_entries([pack(each), pack(each)])


def test_the_limits_are_those_of_the_language() -> None:
    assert packed_kernel.VALUES_MAX == VALUES_MAX
    assert record_kernel.CONSTRAINTS_MAX == CONSTRAINTS_MAX
    widest = f"a=={','.join(map(str, range(VALUES_MAX)))}"
    longest = "a==" + "\U0001f600" * 4000
    for text in (widest, longest, ";".join(f"a{number}>{number}.5" for number in range(CONSTRAINTS_MAX))):
        check_packed(pack(Filter.parse(text)), 1)


@st.composite
def forged_filters(draw: st.DrawFn) -> bytes:
    packed = bytearray(pack(draw(filters())))
    for _ in range(draw(st.integers(0, 3))):
        packed[draw(st.integers(0, len(packed) - 1))] = draw(st.integers(0, 255))
    return bytes(packed[: draw(st.integers(1, len(packed)))] if draw(st.booleans()) else packed)


values = st.sampled_from([0, 1, -1, 1.5, float("nan"), float("inf"), 2**53 + 1, "", "x", "é", True, None, b"x", [1]])
constraints = st.lists(st.sampled_from(["a", "", "n" * 256]) | values, max_size=2).flatmap(
    lambda head: st.lists(values, max_size=4).map(lambda operands: [*head, *operands])
) | st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 13), values, values).map(list)


@given(forged_filters() | st.lists(constraints, max_size=4).map(msgspec.msgpack.encode) | st.binary(max_size=60))
def test_a_packed_filter_is_refused_or_comes_and_goes_like_any_other(packed: bytes) -> None:
    index = SubscriptionIndex(seed=1)
    index.add(7, Filter.parse("a==1"))
    try:
        index.add_packed(np.array([8], np.int64), packed)
    except ForeignFrame:
        assert len(index) == 1
        return
    index.match([{"a": 1, "b": "x"}, {"a": "é"}, {"b": True}])
    index.filter_of(8)
    index.remove(8)
    statistics = index.statistics()
    assert (statistics.subscriptions, statistics.filters, statistics.entries, statistics.attributes) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    "constraint",
    [
        ["a", 12],
        ["a", 0],
        ["a", 10, 1],
        ["a", 2, True],
        ["a", 2, 1, 2],
        ["a", 6, 1],
        ["a", 6, 1, "x"],
        ["a", 7, 1],
        ["a", 4, float("nan")],
        ["a", 0, 2, 1],
        ["a", 0, 1, 1],
        ["a", 0, "x", 1],
        ["", 10],
        ["n" * 256, 10],
        [1, 10],
        ["a"],
        [],
        ["a", 0, *range(VALUES_MAX + 1)],
    ],
    ids=str,
)
def test_a_constraint_that_the_language_does_not_have_is_refused(constraint: list[Any]) -> None:
    with pytest.raises(ForeignFrame, match="P340"):
        check_packed(msgspec.msgpack.encode([constraint]), 1)
    with pytest.raises(ForeignFrame):
        decode_frame(CHANGE, [1, 1, msgspec.msgpack.encode([constraint])])


def test_too_many_constraints_and_too_few_filters_are_refused() -> None:
    many = [[f"a{number}", 10] for number in range(CONSTRAINTS_MAX + 1)]
    one = pack(Filter.parse("a"))
    for packed, count in ((msgspec.msgpack.encode(many), 1), (one, 2), (one + one, 1), (one, 0), (b"", 1)):
        with pytest.raises(ForeignFrame):
            check_packed(packed, count)
    with pytest.raises(ForeignFrame):  # together they are two filters, but separately they are not
        check_entries([one[:2], one[2:] + one])


def test_a_batch_of_too_many_is_refused() -> None:
    count = BATCH_NOTIFICATIONS_MAX + 1
    one = msgspec.msgpack.encode({"a": 1})
    starts = np.arange(count) * len(one)
    forged = [
        "p", 1, one * count, on_the_wire(starts.tolist(), "<u4"), on_the_wire((starts + len(one)).tolist(), "<u4"),
    ]  # fmt: skip
    with pytest.raises(ForeignFrame, match="4097"):
        decode_frame(SUBMIT, [forged])


class OneSlice(Carrier):
    """A process with one slice, which records errors that would have ended it."""

    def __init__(self, part: Any) -> None:
        super().__init__(lambda: 0.0, self._fail)
        self.failures: list[Exception] = []
        self.sent: list[tuple[str, LayerFrame]] = []
        self.add(part)

    def _fail(self, error: Exception) -> None:
        self.failures.append(error)

    def _hand_over(self, source: str, address: str, frame: LayerFrame) -> None:
        self.sent.append((address, frame))


CONFIGURATION = Configuration(1, ("access-point-1",), ("matcher-1",), ("exit-point-1",))
NOTIFICATION = msgspec.msgpack.encode({"a": 1})
GOOD = ["p", 1, NOTIFICATION, on_the_wire([0], "<u4"), on_the_wire([len(NOTIFICATION)], "<u4")]
TWO = ["p", 1, NOTIFICATION * 2, on_the_wire([0, 4], "<u4"), on_the_wire([4, 8], "<u4")]
BAD = ["p", 1, NOTIFICATION, on_the_wire([0], "<u4"), on_the_wire([2**32 - 1], "<u4")]


def name(number: int, text: bytes) -> bytes:
    return HEADER.pack(len(text), NAME, 0, 0, number) + text


def frame(kind: type[Any], fields: list[Any], route: int = 1) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return HEADER.pack(len(body), kind.number, 0, 0, route) + body


FORGED = {
    "a batch outside of its bytes": [frame(frames.Publish, ["access-point-1", 1, 1, 1, BAD, "exit-point-1"])],
    "a frame for another kind of slice": [frame(frames.SubmitAck, ["p", 1])],
    "a number without a name": [frame(frames.SubmitAck, ["p", 1], route=7 << 32)],
    "a name that is too long": [name(2, b"n" * 300)],
    "a name that is not text": [name(2, b"\xff")],
    "an unknown epoch": [frame(frames.Body, ["access-point-1", 1, 9, 1, GOOD])],
    "a matcher that does not exist": [
        frame(frames.Partial, ["access-point-1", 1, 1, 1, "matcher-9", on_the_wire([0, 0], "<i8"), b""])
    ],
    "an answer about other notifications": [
        frame(frames.Body, ["access-point-1", 1, 1, 1, TWO]),
        frame(frames.Partial, ["access-point-1", 1, 1, 1, "matcher-1", on_the_wire([0, 0], "<i8"), b""]),
    ],
    "a batch that comes again": [frame(frames.Body, ["access-point-1", 1, 1, 0, GOOD])],
    "no Connection Point": [frame(Buried, ["connection-point-x"])],
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED.keys())
@pytest.mark.parametrize("kind", [Matcher, ExitPoint])
def test_a_forged_frame_closes_its_channel_and_no_other(
    kind: type[Matcher | ExitPoint], forged: list[bytes], tmp_path: Path
) -> None:
    """The process continues, and its supervisor sees no error. A frame for another kind of slice counts as forged."""

    async def scenario() -> None:
        process = OneSlice(kind("here", CONFIGURATION))
        broken: list[set[str]] = []
        channels = Channels(lambda source, address, frame: process.carry([(address, frame)], source), broken.append)
        await channels.listen(f"unix:{tmp_path / 'socket'}")
        _good, good_writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        bad, bad_writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        bad_writer.write(name(0, b"forger") + name(1, b"here") + b"".join(forged))
        assert await asyncio.wait_for(bad.read(), 10) == b""
        assert not process.failures
        good_writer.write(name(0, b"coordinator-1") + name(1, b"here") + frame(Fence, [1, 1, ["somebody"]]))
        while not process.sent:
            await asyncio.sleep(0.005)
        assert process.sent[0][0] == "coordinator-1"
        good_writer.close()
        bad_writer.close()
        await channels.close()

    asyncio.run(scenario())
