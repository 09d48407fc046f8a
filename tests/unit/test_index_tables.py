"""Every word of a table's state has one meaning."""

from __future__ import annotations

from tidegate.index import tables as t
from tidegate.index.memory_kernel import size_class


def test_places_in_a_state_do_not_overlap() -> None:
    for own in (t.VOCABULARY_STATE, t.FILTERS_STATE, t.TREE_STATE):
        places = [t.TOP, t.FREE, t.COUNTED, *own]
        assert len(set(places)) == len(places)
        assert max(places) < t.HEADS
    largest, _words = size_class(1 << 40)
    assert t.HEADS + largest < t.STATE_SIZE
