"""The hash tables of the index: how items are added, moved to a larger table, and removed.

A table has a power of two of slots and uses linear probing. Removing an item moves later items back into the hole, so
there are no tombstones, and churn does not slow lookups down. Each table has its own lookup, because lookups differ in
what they compare: it tests slots from `home_of` on, one `slot_after` another, up to an empty one.

There are two kinds of tables. A slot of *pairs* holds a hash and an item; the item 0 marks an empty slot. A slot of
*rows* holds the number of a row + 1, in 32 bits; `hash_of(table, row)` returns the hash of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tidegate.index import tables as t
from tidegate.kernels.bytes_kernel import U
from tidegate.kernels.cache import inlined, kernel


@inlined
def home_of(slots: t.U64 | t.I32, hashed: int) -> int:
    return np.int64(hashed & U(slots.shape[0] - 1))


@inlined
def slot_after(slots: t.U64 | t.I32, position: int) -> int:
    return (position + 1) & (slots.shape[0] - 1)


@inlined
def may_move(slots: t.U64 | t.I32, home: int, position: int, hole: int) -> bool:
    """Returns whether an item may move back to a hole.

    It may not if its home lies after the hole, cyclically: a lookup would start too late to find it there."""
    mask = slots.shape[0] - 1
    return ((position - home) & mask) >= ((position - hole) & mask)


@kernel
def put_pair(slots: t.U64, hashed: int, item: int) -> None:
    position = home_of(slots, hashed)
    while slots[position, 1] != U(0):
        position = slot_after(slots, position)
    slots[position, 0] = hashed
    slots[position, 1] = item


@kernel
def refill_pairs(slots: t.U64, old: t.U64) -> None:
    """Fills a larger table with the pairs of an old one."""
    for k in range(old.shape[0]):
        if old[k, 1] != U(0):
            put_pair(slots, old[k, 0], old[k, 1])


@kernel
def erase_pair(slots: t.U64, hashed: int, item: int) -> None:
    hole = home_of(slots, hashed)
    while slots[hole, 1] != item:
        hole = slot_after(slots, hole)
    position = slot_after(slots, hole)
    while slots[position, 1] != U(0):
        if may_move(slots, home_of(slots, slots[position, 0]), position, hole):
            slots[hole, 0] = slots[position, 0]
            slots[hole, 1] = slots[position, 1]
            hole = position
        position = slot_after(slots, position)
    slots[hole, 0] = U(0)
    slots[hole, 1] = U(0)


@kernel
def put_row(slots: t.I32, hashed: int, row: int) -> None:
    position = home_of(slots, hashed)
    while slots[position] != 0:
        position = slot_after(slots, position)
    slots[position] = row + 1


@inlined
def refill_rows(slots: t.I32, old: t.I32, hash_of: Callable[[Any, int], int], table: Any) -> None:
    """Fills a larger table with the rows of an old one."""
    for k in range(old.shape[0]):
        if old[k] != 0:
            row = np.int64(old[k]) - 1
            put_row(slots, hash_of(table, row), row)


@inlined
def erase_row(slots: t.I32, row: int, hash_of: Callable[[Any, int], int], table: Any) -> None:
    hole = home_of(slots, hash_of(table, row))
    while slots[hole] != row + 1:
        hole = slot_after(slots, hole)
    position = slot_after(slots, hole)
    while slots[position] != 0:
        if may_move(slots, home_of(slots, hash_of(table, np.int64(slots[position]) - 1)), position, hole):
            slots[hole] = slots[position]
            hole = position
        position = slot_after(slots, position)
    slots[hole] = 0
