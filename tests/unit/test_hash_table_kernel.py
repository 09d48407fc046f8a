"""A hash table of the index holds what a plain set holds, whatever was put in, removed and moved to a larger table."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidegate.index import hash_table_kernel as h
from tidegate.index import tables as t
from tidegate.kernels.cache import inlined

# Few hashes and few slots: most items collide, and runs of items wrap around the end of the table.
HASHES = st.integers(0, 15)
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 29)), max_size=200)
SLOTS = 32
ITEMS_MAX = 16


hash_of = inlined(lambda hashes, row: hashes[row])


def _is_found(items: list[int], item: int, hashed: int) -> bool:
    """Probes as every lookup does."""
    position = hashed % len(items)
    while items[position] not in (0, item):
        position = (position + 1) % len(items)
    return items[position] == item


@given(st.lists(HASHES, min_size=30, max_size=30), STEPS)
def test_both_kinds_of_tables_hold_what_a_set_holds(hashes: list[int], steps: list[tuple[bool, int]]) -> None:
    hashed = np.array(hashes, np.uint64) * np.uint64(3) + np.uint64(SLOTS - 24)
    pairs, rows, held = np.zeros((SLOTS, 2), np.uint64), np.zeros(SLOTS, np.int32), set[int]()
    for is_put, row in steps:
        if is_put and row not in held and len(held) < ITEMS_MAX:
            h.put_pair(pairs, hashed[row], np.uint64(row + 1))
            h.put_row(rows, hashed[row], row)
            held.add(row)
        elif not is_put and row in held:
            h.erase_pair(pairs, hashed[row], np.uint64(row + 1))
            h.erase_row(rows, row, hash_of, hashed)
            held.remove(row)
        _check(pairs, rows, hashed, held)
    larger_pairs, larger_rows = np.zeros((2 * SLOTS, 2), np.uint64), np.zeros(2 * SLOTS, np.int32)
    h.refill_pairs(larger_pairs, pairs)
    h.refill_rows(larger_rows, rows, hash_of, hashed)
    _check(larger_pairs, larger_rows, hashed, held)


def _check(pairs: t.U64, rows: t.I32, hashed: t.U64, held: set[int]) -> None:
    for items in (pairs[:, 1].astype(int).tolist(), rows.tolist()):
        assert sorted(filter(None, items)) == sorted(row + 1 for row in held)
        assert all(_is_found(items, row + 1, int(hashed[row])) for row in held)
    assert all(int(pairs[k, 0]) == int(hashed[int(pairs[k, 1]) - 1]) for k in range(len(pairs)) if pairs[k, 1])
