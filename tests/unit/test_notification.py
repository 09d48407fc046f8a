"""The notifications that the broker accepts, and how people write values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import NotificationError
from tidegate.notification import INTEGER_MAX, PAYLOAD, check, parse_value


@pytest.mark.parametrize(
    "notification",
    [
        {"NO2": 212, "station": "28079004", "open": True, "level": 0.5, "name": ""},
        {"a": INTEGER_MAX, "b": -INTEGER_MAX, "mañana": "ñ", "with space": 1},
        {"a": 1, PAYLOAD: b"\x00\xff"},
    ],
)
def test_these_may_enter(notification: dict[str, Any]) -> None:
    check(notification)


@pytest.mark.parametrize(
    ("notification", "code"),
    [
        ({}, "N201"),
        ({str(i): 1 for i in range(65)}, "N202"),
        ({"": 1}, "N203"),
        ({"n" * 256: 1}, "N203"),
        ({1: 1}, "N203"),
        ({"$x": 1}, "N204"),
        ({"a": None}, "N205"),
        ({"a": [1]}, "N205"),
        ({"a": {"b": 1}}, "N205"),
        ({"a": b"bytes"}, "N205"),
        ({"a": "x" * 65_536}, "N206"),
        ({"a": INTEGER_MAX + 1}, "N207"),
        ({"a": 10**5000}, "N207"),
        ({"a": float("nan")}, "N208"),
        ({"a": float("-inf")}, "N208"),
        ({PAYLOAD: "text"}, "N209"),
        ({"a": "\ud800"}, "N212"),
        ({"\ud800": 1}, "N212"),
    ],
)
def test_these_may_not(notification: dict[Any, Any], code: str) -> None:
    with pytest.raises(NotificationError, match=code):
        check(notification)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("212", 212), ("-1.5", -1.5), ("1e3", 1000.0), ("0", 0), ("true", True), ("false", False), ("True", "True"),
        ("08001", "08001"), ("+5", "+5"), (".5", ".5"), ("", ""), ("NaN", "NaN"), ("1_000", "1_000"),
        ("\u0661", "\u0661"),
    ],
)  # fmt: skip
def test_a_bare_word_is_a_json_number_a_boolean_or_itself(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(("text", "code"), [("9007199254740993", "N207"), ("1" * 5000, "N207"), ("1e999", "N208")])
def test_a_number_that_cannot_be_exact_is_refused(text: str, code: str) -> None:
    with pytest.raises(NotificationError, match=code):
        parse_value(text)


@given(st.text())
def test_any_text_is_itself_a_json_value_or_refused(text: str) -> None:
    try:
        value = parse_value(text)
    except NotificationError:
        assert math.isfinite(float(text)) is False or abs(float(text)) > 2**53
        return
    assert value == text if isinstance(value, str) else json.loads(text) == value
