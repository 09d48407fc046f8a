"""The kernels' reader of MessagePack agrees with an encoder, and notices every value that is cut short."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.kernels import msgpack_kernel as m
from tidegate.kernels.bytes_kernel import Bytes
from tidegate.kernels.intrinsic_kernel import silent_arithmetic

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
VALUES = st.recursive(
    SCALARS,
    lambda values: st.lists(values, max_size=20) | st.dictionaries(st.text(max_size=5), values, max_size=20),
    max_leaves=30,
)


def _array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


@given(VALUES)
def test_a_value_ends_where_the_encoder_ended_it_and_no_part_of_it_is_a_value(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    followed = _array(data + b"\xc1")
    assert m.skip_value(followed, 0, len(followed)) == len(data)
    for end in range(len(data)):
        assert m.skip_value(followed, 0, end) == m.MALFORMED


@pytest.mark.parametrize("tag", range(256))
def test_every_tag_followed_by_zeros_has_the_size_of_the_specification(tag: int) -> None:
    data = _array(bytes([tag]) + bytes(64))
    if tag == m.NEVER_USED:
        expected = m.MALFORMED
    elif tag in (0xC7, 0xC8, 0xC9):  # ext: its type, and no bytes
        expected = 2 + (1 << tag - 0xC7)
    elif 0xD4 <= tag <= 0xD8:  # fixext
        expected = 2 + (1 << tag - 0xD4)
    else:
        body = bytes([tag]) + bytes(64)
        sizes = (size for size in range(1, 65) if _is_value(body[:size]))
        expected = next(sizes)
    assert m.skip_value(data, 0, len(data)) == expected


def _is_value(data: bytes) -> bool:
    try:
        msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, TypeError):
        return _is_map_with_equal_keys(data)
    return True


def _is_map_with_equal_keys(data: bytes) -> bool:
    return 0x80 < data[0] < 0x90 and len(data) == 1 + 2 * (data[0] & 15)


@given(st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False))
def test_a_number_is_read_as_the_nearest_double(number: float) -> None:
    data = msgspec.msgpack.encode(number)
    with silent_arithmetic():
        assert m.read_number(_array(data + bytes(8)), 0) == (float(number), len(data))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_single_is_read_as_the_same_double(number: float) -> None:
    with silent_arithmetic():
        read = m.read_number(_array(b"\xca" + struct.pack(">f", number) + bytes(8)), 0)
    assert read == (number, 5)
    assert np.signbit(read[0]) == np.signbit(number)
