"""A JSON object with a duplicate key is detected, at any depth and in any notation; no other object is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import NotificationError
from tidegate.listeners.http.json_keys import ARRAY_BYTES, refuse_duplicate_keys


class Pairs(tuple[tuple[str, Any], ...]):
    """An object as written, with possible duplicate keys."""


texts = st.text(alphabet='ab:"\\\n\u003aé😀', max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(texts, inner), max_size=3).map(Pairs),
    max_leaves=12,
)


def write(value: Any, space: str, escapes: bool) -> str:
    if isinstance(value, Pairs):
        pairs = (f"{write(key, space, escapes)}{space}:{space}{write(each, space, escapes)}" for key, each in value)
        return "{" + f",{space}".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(write(each, space, escapes) for each in value) + "]"
    if isinstance(value, str) and escapes:
        return '"' + "".join(f"\\u{ord(each):04x}" if ord(each) < 0x10000 else each for each in value) + '"'
    return json.dumps(value, ensure_ascii=False)


def has_duplicates(value: Any) -> bool:
    if isinstance(value, Pairs):
        keys = [key for key, _ in value]
        return len(set(keys)) < len(keys) or any(has_duplicates(each) for _, each in value)
    return isinstance(value, list) and any(map(has_duplicates, value))


@given(values, st.sampled_from(["", " ", "\n\t"]), st.booleans(), st.booleans())
def test_exactly_those_with_a_key_twice_are_refused(value: Any, space: str, escapes: bool, is_long: bool) -> None:
    others = ['{"name": "12:00", "b": 1},'] * (ARRAY_BYTES // 20 if is_long else 0)
    body = f"[{''.join(others)}{write(value, space, escapes)}]".encode()
    parsed = msgspec.json.decode(body)
    if has_duplicates(value):
        with pytest.raises(NotificationError, match="N210"):
            refuse_duplicate_keys(body, parsed)
    else:
        refuse_duplicate_keys(body, parsed)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1, "a": 2}',
        b'[{"a": 1}, {"b": 1, "b": 1}]',
        b'["a", {"x": 1, "x": 2}]',
        b'{"a": 1, "a": 2, "colon": "\\u003a"}',
        b'{"\\u0061": 1, "a": 2}',
        b'{"a": {"b": [{"c": ":", "c": 1}]}}',
    ],
)
def test_what_looks_right_by_count_is_refused_too(body: bytes) -> None:
    with pytest.raises(NotificationError, match="N210"):
        refuse_duplicate_keys(body, msgspec.json.decode(body))


def test_a_body_that_is_nearly_too_deep_is_no_error_however_deep_the_caller_is() -> None:
    def call(frames: int, body: bytes) -> None:
        if frames:
            call(frames - 1, body)
        else:
            refuse_duplicate_keys(body)

    for frames in range(0, 60, 7):
        for depth in range(900, 1001):
            call(frames, b'{"a":' * depth + b"1" + b"}" * depth)
