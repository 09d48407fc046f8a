"""A publisher's name with a key: another key is another publisher, and the full name is refused without the key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import NotAllowed, ProtocolError, Unavailable
from tidegate.layers.connection_point import Bounds, ConnectionPoint
from tidegate.layers.session_events import SessionEnded
from tidegate.security.publisher_key import KEY_CHARACTERS_MAX, KEY_CHARACTERS_MIN, is_keyed, make_key, whole_name

names = st.text(min_size=1, max_size=20).filter(lambda name: not is_keyed(name))
keys = st.text(min_size=KEY_CHARACTERS_MIN, max_size=40)


@given(names, keys, names, keys)
def test_whole_names_are_equal_only_for_the_same_name_and_key(name: str, key: str, other: str, other_key: str) -> None:
    is_same = whole_name(name, key) == whole_name(other, other_key)
    assert is_same == ((name, key) == (other, other_key))
    assert whole_name(name, key).startswith(name + "~")
    assert key not in whole_name(name, key).removeprefix(name)


@given(names, keys, st.just("") | keys)
def test_a_whole_name_is_refused_whatever_is_shown_with_it(name: str, key: str, shown: str) -> None:
    with pytest.raises(NotAllowed, match="A507"):
        whole_name(whole_name(name, key), shown)


@given(names)
def test_a_name_without_a_key_is_itself(name: str) -> None:
    assert whole_name(name, "") == name


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("p", "x" * (KEY_CHARACTERS_MIN - 1)),
        ("p", "x" * (KEY_CHARACTERS_MAX + 1)),
        ("", "x" * KEY_CHARACTERS_MIN),
        ("p" * 129, ""),
    ],
)
def test_a_key_that_can_be_guessed_and_a_name_that_is_too_long_are_refused(name: str, key: str) -> None:
    with pytest.raises(ProtocolError, match="P310"):
        whole_name(name, key)


def test_keys_that_are_made_up_differ_and_are_long_enough() -> None:
    assert len({make_key() for _ in range(1000)}) == 1000
    assert whole_name("p", make_key())


def test_a_session_is_taken_over_from_its_own_address_or_with_its_key() -> None:
    point = ConnectionPoint(1, "access-point-0", Bounds())
    plain, keyed = "sensor", whole_name("sensor", make_key())
    for name in (plain, keyed):
        first = point.open_session()
        point.attach_publisher(first, name, "10.0.0.1")
        second = point.open_session()
        outputs = point.attach_publisher(second, name, "10.0.0.1")
        assert [(to, frame.error.code) for to, frame in outputs if isinstance(frame, SessionEnded)] == [(first, "A504")]
        third = point.open_session()
        if name == plain:
            with pytest.raises(Unavailable, match="U716"):
                point.attach_publisher(third, name, "10.0.0.2")
            point.close_session(second)
            assert point.attach_publisher(third, name, "10.0.0.2") == [], "nobody uses the name now"
        else:
            outputs = point.attach_publisher(third, name, "10.0.0.2")
            assert [to for to, frame in outputs if isinstance(frame, SessionEnded)] == [second]
