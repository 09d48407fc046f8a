"""MessagePack for kernels: the tags of its types, and how values are read without making Python objects.

A value is a tag, for some types a length field, and then bytes or further values. `_LAYOUT` describes this for each
tag. Names and numbers are those of https://github.com/msgpack/msgpack/blob/master/spec.md.

There are two kinds of readers. Those that take an `end` return MALFORMED unless the value is complete before it: numba
checks no bounds. The others trust the bytes, which one of the first kind must have accepted.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tidegate.kernels.bytes_kernel import Bytes, U, big_endian, big_endian_word
from tidegate.kernels.cache import inlined, kernel
from tidegate.kernels.intrinsic_kernel import double_of

MALFORMED: Final = -1

# The tags of the first three types have the length in their lowest bits. Tags below FIXMAP are numbers themselves, and
# so are those from NEGATIVE_FIXINT on.
FIXMAP: Final = 0x80
FIXARRAY: Final = 0x90
FIXSTR: Final = 0xA0
NIL: Final = 0xC0
NEVER_USED: Final = 0xC1
FALSE: Final = 0xC2
TRUE: Final = 0xC3
BIN_8: Final = 0xC4
BIN_32: Final = 0xC6
EXT_8: Final = 0xC7
FLOAT_32: Final = 0xCA
FLOAT_64: Final = 0xCB
UINT_8: Final = 0xCC
UINT_32: Final = 0xCE
UINT_64: Final = 0xCF
INT_8: Final = 0xD0
INT_64: Final = 0xD3
FIXEXT_1: Final = 0xD4
STR_8: Final = 0xD9
STR_32: Final = 0xDB
ARRAY_16: Final = 0xDC
ARRAY_32: Final = 0xDD
MAP_16: Final = 0xDE
MAP_32: Final = 0xDF
NEGATIVE_FIXINT: Final = 0xE0

# Columns of `_LAYOUT`.
FIELD_BYTES: Final = 0  # of the length field
LENGTH: Final = 1  # that the tag itself implies; a length field is added to it
VALUES_EACH: Final = 2  # values per unit of length: 1 in an array, 2 in a map, 0 if the length counts bytes


def _make_layout() -> Bytes:
    layout = np.zeros((256, 3), np.uint8)
    layout[FIXMAP:FIXARRAY, LENGTH] = layout[FIXARRAY:FIXSTR, LENGTH] = range(16)
    layout[FIXSTR:NIL, LENGTH] = range(32)
    layout[BIN_8 : BIN_8 + 3, FIELD_BYTES] = layout[EXT_8 : EXT_8 + 3, FIELD_BYTES] = (1, 2, 4)
    layout[EXT_8 : EXT_8 + 3, LENGTH] = 1  # the number of the extension's type
    layout[FLOAT_32 : FLOAT_32 + 2, LENGTH] = (4, 8)
    layout[UINT_8 : UINT_8 + 4, LENGTH] = layout[INT_8 : INT_8 + 4, LENGTH] = (1, 2, 4, 8)
    layout[FIXEXT_1 : FIXEXT_1 + 5, LENGTH] = (2, 3, 5, 9, 17)
    layout[STR_8 : STR_8 + 3, FIELD_BYTES] = (1, 2, 4)
    layout[ARRAY_16 : ARRAY_16 + 4, FIELD_BYTES] = (2, 4, 2, 4)
    layout[FIXARRAY:FIXSTR, VALUES_EACH] = layout[ARRAY_16 : ARRAY_16 + 2, VALUES_EACH] = 1
    layout[FIXMAP:FIXARRAY, VALUES_EACH] = layout[MAP_16 : MAP_16 + 2, VALUES_EACH] = 2
    return layout


_LAYOUT: Final = _make_layout()


@inlined
def is_text(tag: int) -> bool:
    return tag & 0xE0 == FIXSTR or (tag >= STR_8 and tag <= STR_32)


@inlined
def is_boolean(tag: int) -> bool:
    return tag == FALSE or tag == TRUE


@inlined
def is_bytes(tag: int) -> bool:
    return tag >= BIN_8 and tag <= BIN_32


@inlined
def is_array(tag: int) -> bool:
    return tag & 0xF0 == FIXARRAY or tag == ARRAY_16 or tag == ARRAY_32


@inlined
def is_map(tag: int) -> bool:
    return tag & 0xF0 == FIXMAP or tag == MAP_16 or tag == MAP_32


@inlined
def is_small_integer(tag: int) -> bool:
    """Returns whether the tag is the whole value: an integer from -32 to 127."""
    return tag < FIXMAP or tag >= NEGATIVE_FIXINT


@inlined
def integer_bytes(tag: int) -> int:
    """Returns the bytes after the tag of an integer that is not small."""
    return 1 << np.int64((tag - UINT_8) & 3)


@inlined
def is_unsigned(tag: int) -> bool:
    return tag < FIXMAP or (tag >= UINT_8 and tag <= UINT_64)


@inlined
def head_at(data: Bytes, position: int) -> tuple[int, int]:
    """Returns (length, position after the tag and the length field).

    The length counts the items of an array, the pairs of a map, and the bytes of any other value."""
    tag = data[position]
    width = np.int64(_LAYOUT[tag, FIELD_BYTES])
    length = np.int64(_LAYOUT[tag, LENGTH])
    if width > 0:
        length += np.int64(big_endian(data, position + 1, width))
    return length, position + 1 + width


@inlined
def has_head(data: Bytes, position: int, end: int) -> bool:
    """Returns whether a tag and its length field are complete before `end`. Tags below NIL have no length field."""
    if position >= end:
        return False
    tag = data[position]
    return tag < NIL or position + 1 + np.int64(_LAYOUT[tag, FIELD_BYTES]) <= end


@inlined
def array_at(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Returns (items, position of the first). There are MALFORMED items if there is no array with a complete head."""
    if has_head(data, position, end) and is_array(data[position]):
        return head_at(data, position)
    return np.int64(MALFORMED), position


@inlined
def map_at(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Returns (pairs, position of the first). There are MALFORMED pairs if there is no map with a complete head."""
    if has_head(data, position, end) and is_map(data[position]):
        return head_at(data, position)
    return np.int64(MALFORMED), position


@inlined
def text_bounds(data: Bytes, position: int) -> tuple[int, int]:
    """Returns (start, stop) of the bytes of a string. This is `head_at` for strings, without the table: faster."""
    tag = data[position]
    if tag & 0xE0 == FIXSTR:
        return position + 1, position + 1 + np.int64(tag & 0x1F)
    width = 1 << np.int64(tag - STR_8)
    start = position + 1 + width
    return start, start + np.int64(big_endian(data, position + 1, width))


@inlined
def text_at(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Returns (start, stop) of the bytes of a string. Both are MALFORMED if there is no complete, valid one here."""
    # With `text_bounds` or the table instead of these branches, a scan of notifications is 5 % slower.
    if position >= end:
        return MALFORMED, MALFORMED
    tag = data[position]
    if tag & 0xE0 == FIXSTR:
        start = position + 1
        stop = start + np.int64(tag & 0x1F)
    elif tag >= STR_8 and tag <= STR_32:
        width = 1 << np.int64(tag - STR_8)
        start = position + 1 + width
        if start > end:
            return MALFORMED, MALFORMED
        stop = start + np.int64(big_endian(data, position + 1, width))
    else:
        return MALFORMED, MALFORMED
    if stop > end or not is_utf8(data, start, stop):
        return MALFORMED, MALFORMED
    return start, stop


@kernel
def is_utf8(data: Bytes, start: int, end: int) -> bool:
    # Most text is ASCII: this loop has no branches, so it is much faster than the validation below.
    seen = np.uint8(0)
    for k in range(np.uint64(start), np.uint64(end)):
        seen |= data[k]
    if seen < 0x80:
        return True
    k = start
    while k < end:
        lead = data[k]
        if lead < 0x80:
            k += 1
            continue
        if lead < 0xC2 or lead > 0xF4:
            return False
        more = 1 if lead < 0xE0 else (2 if lead < 0xF0 else 3)
        if k + more >= end:
            return False
        second = data[k + 1]
        if lead == 0xE0 and second < 0xA0:
            return False
        if lead == 0xED and second > 0x9F:  # surrogates
            return False
        if lead == 0xF0 and second < 0x90:
            return False
        if lead == 0xF4 and second > 0x8F:
            return False
        for j in range(1, more + 1):
            if data[k + j] & 0xC0 != 0x80:
                return False
        k += more + 1
    return True


@inlined
def flat_end(data: Bytes, position: int) -> int:
    """Returns the end of a value that is neither an array nor a map."""
    length, start = head_at(data, position)
    return start + length


@kernel
def skip_value(data: Bytes, position: int, end: int) -> int:
    """Returns the end of one value of any type, or MALFORMED. A loop: nested values use no stack."""
    remaining = np.int64(1)
    while remaining > 0:
        if not has_head(data, position, end) or data[position] == NEVER_USED:
            return MALFORMED
        tag = data[position]
        length, start = head_at(data, position)
        values_each = np.int64(_LAYOUT[tag, VALUES_EACH])
        remaining += values_each * length - 1
        position = start if values_each > 0 else start + length
        # Each remaining value takes at least one byte, so there cannot be more values than bytes.
        if position > end or remaining > end - position:
            return MALFORMED
        if is_text(tag) and not is_utf8(data, start, position):
            return MALFORMED
    return position


@inlined
def single_of(bits: int) -> float:
    """Converts the bits of a 32-bit float to a double."""
    sign, exponent, fraction = bits >> U(31), (bits >> U(23)) & U(0xFF), bits & U(0x7FFFFF)
    if exponent == U(0):  # zero or subnormal
        number = np.float64(fraction) * 2.0**-149
        return -number if sign else number
    return double_of(sign << U(63) | (exponent + U(896)) << U(52) | fraction << U(29))


@inlined
def read_number(data: Bytes, position: int) -> tuple[float, int]:
    """Reads an integer or a float. Returns (number, position after it)."""
    tag = data[position]
    if tag < FIXMAP:
        return np.float64(tag), position + 1
    if tag == FLOAT_64:
        return double_of(big_endian_word(data, position + 1)), position + 9
    return read_rarer_number(data, position)


@kernel
def read_rarer_number(data: Bytes, position: int) -> tuple[float, int]:
    if data[position] == FLOAT_32:
        return single_of(big_endian(data, position + 1, 4)), position + 5
    value, end = read_integer(data, position)
    return np.float64(value), end


@inlined
def read_integer(data: Bytes, position: int) -> tuple[int, int]:
    """Reads an integer, which wraps around if it exceeds 64 bits with a sign. Returns (integer, position after it)."""
    tag = data[position]
    if is_small_integer(tag):
        return np.int64(np.int8(tag)), position + 1
    width = integer_bytes(tag)
    value = np.int64(big_endian(data, position + 1, width))
    if tag >= INT_8:
        shift = 64 - 8 * width
        value = (value << shift) >> shift  # copies the sign into the bytes above
    return value, position + 1 + width
