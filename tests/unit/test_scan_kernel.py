"""The scan kernel accepts exactly what `notification.check` accepts, and no bytes can make it read out of bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.errors import NotificationError, ProtocolError
from tidegate.frames import HEADER, Kind, encode_frame
from tidegate.layers.batch import BATCH_NOTIFICATIONS_MAX, BatchReader
from tidegate.notification import ATTRIBUTES_MAX, INTEGER_MAX, NAME_BYTES_MAX, PAYLOAD, TEXT_BYTES_MAX, check

READER = BatchReader()

names = st.text(min_size=0, max_size=8) | st.sampled_from(
    ["NO2", "name", PAYLOAD, "$x", "n" * 255, "n" * 256, "é" * 127]
)
values = (
    st.text(max_size=20)
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([INTEGER_MAX, -INTEGER_MAX, INTEGER_MAX + 1, -INTEGER_MAX - 1, 0, -1, 127, 128, 255, 256, 65_536])
    | st.floats(width=64)
    | st.floats(width=32)
    | st.booleans()
    | st.none()
    | st.binary(max_size=8)
    | st.lists(st.integers(0, 300), max_size=3)
    | st.dictionaries(st.text(max_size=3), st.booleans(), max_size=2)
)
notifications = st.dictionaries(names, values, max_size=5)


def verdict(notification: dict[str, Any]) -> str | None:
    try:
        check(notification)
    except NotificationError as error:
        return error.code
    return None


@given(st.lists(notifications, max_size=6), st.integers(1, 1000))
@example([{}], 1)
@example([{str(i): i for i in range(ATTRIBUTES_MAX)}, {str(i): i for i in range(ATTRIBUTES_MAX + 1)}], 1)
@example([{"a": "x" * TEXT_BYTES_MAX}, {"a": "x" * (TEXT_BYTES_MAX + 1)}], 1)
@example([{"a": "é" * 100, "n" * NAME_BYTES_MAX: 1}], 1)
def test_it_accepts_exactly_what_check_accepts(many: list[dict[str, Any]], first: int) -> None:
    read = READER.read_frames("p", encode_frame(Kind.PUBLISH, many, first), 0, first)
    assert read.error is None
    expected = {first + i: code for i, each in enumerate(many) if (code := verdict(each))}
    assert {refusal.sequence: refusal.code for refusal in read.refusals} == expected
    accepted = {batch.first + i: each for batch in read.batches for i, each in enumerate(batch.notifications())}
    assert accepted == {first + i: each for i, each in enumerate(many) if first + i not in expected}
    assert read.through == first + len(many) - 1


@given(st.lists(st.lists(notifications, min_size=1, max_size=3), min_size=1, max_size=4))
def test_consecutive_frames_of_a_read_are_one_walk(frames: list[list[dict[str, Any]]]) -> None:
    data, sequence = b"", 1
    for many in frames:
        data += encode_frame(Kind.PUBLISH, many, sequence)
        sequence += len(many)
    read = READER.read_frames("p", data, 0, 1)
    assert (read.position, read.through, read.error) == (len(data), sequence - 1, None)


@pytest.mark.parametrize("follows", [encode_frame(Kind.PING), encode_frame(Kind.PUBLISH, [{"a": 1}], 7), b"\x05\x00"])
def test_the_walk_ends_where_another_kind_another_sequence_or_half_a_frame_follows(follows: bytes) -> None:
    frame = encode_frame(Kind.PUBLISH, [{"a": 1}], 1)
    read = READER.read_frames("p", frame + follows, 0, 1)
    assert (read.position, read.through, read.error) == (len(frame), 1, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x91\x81\xa1",
        b"\x92\x80",
        b"\x91\x80\x00",
        b"\x91\xc3",
        b"\xdd\xff\xff\xff\xff",
        b"\x91\xdf",
    ],
)
def test_a_malformed_frame_leaves_the_good_ones_before_it(body: bytes) -> None:
    good = encode_frame(Kind.PUBLISH, [{"a": 1}, {"a": 2}], 1)
    read = READER.read_frames("p", good + HEADER.pack(len(body), Kind.PUBLISH, 0, 0, 3) + body, 0, 1)
    assert isinstance(read.error, ProtocolError)
    assert [list(batch.notifications()) for batch in read.batches] == [[{"a": 1}, {"a": 2}]]


def test_an_attribute_that_occurs_twice_is_refused() -> None:
    twice = b"\x91\x82" + msgspec.msgpack.encode("a") + b"\x01" + msgspec.msgpack.encode("a") + b"\x02"
    with pytest.raises(NotificationError, match="N210"):
        READER.read_array("p", 1, twice)


def test_a_frame_of_too_many_notifications_is_an_error_and_not_a_loop() -> None:
    read = READER.read_frames("p", encode_frame(Kind.PUBLISH, [{"a": 1}] * (BATCH_NOTIFICATIONS_MAX + 1), 1), 0, 1)
    assert read.error is not None
    assert read.error.code == "P305"


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    agrees_with_msgspec(body)


@given(st.lists(notifications, min_size=1, max_size=3), st.data())
def test_any_damaged_frame_is_read_or_refused(many: list[dict[str, Any]], data: st.DataObject) -> None:
    body = bytearray(msgspec.msgpack.encode(many))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    agrees_with_msgspec(bytes(body[: data.draw(st.integers(0, len(body)))]))


def agrees_with_msgspec(body: bytes) -> None:
    """Checks that a MessagePack decoder reads everything that the kernel accepts, and that `check` accepts it."""
    try:
        batch = READER.read_array("p", 1, body)
    except (NotificationError, ProtocolError):
        return
    decoded = msgspec.msgpack.decode(body)
    assert list(batch.notifications()) == decoded
    for each in decoded:
        check(each)
