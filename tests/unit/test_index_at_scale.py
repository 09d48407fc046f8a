"""The index with thousands of filters: nodes split, arrays grow, plans change, and it stays exact and small.

Each seed compares the index with `Filter.matches` on about a million pairs of a filter and a notification, while
filters are added, removed and moved between trees. TIDEGATE_TEST_SEEDS=1000 tries more seeds.
tests/integration/test_kernels.py also runs this file under NUMBA_BOUNDSCHECK=1.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any

import numpy as np
import pytest

from tidegate.errors import NotificationError, Overloaded
from tidegate.filters import Filter
from tidegate.index import SubscriptionIndex
from tidegate.index.packing import pack

SEEDS = max(4, int(os.environ.get("TIDEGATE_TEST_SEEDS", "150")) // 40)
WORDS = ["", "a", "ab", "abc", "b", "ba", "1", "12", "123", "é", "x" * 70, "zz top"]


class Workload:
    """Filters and notifications on a few attributes, some of them popular, with values that often match."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = [f"a{i}" for i in range(self.rng.choice([2, 6, 40]))]
        self.span = self.rng.choice([5, 100, 10_000])

    def number(self) -> float:
        value = self.rng.choice([self.rng.randint(-3, self.span), self.rng.uniform(0, self.span), 1, 0, -0.0, 1e12])
        return value if self.rng.random() < 0.9 else float(value)

    def value(self) -> Any:
        kind = self.rng.choice(["number", "number", "word", "boolean"])
        if kind == "boolean":
            return self.rng.random() < 0.5
        return self.number() if kind == "number" else self.word()

    def word(self) -> str:
        return self.rng.choice(WORDS) if self.rng.random() < 0.7 else f"w{self.rng.randrange(300)}"

    def constraint(self) -> str:
        name, rng = self.rng.choice(self.names), self.rng
        form = rng.choice(["==", "==", "==", "!=", "<", "<=", ">", ">=", "..", "..", "^=", "$=", "*=", "", "!", "list"])
        if form in ("", "!"):
            return form + name
        if form in ("^=", "$=", "*="):
            return f"{name}{form}{write(self.word()[:4])}"
        if form == "..":
            low = self.number()
            return f"{name}=={write(low)}..{write(low + rng.choice([0, 0.5, 3, 50]))}"
        if form == "list":
            return f"{name}{rng.choice(['==', '!='])}" + ",".join(write(self.value()) for _ in range(rng.randint(2, 9)))
        value = self.value()
        if isinstance(value, bool) and form not in ("==", "!="):
            value = self.word()
        return f"{name}{form}{write(value)}"

    def filter(self) -> Filter:
        return Filter.parse(";".join(self.constraint() for _ in range(self.rng.choice([1, 2, 2, 3, 4]))))

    def notification(self) -> dict[str, Any]:
        names = self.rng.sample(self.names, self.rng.randint(1, min(len(self.names), 12)))
        return {name: self.value() for name in names} | {"unknown": 1}


def write(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def many_names(number: int) -> Filter:
    return Filter.parse(";".join(f"n{number}_{k}" for k in range(32)))


def check_against_brute_force(index: SubscriptionIndex, filters: dict[int, Filter], workload: Workload) -> None:
    notifications = [workload.notification() for _ in range(60)]
    for notification, ids in zip(notifications, index.match(notifications), strict=True):
        expected = sorted(number for number, each in filters.items() if each.matches(notification))
        assert sorted(ids) == expected, notification


@pytest.mark.parametrize("seed", range(SEEDS))
def test_it_stays_exact_through_thousands_of_changes(seed: int) -> None:
    workload, index = Workload(seed), SubscriptionIndex()
    rng, filters = workload.rng, dict[int, Filter]()
    for _ in range(4):
        fresh = {rng.randrange(1 << 40): workload.filter() for _ in range(700)}
        shared = dict.fromkeys((rng.randrange(1 << 40) for _ in range(50)), workload.filter())
        for number, each in (fresh | shared).items():
            index.add(number, each)
        filters |= fresh | shared
        index.plan()
        index.maintain(rng.randrange(600))
        check_against_brute_force(index, filters, workload)
        for number in rng.sample(sorted(filters), len(filters) // 3):
            del filters[number]
            index.remove(number)
        check_against_brute_force(index, filters, workload)
    assert index.remove_many(np.array([*filters, -1], np.int64)) == len(filters)
    left = index.statistics()
    assert (left.subscriptions, left.filters, left.attributes, left.strings) == (0, 0, 0, 0)
    assert (left.nodes, left.entries) == (0, 0)


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    workload = Workload(1)
    filters = {number: workload.filter() for number in range(2000)}
    index = SubscriptionIndex()
    index.add_packed(np.array([*filters], np.int64), b"".join(map(pack, filters.values())))
    assert len(index) == 2000
    check_against_brute_force(index, filters, workload)


def test_endless_churn_with_new_strings_and_names_does_not_grow_it() -> None:
    index = SubscriptionIndex()
    sizes = []
    for generation in range(12):
        for number in range(400):
            unique = f"{generation}-{number}"
            index.add(number, Filter.parse(f"'name {unique}'=='text {unique}';b^='{unique}';c>{number};a*='x{unique}'"))
        for number in range(400):
            index.remove(number)
        sizes.append(index.statistics().bytes)
    assert sizes[2] == sizes[-1], sizes


def test_endless_churn_through_many_plans_does_not_grow_it() -> None:
    index = SubscriptionIndex()
    sizes = []
    for generation in range(10):
        for number in range(3000):
            unique = f"{generation}-{number}"
            low = 1000 * generation + number
            index.add(number, Filter.parse(f"a=='{unique}' ; b=={low}..{low + 1}; c*='x{unique}'"))
            if number % 100 == 0:
                index.match([{"a": unique, "b": low, "c": f"_x{unique}"}] * 50)
                index.maintain()
        sizes.append(index.statistics().bytes)
    assert index.statistics().plans > 2
    assert max(sizes[5:]) <= 2 * max(sizes[:3]), sizes


def scanned_each(index: SubscriptionIndex, notifications: list[dict[str, Any]]) -> float:
    before = index.statistics()
    index.match(notifications)
    after = index.statistics()
    return (after.scanned - before.scanned) / (after.notifications - before.notifications)


def settle(index: SubscriptionIndex) -> None:
    while index.maintain():
        pass


def test_what_notifications_carry_corrects_what_filters_suggested() -> None:
    """No notification has a large `b`, which the index can learn only from notifications. By the filters alone, `a`
    seems more selective."""
    index = SubscriptionIndex()
    for number in range(4000):
        index.add(number, Filter.parse(f"a=='x{number % 4}';b>{1_000_000 + number}"))
    settle(index)
    notifications: list[dict[str, Any]] = [{"a": f"x{i % 4}", "b": i % 10} for i in range(8192)]
    assert scanned_each(index, notifications) > 100
    settle(index)
    assert scanned_each(index, notifications) < 10
    assert set(index.match([{"a": "x1", "b": 1_000_006}])[0]) == {1, 5}


def test_domains_follow_filters_that_ask_for_other_numbers() -> None:
    index = SubscriptionIndex()
    for shift in (0, 1_000_000_000):
        for number in range(5000):
            index.add(number, Filter.parse(f"a=={shift + number / 10}..{shift + number / 10 + 0.5}"))
        settle(index)
        notifications = [{"a": shift + i / 7} for i in range(1000)]
        assert scanned_each(index, notifications) < 100
    assert index.statistics().plans >= 2


def test_two_threads_match_while_one_writes() -> None:
    """Unchanged subscriptions are always found. Those that are added and removed are found only where they match."""
    workload, index = Workload(3), SubscriptionIndex()
    filters = {number: workload.filter() for number in range(3000)}
    notifications = [workload.notification() for _ in range(40)]
    matching = [{number for number, each in filters.items() if each.matches(one)} for one in notifications]
    for number, each in filters.items():
        index.add(number, each)
    is_over = Event()

    def read() -> int:
        reader, rounds = index.reader(), 0
        while not is_over.is_set() or rounds < 3:
            rounds += 1
            for found, expected in zip(reader.match(notifications), matching, strict=True):
                assert len(found) == len(set(found))
                assert {number for number in expected if number < 1000} <= set(found) <= expected
        return rounds

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read) for _ in range(2)]
        for _ in range(4):
            for number in workload.rng.sample(range(1000, 3000), 800):
                index.remove(number)
                index.add(number, filters[number])
            index.plan()
            settle(index)
        is_over.set()
        assert all(reader.result(timeout=60) >= 3 for reader in readers)


def test_a_known_subscription_may_get_another_filter() -> None:
    index = SubscriptionIndex()
    index.add(1, Filter.parse("a==1"))
    index.add(1, Filter.parse("a==2"))
    assert index.match([{"a": 1}, {"a": 2}]) == [[], [1]]
    assert len(index) == 1


def test_more_attributes_than_can_be_numbered_are_refused_and_nothing_is_lost() -> None:
    index = SubscriptionIndex()
    index.add(0, Filter.parse("a>1"))
    number = 1
    with suppress(Overloaded):
        while number < 3000:
            index.add(number, many_names(number))
            number += 1
    with pytest.raises(Overloaded, match="L607"):
        index.add(number, many_names(number))
    assert len(index) == number
    assert index.match([{"a": 2}]) == [[0]]
    for each in range(1, number):
        index.remove(each)
    index.add(number, Filter.parse("another==1"))
    assert index.match([{"another": 1}]) == [[number]]


def test_many_at_once_with_too_many_attributes_are_refused_at_the_first_that_has_no_room() -> None:
    index = SubscriptionIndex()
    filters = [many_names(number) for number in range(3000)]
    with pytest.raises(Overloaded, match="L607"):
        index.add_packed(np.arange(3000), b"".join(map(pack, filters)))
    assert 2000 < len(index) < 2048
    found = index.match([{f"n{number}_{k}": 1 for k in range(32)} for number in (0, len(index) - 1, len(index))])
    assert found == [[0], [len(index) - 1], []]


def test_a_negative_number_is_no_subscription() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        SubscriptionIndex().add(-1, Filter.parse("a"))


def test_what_no_door_would_let_in_is_refused() -> None:
    index = SubscriptionIndex()
    index.add(1, Filter.parse("a"))
    with pytest.raises(NotificationError):
        index.match([{f"n{i}": 1 for i in range(65)}])
