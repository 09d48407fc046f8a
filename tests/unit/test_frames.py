"""Frames come out whole and in order however the network cuts them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.frames import FRAME_BYTES_MAX, Kind, PartialFrame, encode_frame, split_frames

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


def test_what_was_kept_is_forgotten_when_it_is_cleared() -> None:
    partial = PartialFrame()
    frame = encode_frame(Kind.PING)
    assert not partial.add(memoryview(frame[:10]))
    partial.clear()
    assert partial.add(memoryview(frame)) == frame
