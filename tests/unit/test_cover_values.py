"""Covers compared with a plain set of numbers: only added numbers are covered, and near ones merge."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.queues.covers import INTERVALS_MAX, Bounds, covered, extend, is_covered, touches
from tidegate.queues.feed import Feed, FeedPart
from tidegate.queues.steady_clock import SteadyClock

intervals = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 12)), max_size=80)


@given(intervals)
def test_a_cover_has_what_was_added_and_nothing_else(added: list[tuple[int, int]]) -> None:
    bounds: Bounds = []
    numbers: set[int] = set()
    for low, length in added:
        high = low + length
        if bounds:
            touched = set(range(low - 1, high + 2))
            assert touches(bounds, low, high) == any(is_covered(bounds, n) for n in touched)
        extend(bounds, low, high)
        numbers |= set(range(low, high + 1))
        assert bounds == sorted(bounds)
        assert len(bounds) <= 2 * INTERVALS_MAX
        assert all(is_covered(bounds, n) for n in range(low, high + 1)), "what was added last is never forgotten"
        found = {n for n in range(330) if is_covered(bounds, n)}
        assert found <= numbers
        places = list(range(0, 330, 7))
        assert (covered(bounds, places) or [False] * len(places)) == [n in found for n in places]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 9)), max_size=25))
def test_a_cover_of_few_intervals_forgets_nothing(added: list[tuple[int, int]]) -> None:
    bounds: Bounds = []
    for low, length in added:
        extend(bounds, low, low + length)
    numbers = {n for low, length in added for n in range(low, low + length + 1)}
    assert {n for n in range(600) if is_covered(bounds, n)} == numbers


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 30))
def test_a_feed_that_is_cut_has_the_same_messages(lengths: list[int], count: int) -> None:
    parts = [FeedPart([f"{at}.{n}" for n in range(length)], at, "*") for at, length in enumerate(lengths)]  # type: ignore[misc]
    feed = Feed(parts)
    whole = [message for each in parts for message in each.messages]
    first, after = feed.first(count), feed.after(count)
    assert len(feed) == len(whole)
    assert [m for each in first.parts for m in each.messages] == whole[:count]
    assert [m for each in after.parts for m in each.messages] == whole[count:]


def test_a_steady_clock_goes_on_from_the_newest_stamp_at_the_pace_of_the_monotonic_clock() -> None:
    now_s = 5000.0
    clock = SteadyClock(lambda: now_s, 100.0)
    assert clock.now_s() == 100.0
    now_s = 5007.5
    assert clock.now_s() == 107.5
