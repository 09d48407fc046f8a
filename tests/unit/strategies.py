"""Filters and notifications from small alphabets, so that matches, near misses and edge values actually happen.

`conditions()` draws the meaning of a filter without the parser, so that an oracle can judge a notification by it.
`write_filter` turns the meaning into text, in one of the many ways a person may write it. The rest builds on these two.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeAlias

from hypothesis import strategies as st

from tidegate.filters import Filter
from tidegate.notification import Value

Notification: TypeAlias = dict[str, Value]

NAMES = ["a", "b", "NO2", "mañana", "my attr", "it's", "x;y", "!", "*", "true", "10"]
INTEGERS = [0, 1, -1, 2, 10, 12, 100, 2807, 28079004, 2**53, -(2**53), 2**53 - 1]
FLOATS = [-0.0, 0.5, 1.0, -1.0, 1.5, 2.0, 10.0, 12.5, 28079004.0, 5e-324, 1e16, 1e300, -1e300, 9007199254740992.0]
STRINGS = ["", "0", "1", "-1", "1.0", "10", "28", "2807", "004", "a", "ab", "b", "true", "nan", "A", "x y", "a..b"]
STRINGS += ["a,b", "it's", "''", ";", "é", "e\u0301", "ñ", "\uffff", "\U0001f600", "\x00", "*", "(a)"]

COMPARISONS = ["==", "!="]
ORDERINGS = ["<", "<=", ">", ">="]
PATTERNS = ["^=", "$=", "*="]

# A few names and values are frequent, so that filters match notifications. The rest are edge values.
numbers = st.sampled_from([0, 1, 1.0, 2]) | st.sampled_from(INTEGERS) | st.sampled_from(FLOATS)
strings = st.sampled_from(["", "1", "a", "ab"]) | st.sampled_from(STRINGS)
booleans = st.booleans()
values = numbers | strings | booleans
names = st.sampled_from([*NAMES[:2] * 8, *NAMES])
spaces = st.sampled_from(["", "", "", " ", "  ", "\t", "\n", "\u00a0"])

_BARE = re.compile(r"(?:(?!\.\.)[^\s'\"();,|&=<>*!^$~])+")
_NUMBER_LIKE = re.compile(r"[+-]?[0-9.].*|[+-]?(?:nan|inf|infinity|null|none)|true|false", re.IGNORECASE)


class Condition(NamedTuple):
    """A drawn constraint. `form` is an operator, `..`, `exists` or `absent`."""

    name: str
    form: str
    operands: tuple[Value, ...]


@st.composite
def conditions(draw: st.DrawFn, about: Notification | None = None) -> Condition:
    """Draws a condition of any form that the language allows. With `about`, it often holds for that notification."""
    name = draw(names if not about else st.sampled_from(sorted(about)) | names)
    value = about.get(name) if about else None
    likely = values if value is None else st.just(value) | st.just(value) | values
    form = draw(st.sampled_from([*COMPARISONS, *ORDERINGS, *PATTERNS, "..", "exists", "absent"]))
    if form in COMPARISONS:
        return Condition(name, form, tuple(draw(st.lists(likely, min_size=1, max_size=4))))
    if form in ORDERINGS:
        return Condition(name, form, (draw(likely.filter(lambda bound: not isinstance(bound, bool))),))
    if form in PATTERNS:
        return Condition(name, form, (draw(strings | likely.map(str).flatmap(_parts)),))
    if form == "..":
        return Condition(name, form, draw(_ranges(value)))
    return Condition(name, form, ())


@st.composite
def _ranges(draw: st.DrawFn, value: Value | None) -> tuple[Value, ...]:
    kind: st.SearchStrategy[Any] = strings if isinstance(value, str) else numbers
    if value is None or isinstance(value, bool):
        kind = draw(st.sampled_from([numbers, strings]))
    return tuple(sorted(draw(st.lists(kind, min_size=2, max_size=2))))


def _parts(text: str) -> st.SearchStrategy[str]:
    return st.integers(0, len(text)).flatmap(lambda cut: st.sampled_from([text[:cut], text[cut:]]))


def condition_lists(max_size: int = 4, about: Notification | None = None) -> st.SearchStrategy[list[Condition]]:
    """Draws the meaning of a filter. The empty list matches everything."""
    return st.lists(conditions(about), max_size=max_size)


@st.composite
def write_filter(draw: st.DrawFn, meaning: list[Condition]) -> str:
    """Draws one of the texts that a person may write for these conditions."""
    if not meaning:
        return draw(spaces) + "*" + draw(spaces)
    return ";".join(draw(_write_condition(condition)) for condition in meaning)


@st.composite
def _write_condition(draw: st.DrawFn, condition: Condition) -> str:
    name = draw(_write_name(condition.name))
    operands = [draw(_write_operand(operand, condition.form)) for operand in condition.operands]
    if condition.form == "absent":
        parts = ["!", name]
    elif condition.form == "exists":
        parts = [name]
    elif condition.form == "..":
        parts = [name, "==", operands[0], "..", operands[1]]
    else:
        parts = [name, condition.form, f"{draw(spaces)},{draw(spaces)}".join(operands)]
    return draw(spaces) + "".join(part + draw(spaces) for part in parts)


@st.composite
def _write_name(draw: st.DrawFn, name: str) -> str:
    return name if _BARE.fullmatch(name) and draw(st.booleans()) else _quote(name)


@st.composite
def _write_operand(draw: st.DrawFn, value: Value, form: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        may_be_bare = _BARE.fullmatch(value) and (form in PATTERNS or not _NUMBER_LIKE.fullmatch(value))
        return value if may_be_bare and draw(st.booleans()) else _quote(value)
    if isinstance(value, int) and draw(st.booleans()):
        return f"{value}.0" if draw(st.booleans()) else f"{value}e0"
    return repr(value)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def filter_texts(max_size: int = 4, about: Notification | None = None) -> st.SearchStrategy[str]:
    """Draws texts of valid filters, with various white space, quotes and number forms."""
    return condition_lists(max_size, about).flatmap(write_filter)


def filters(max_size: int = 4, about: Notification | None = None) -> st.SearchStrategy[Filter]:
    """Draws valid filters of up to `max_size` constraints, including the one that matches everything.

    With `about`, many of them match that notification: `notifications().flatmap(lambda n: filters(about=n))`."""
    return filter_texts(max_size, about).map(Filter.parse)


def notifications(max_size: int = 6) -> st.SearchStrategy[Notification]:
    """Draws notifications that the broker accepts, with the names and values that the filters use."""
    return st.dictionaries(names, values, min_size=1, max_size=max_size)
