"""Places of connections: up to the bound, plus a few for polite refusals; none is lost or given twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.listeners.connections import SURPLUS_MAX, Connections, Place


@given(st.integers(1, 5), st.lists(st.none() | st.integers(0, 40), max_size=120))
def test_places_are_as_many_as_their_holders(connections_max: int, steps: list[int | None]) -> None:
    """A step takes a place, or releases the place of that number if it exists, twice to check that this is harmless."""
    connections = Connections(connections_max)
    held: list[Place] = []
    refused = 0
    for step in steps:
        if step is None:
            place = connections.take()
            refused += len(held) >= connections_max
            assert (place is None) == (len(held) >= connections_max + SURPLUS_MAX)
            if place is not None:
                held.append(place)
                assert place.is_surplus == (len(held) > connections_max)
        elif step < len(held):
            place = held.pop(step)
            place.give_back()
            place.give_back()
        assert connections.statistics().open == len(held)
    assert connections.statistics().refused == refused
    assert connections.refusal().code == "L601"


def test_a_surplus_connection_is_served_when_another_one_has_left() -> None:
    connections = Connections(1)
    first, second = connections.take(), connections.take()
    assert first is not None
    assert second is not None
    assert second.is_surplus
    first.give_back()
    assert not second.is_surplus
    assert connections.take() is not None
    assert not second.is_surplus
