"""The index finds exactly what brute force finds, after any sequence of additions and removals."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from strategies import Notification, filters, notifications

from tidegate.filters import Filter
from tidegate.frames import Kind, encode_frame
from tidegate.index import SubscriptionIndex
from tidegate.index.tables import CELL_ROWS_MAX, CELLS_PER_ATTRIBUTE
from tidegate.layers.batch import BatchReader


@given(st.data())
def test_it_finds_exactly_what_brute_force_finds(data: st.DataObject) -> None:
    notification = data.draw(notifications())
    many = data.draw(st.lists(filters(about=notification), max_size=20))
    index = SubscriptionIndex()
    for number, each in enumerate(many):
        index.add(number, each)
    expected = [number for number, each in enumerate(many) if each.matches(notification)]
    assert [sorted(ids) for ids in index.match([notification])] == [expected]


class IndexHistory(RuleBasedStateMachine):
    """Subscriptions are added, changed and removed. The index always agrees with a plain dictionary of filters."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SubscriptionIndex()
        self.filters: dict[int, Filter] = {}
        self.last: list[Notification] = [{"a": 1}]

    @rule(number=st.integers(0, 8), data=st.data())
    def add(self, number: int, data: st.DataObject) -> None:
        self.filters[number] = data.draw(filters(about=self.last[-1]))
        self.index.add(number, self.filters[number])

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.filters:
            number = data.draw(st.sampled_from(sorted(self.filters)))
            del self.filters[number]
            self.index.remove(number)

    @rule()
    def plan_anew(self) -> None:
        self.index.plan()

    @rule(most=st.integers(0, 3))
    def maintain(self, most: int) -> None:
        self.index.maintain(most)

    @rule(many=st.lists(notifications(), min_size=1, max_size=3))
    def look(self, many: list[Notification]) -> None:
        self.last = many

    @invariant()
    def agrees_with_brute_force(self) -> None:
        expected = [{n for n, each in self.filters.items() if each.matches(one)} for one in self.last]
        found = self.index.match(self.last)
        assert [set(ids) for ids in found] == expected
        assert [len(ids) for ids in found] == [len(ids) for ids in expected]
        assert len(self.index) == len(self.filters)

    def teardown(self) -> None:
        for number in self.filters:
            self.index.remove(number)
        left = self.index.statistics()
        assert (left.subscriptions, left.filters, left.attributes, left.strings) == (0, 0, 0, 0)
        assert (left.nodes, left.entries) == (0, 0), "an empty index keeps nothing"


TestIndexHistory = IndexHistory.TestCase


@given(st.data())
def test_it_can_tell_the_filter_of_a_subscription_and_explain(data: st.DataObject) -> None:
    notification = data.draw(notifications())
    asked = data.draw(filters(about=notification))
    index = SubscriptionIndex()
    index.add(7, asked)
    others = [notification, *data.draw(st.lists(notifications(), max_size=3))]
    assert [index.filter_of(7).matches(one) for one in others] == [asked.matches(one) for one in others]
    assert index.explain(notification, 7).matches == asked.matches(notification)
    with pytest.raises(KeyError):
        index.explain(notification, 8)


@given(st.lists(notifications(), min_size=1, max_size=5), st.data())
def test_a_batch_of_bytes_matches_as_its_mappings_do(many: list[Notification], data: st.DataObject) -> None:
    index = SubscriptionIndex()
    for number, each in enumerate(data.draw(st.lists(filters(about=many[0]), max_size=10))):
        index.add(number, each)
    batch = BatchReader().read_array("p", 1, msgspec.msgpack.encode(many))
    offsets, ids = index.match_batch(batch)
    found = [ids[start:stop].tolist() for start, stop in pairwise(offsets)]
    assert found == index.match(many)
    frames = b"".join(encode_frame(Kind.PUBLISH, part, 1) for part in (many, many[:1], many))
    offsets, ids = index.match_frames(frames)
    found = [ids[start:stop].tolist() for start, stop in pairwise(offsets)]
    assert found == index.match([*many, many[0], *many])


def test_intervals_on_more_attributes_than_have_rows_of_cells_match_and_go_as_others_do() -> None:
    """Attributes beyond the rows are filed in hashed cells. They match equally, and need little memory."""
    rng = Random(19)
    index = SubscriptionIndex()
    texts = ("a{0}>={1}", "a{0}<{1}", "a{0}=={1}..{2}", "a{0}>{1};a{0}<={2}")
    kept: dict[int, Filter] = {}
    for number in range(4 * CELL_ROWS_MAX):
        low = rng.uniform(-1000, 1000)
        text = rng.choice(texts).format(number % (2 * CELL_ROWS_MAX), low, low + rng.choice((0.5, 50, 5000)))
        kept[number] = Filter.parse(text)
        index.add(number, kept[number])

    def check() -> None:
        for _ in range(40):
            names = rng.sample(range(2 * CELL_ROWS_MAX), 60)
            event = {f"a{name}": rng.uniform(-1500, 1500) for name in names}
            expected = [number for number, each in kept.items() if each.matches(event)]
            assert [sorted(ids) for ids in index.match([event])] == [expected]

    check()
    for number in rng.sample(sorted(kept), 2 * CELL_ROWS_MAX):
        del kept[number]
        index.remove(number)
    check()
    index.plan()
    while index.maintain(500):
        check()
    check()
    assert index.statistics().bytes < 8_000 * 2 * CELL_ROWS_MAX + 3 * CELL_ROWS_MAX * CELLS_PER_ATTRIBUTE * 4
    for number in list(kept):
        index.remove(number)
    assert index.statistics().entries == 0


def test_a_new_plan_gives_rows_of_cells_to_the_attributes_that_need_them_most() -> None:
    """Thousands of attributes with one interval each must not permanently slow those with many intervals."""
    index = SubscriptionIndex()
    for number in range(CELL_ROWS_MAX):
        index.add(number, Filter.parse(f"rare{number}>={number}"))
    for number in range(2048):
        index.add(CELL_ROWS_MAX + number, Filter.parse(f"busy=={number}..{number}.5"))
    while index.maintain():
        pass
    index.plan()
    while index.maintain():
        pass
    before = index.statistics()
    assert [index.match([{"busy": number + 0.25}])[0] for number in range(0, 2048, 64)] == [
        [CELL_ROWS_MAX + number] for number in range(0, 2048, 64)
    ]
    assert index.statistics().scanned - before.scanned < 32 * 16, "the busy attribute's intervals lie in large nodes"
