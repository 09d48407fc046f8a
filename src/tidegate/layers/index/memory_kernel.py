"""Memory for the kernels of the index: words of eight bytes, hashes, and blocks that are used again.

A block of up to 16 words is kept for its exact size, a larger one for the next power of two; freed blocks of a class
are linked through their first word (offset + 1; 0 ends). Hash tables use linear probing and close the hole when an item
leaves, so they have no tombstones.
"""

from __future__ import annotations

import contextlib
from typing import Final

import numba
import numpy as np
from numba import njit
from numpy.typing import NDArray

from tidegate.layers.index import tables as t
from tidegate.layers.index.intrinsic_kernel import load

# Without reference counts (`_nrt`): the arrays come in tuples, and counting would cost two atomic operations for every
# array that a kernel takes out of one (decision 008). So no kernel here may allocate. What is `inlined` is put into its
# caller by LLVM: a call would pass every field of every array on the stack.
kernel = njit(cache=True, nogil=True, _nrt=False)
inlined = njit(nogil=True, _nrt=False, forceinline=True)

U = np.uint64
Bytes = NDArray[np.uint8]
ALL: Final = U(0xFFFFFFFFFFFFFFFF)
GOLDEN: Final = U(0x9E3779B97F4A7C15)
BOUNDS_CHECKED: Final = bool(numba.config.BOUNDSCHECK)  # type: ignore[attr-defined]


@inlined
def load_word(data: Bytes, position: int) -> int:
    """Eight bytes of `data`, the first the lowest; they must be there."""
    if BOUNDS_CHECKED and data[position + 7] > 255:
        return U(0)
    return load(data, position)


@inlined
def first_bytes(word: int, count: int) -> int:
    """The lowest `count` bytes of a word, 0 to 8."""
    return word & (ALL >> U(64 - 8 * count)) if count > 0 else U(0)


@inlined
def short_word(data: Bytes, start: int, count: int) -> int:
    """Up to eight bytes of `data` as a word, also at its very end."""
    if start + 8 <= data.shape[0]:
        return first_bytes(load_word(data, start), count)
    word = U(0)
    for k in range(count):
        word |= U(data[start + k]) << U(8 * k)
    return word


@inlined
def big_endian_word(data: Bytes, position: int) -> int:
    """Eight bytes, the first the highest; LLVM makes one instruction of it."""
    word = load_word(data, position)
    word = (word >> U(32)) | (word << U(32))
    word = ((word >> U(16)) & U(0x0000FFFF0000FFFF)) | ((word & U(0x0000FFFF0000FFFF)) << U(16))
    return ((word >> U(8)) & U(0x00FF00FF00FF00FF)) | ((word & U(0x00FF00FF00FF00FF)) << U(8))


@inlined
def mix(value: int) -> int:
    """splitmix64's finaliser: a bijection."""
    value = (value ^ (value >> U(30))) * U(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> U(27))) * U(0x94D049BB133111EB)
    return value ^ (value >> U(31))


@inlined
def fold(value: int) -> int:
    value *= GOLDEN
    return value ^ (value >> U(32))


@inlined
def size_class(words: int) -> tuple[int, int]:
    """(class, words of a block of that class)."""
    if words <= 16:
        return words, words
    size, number = 32, 17
    while size < words:
        size *= 2
        number += 1
    return number, size


@inlined
def allocate(words: t.U64, state: t.I64, top: int, count: int) -> int:
    number, size = size_class(count)
    head = state[t.HEADS + number] - 1
    if head >= 0:
        state[t.HEADS + number] = np.int64(words[head])
        return head
    offset = state[top]
    state[top] = offset + size
    return offset


@inlined
def release(words: t.U64, state: t.I64, offset: int, count: int) -> None:
    number, _size = size_class(count)
    words[offset] = U(state[t.HEADS + number])
    state[t.HEADS + number] = offset + 1


@inlined
def take(rows: t.I32, state: t.I64, top: int, free: int, column: int) -> int:
    """A row that is free, linked by `column`, or a new one."""
    row = state[free] - 1
    if row >= 0:
        state[free] = rows[row, column]
        return row
    row = state[top]
    state[top] = row + 1
    return row


@inlined
def give_back(rows: t.I32, state: t.I64, free: int, column: int, row: int) -> None:
    rows[row, column] = state[free]
    state[free] = row + 1


def silent_arithmetic() -> contextlib.AbstractContextManager[None]:
    """Without the compiler the kernels run on numpy's numbers, which warn where hashes wrap around, and where infinity
    is multiplied by the scale of a segment without width."""
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return np.errstate(over="ignore", invalid="ignore")
    return contextlib.nullcontext()
