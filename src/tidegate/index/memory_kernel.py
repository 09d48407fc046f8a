"""Memory for the kernels of the index: hashes, and blocks and rows that are reused.

Each size of up to 16 words has its own class of blocks; larger sizes are rounded up to a power of two. The free blocks
of a class are linked through their first word (offset + 1; 0 ends the list).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tidegate.index import tables as t
from tidegate.kernels.bytes_kernel import U
from tidegate.kernels.cache import inlined

GOLDEN: Final = U(0x9E3779B97F4A7C15)
MIXER: Final = U(0xD6E8FEB86659FD93)


@inlined
def mix(value: int) -> int:
    """Applies the finaliser of splitmix64, which is a bijection: different words never collide."""
    value = (value ^ (value >> U(30))) * U(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> U(27))) * U(0x94D049BB133111EB)
    return value ^ (value >> U(31))


@inlined
def fold(value: int) -> int:
    value *= GOLDEN
    return value ^ (value >> U(32))


@inlined
def size_class(words: int) -> tuple[int, int]:
    """Returns (class, words of a block of that class)."""
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
    """Returns a free row, from the list that is linked through `column`, or a new one."""
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
