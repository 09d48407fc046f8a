"""Bytes and words: loads integers from arrays of bytes, and stores them there.

A word has eight bytes and is little-endian; its type is uint64. Unsigned positions save numba's test for negative ones,
which count from the end.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidegate.kernels.cache import inlined, kernel
from tidegate.kernels.intrinsic_kernel import BOUNDS_CHECKED, load

U = np.uint64
Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]
ALL: Final = U(0xFFFFFFFFFFFFFFFF)
LOWER_HALF: Final = U(0xFFFFFFFF)


@inlined
def load_word(data: Bytes, position: int) -> int:
    """Loads eight bytes of `data` as a little-endian word. The caller guarantees that they exist."""
    if BOUNDS_CHECKED and data[position + 7] > 255:
        return U(0)
    return load(data, position)


@inlined
def first_bytes(word: int, count: int) -> int:
    """Returns the lowest `count` bytes of a word, 0 to 8."""
    return word & (ALL >> U(64 - 8 * count)) if count > 0 else U(0)


@inlined
def short_word(data: Bytes, start: int, count: int) -> int:
    """Returns up to eight bytes of `data` as a word. This works at the end of `data` too."""
    if start + 8 <= data.shape[0]:
        return first_bytes(load_word(data, start), count)
    word = U(0)
    for k in range(count):
        word |= U(data[start + k]) << U(8 * k)
    return word


@inlined
def big_endian_word(data: Bytes, position: int) -> int:
    """Loads eight bytes as a big-endian word. LLVM turns the swaps into one instruction."""
    word = load_word(data, position)
    word = (word >> U(32)) | (word << U(32))
    word = ((word >> U(16)) & U(0x0000FFFF0000FFFF)) | ((word & U(0x0000FFFF0000FFFF)) << U(16))
    return ((word >> U(8)) & U(0x00FF00FF00FF00FF)) | ((word & U(0x00FF00FF00FF00FF)) << U(8))


@kernel
def big_endian(data: Bytes, position: int, width: int) -> int:
    value = U(0)
    for k in range(width):
        value = (value << U(8)) | U(data[position + k])
    return value


@inlined
def put_big_endian(out: Bytes, position: int, value: int, width: int) -> int:
    for k in range(width):
        out[U(position + k)] = np.uint8((value >> (8 * (width - 1 - k))) & 0xFF)
    return position + width


@inlined
def put_little_endian(out: Bytes, position: int, value: int, width: int) -> int:
    for k in range(width):
        out[U(position + k)] = np.uint8((value >> (8 * k)) & 0xFF)
    return position + width


@inlined
def put_bytes(out: Bytes, position: int, source: Bytes) -> int:
    """Copies `source` to `position` and returns the position after it. It slices first and copies by a plain index, so
    that the compiler copies many bytes at a time."""
    length: int = source.shape[0]
    target = out[position : position + length]
    for k in range(length):
        target[k] = source[k]
    return position + length
