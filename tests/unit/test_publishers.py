"""A publisher is acknowledged in its own order, whatever order its batches finish in; the tables are bounded."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import Overloaded
from tidegate.layers.publishers import HighWaterMarks, Publisher, Publishers


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), min_size=1, max_size=20), st.randoms())
def test_acknowledgements_are_cumulative_and_in_order(batches: list[tuple[int, int]], rng: Random) -> None:
    publisher = Publisher("p")
    lasts, last = [], 0
    for length, size in batches:
        last += length
        lasts.append(last)
        publisher.accept(last, size)
    finished: set[int] = set()
    released = 0
    for each in rng.sample(lasts, len(lasts)):
        released += publisher.finish(each)
        finished.add(each)
        prefix = 0
        for one in lasts:
            if one not in finished:
                break
            prefix = one
        assert publisher.acknowledged == prefix
    assert publisher.acknowledged == publisher.accepted
    assert released == sum(size for _length, size in batches)
    assert publisher.is_idle


def test_the_longest_idle_publisher_is_forgotten_first_and_a_busy_one_never() -> None:
    publishers = Publishers(publishers_max=2)
    publishers.get("busy").accept(1, 10)
    publishers.get("idle")
    publishers.get("new")
    assert publishers.known("idle") is None
    assert publishers.known("busy") is not None
    publishers.get("new").session = 5
    with pytest.raises(Overloaded, match="L604"):
        publishers.get("one too many")


def test_high_water_marks_are_bounded_and_forget_the_longest_silent() -> None:
    marks = HighWaterMarks(publishers_max=2)
    marks.advance("a", 1)
    marks.advance("b", 1)
    marks.advance("a", 2)
    marks.advance("c", 1)
    assert (marks.last("a"), marks.last("b"), marks.last("c")) == (2, 0, 1)
