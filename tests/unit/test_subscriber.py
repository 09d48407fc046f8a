"""Deliveries of one frame reach each subscription that they are addressed to, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.client.subscriber import Delivery, by_subscription

numbers = st.integers(1, 4)
addresses = numbers | st.lists(numbers, min_size=2, max_size=4, unique=True).map(tuple)


@given(st.lists(addresses, max_size=10))
def test_each_subscription_gets_its_own_in_order(addressed: list[int | tuple[int, ...]]) -> None:
    deliveries = [Delivery(to, sequence, {"a": sequence}) for sequence, to in enumerate(addressed)]
    mine = by_subscription(deliveries)
    for number in range(1, 5):
        expected = [i for i, to in enumerate(addressed) if to == number or (isinstance(to, tuple) and number in to)]
        assert [delivery.sequence for delivery in mine.get(number, [])] == expected


@given(st.lists(addresses, min_size=1, max_size=10))
def test_what_one_subscription_marks_the_others_do_not_see(addressed: list[int | tuple[int, ...]]) -> None:
    mine = by_subscription([Delivery(to, sequence, {"a": sequence}) for sequence, to in enumerate(addressed)])
    for number, deliveries in mine.items():
        deliveries[0].missed = number
    assert all(deliveries[0].missed == number for number, deliveries in mine.items())
