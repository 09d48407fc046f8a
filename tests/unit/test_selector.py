"""Selectors move as little as possible, and spread their choices evenly."""

from __future__ import annotations

from collections import Counter

import pytest

from tidegate.layers.selector import Configuration, choose

KEYS = range(1 << 48, (1 << 48) + 20_000)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"matcher-{i}" for i in range(1, count + 1))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_slice_that_joins_takes_its_share_from_all_and_moves_nothing_else(count: int) -> None:
    before = {key: choose(key, names(count)) for key in KEYS}
    after = {key: choose(key, names(count + 1)) for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {f"matcher-{count + 1}"}
    assert len(moved) / len(KEYS) == pytest.approx(1 / (count + 1), rel=0.05)


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_any_slice_may_leave_and_only_its_own_move(leaving: int) -> None:
    all_names = names(3)
    rest = all_names[:leaving] + all_names[leaving + 1 :]
    for key in KEYS[:2000]:
        owner = choose(key, all_names)
        if owner != all_names[leaving]:
            assert choose(key, rest) == owner


def test_the_order_of_the_names_does_not_matter() -> None:
    assert all(choose(key, names(5)) == choose(key, names(5)[::-1]) for key in KEYS[:500])


def test_publishers_are_spread_over_exit_points() -> None:
    configuration = Configuration(1, ("access-point-1",), names(1), ("exit-point-1", "exit-point-2"))
    chosen = Counter(configuration.exit_point(f"publisher-{i}") for i in range(4000))
    assert chosen["exit-point-1"] == pytest.approx(2000, rel=0.1)
