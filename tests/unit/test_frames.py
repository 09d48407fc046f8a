"""Frames are decoded completely and in order, however the network splits them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.frames import (
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    LONG_FRAME_BYTES,
    Kind,
    PartialFrame,
    encode_frame,
    split_frames,
)

bodies = st.lists(st.binary(max_size=40), max_size=8)


@given(bodies, st.lists(st.integers(1, 60), min_size=1))
def test_frames_come_out_as_they_went_in_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(Kind.PUBLISH, body, number) for number, body in enumerate(bodies))
    partial, seen, position, turn = PartialFrame(), [], 0, 0
    while position < len(stream):
        read = stream[position : position + cuts[turn % len(cuts)]]
        position, turn = position + len(read), turn + 1
        data, consumed = partial.add(memoryview(read)), 0
        for kind, sequence, start, consumed in split_frames(data, FRAME_BYTES_MAX):
            seen.append(encode_frame(Kind(kind), None, sequence)[4:] + data[start:consumed])
        if data:
            partial.keep(memoryview(data)[consumed:])
    assert seen == [
        encode_frame(Kind.PUBLISH, None, number)[4:] + encode_frame(Kind.PUBLISH, body)[16:]
        for number, body in enumerate(bodies)
    ]


@given(st.lists(st.sampled_from([0, 40, LONG_FRAME_BYTES - 3, LONG_FRAME_BYTES, 200_000]), max_size=5), st.data())
def test_a_long_frame_is_read_to_where_it_belongs(sizes: list[int], data: st.DataObject) -> None:
    frames = [encode_frame(Kind.REPLY, bytes([number]) * size, number) for number, size in enumerate(sizes)]
    stream, position = b"".join(frames), 0
    partial, buffer, seen = PartialFrame(), memoryview(bytearray(100_000)), []
    while position < len(stream):
        target = partial.room() or buffer
        count = min(len(target), len(stream) - position, data.draw(st.sampled_from([1, 16, 17, 5000, 1_000_000])))
        target[:count] = stream[position : position + count]
        position += count
        whole, consumed = partial.take(buffer, count), 0
        for _kind, _sequence, start, consumed in split_frames(whole, FRAME_BYTES_MAX):
            seen.append(whole[start - HEADER_BYTES : consumed])
            assert whole.readonly
        if whole:
            partial.keep(whole[consumed:])
    assert seen == frames


def test_what_was_kept_is_forgotten_when_it_is_cleared() -> None:
    partial = PartialFrame()
    frame = encode_frame(Kind.PING)
    assert not partial.add(memoryview(frame[:10]))
    partial.clear()
    assert partial.add(memoryview(frame)) == frame
