"""A publisher is acknowledged in its own order, in whatever order its batches finish; the tables are bounded."""

from __future__ import annotations

import sys
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import Overloaded
from tidegate.layers.publishers import HighWaterMarks, Publisher, Publishers

MANY = 1 << 30


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
    publishers = Publishers(publishers_max=2, bytes_max=MANY)
    publishers.get("busy").accept(1, 10)
    publishers.get("idle")
    publishers.get("new")
    assert publishers.known("idle") is None
    assert publishers.known("busy") is not None
    publishers.get("new").session = 5
    with pytest.raises(Overloaded, match="L604"):
        publishers.get("one too many")


def test_high_water_marks_are_bounded_and_forget_the_longest_silent() -> None:
    marks = HighWaterMarks(publishers_max=2, bytes_max=MANY)
    marks.advance("a", 1)
    marks.advance("b", 1)
    marks.advance("a", 2)
    marks.advance("c", 1)
    assert (marks.last("a"), marks.last("b"), marks.last("c")) == (2, 0, 1)


def size_of(publisher: Publisher) -> int:
    """Returns the bytes of a publisher and of the objects that only it holds."""
    held = (getattr(publisher, slot) for slot in Publisher.__slots__)
    return sys.getsizeof(publisher) + sum(sys.getsizeof(each) for each in held if not isinstance(each, int | str))


def test_a_publisher_is_small_whenever_it_is_idle() -> None:
    publisher = Publisher("p")
    assert size_of(publisher) < 200
    publisher.session = 7
    publisher.accept(1, 100)
    publisher.accept(2, 100)
    publisher.finish(2)
    publisher.detach()
    assert not publisher.is_idle
    assert publisher.finish(1) == 200
    assert publisher.is_idle
    assert size_of(publisher) < 200
    publisher.accept(3, 1)
    assert publisher.finish(3) == 1


def test_publishers_are_bounded_by_bytes_as_names_may_be_long() -> None:
    publishers = Publishers(publishers_max=1_000_000, bytes_max=100_000)
    for number in range(1000):
        publishers.get(f"{number:0>128}")
        assert publishers.bytes <= 100_000
    assert 100 < len(publishers) < 250
    assert publishers.forgotten == 1000 - len(publishers)
    assert publishers.known(f"{999:0>128}") is not None
    for number in range(1000 - len(publishers), 1000):
        publishers.get(f"{number:0>128}").session = 1
    with pytest.raises(Overloaded, match="publishers_bytes_max"):
        publishers.get("one too many")


def test_high_water_marks_are_bounded_by_bytes() -> None:
    marks = HighWaterMarks(publishers_max=1_000_000, bytes_max=100_000)
    for number in range(1000):
        marks.advance(f"{number:0>128}", 1)
        marks.advance(f"{number:0>128}", 2)
        assert marks.bytes <= 100_000
    assert marks.last(f"{999:0>128}") == 2
    assert marks.last(f"{0:0>128}") == 0
