"""Filters and notifications drawn from small alphabets, so that matches, near misses and edge values really happen.

`conditions()` draws what a filter means without the parser's help: an oracle can judge a notification by it, and
`write_filter` turns it into text in one of the many ways a person may write it. The rest builds on these two.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hypothesis import strategies as st

from tidegate.filters import Filter

NAMES = ["a", "b", "NO2", "mañana", "my attr", "it's", "x;y", "!", "*", "true", "10"]
INTEGERS = [0, 1, -1, 2, 10, 12, 100, 2807, 28079004, 2**53, -(2**53), 2**53 - 1]
FLOATS = [-0.0, 0.5, 1.0, -1.0, 1.5, 2.0, 10.0, 12.5, 28079004.0, 5e-324, 1e16, 1e300, -1e300, 9007199254740992.0]
STRINGS = ["", "0", "1", "-1", "1.0", "10", "28", "2807", "004", "a", "ab", "b", "true", "nan", "A", "x y", "a..b"]
STRINGS += ["a,b", "it's", "''", ";", "é", "e\u0301", "ñ", "\uffff", "\U0001f600", "\x00", "*", "(a)"]

COMPARISONS = ["==", "!="]
ORDERINGS = ["<", "<=", ">", ">="]
PATTERNS = ["^=", "$=", "*="]

numbers = st.sampled_from(INTEGERS) | st.sampled_from(FLOATS) | st.integers(-3, 13)
strings = st.sampled_from(STRINGS)
booleans = st.booleans()
values = numbers | strings | booleans
names = st.sampled_from(NAMES[:3]) | st.sampled_from(NAMES)
spaces = st.sampled_from(["", "", "", " ", "  ", "\t", "\n", "\u00a0"])

_BARE = re.compile(r"(?:(?!\.\.)[^\s'\"();,|&=<>*!^$~])+")
_NUMBER_LIKE = re.compile(r"[+-]?[0-9.].*|[+-]?(?:nan|inf|infinity|null|none)|true|false", re.IGNORECASE)


class Condition(NamedTuple):
    """One constraint as drawn: `form` is an operator, `..`, `exists` or `absent`."""

    name: str
    form: str
    operands: tuple[str | int | float | bool, ...]


@st.composite
def conditions(draw: st.DrawFn) -> Condition:
    """One condition of any form that the language allows."""
    name = draw(names)
    form = draw(st.sampled_from([*COMPARISONS, *ORDERINGS, *PATTERNS, "..", "exists", "absent"]))
    if form in COMPARISONS:
        return Condition(name, form, tuple(draw(st.lists(values, min_size=1, max_size=4))))
    if form in ORDERINGS:
        return Condition(name, form, (draw(numbers | strings),))
    if form in PATTERNS:
        return Condition(name, form, (draw(strings),))
    if form == "..":
        ends = draw(st.lists(numbers, min_size=2, max_size=2) | st.lists(strings, min_size=2, max_size=2))
        return Condition(name, form, tuple(sorted(ends)))
    return Condition(name, form, ())


def condition_lists(max_size: int = 4) -> st.SearchStrategy[list[Condition]]:
    """What a filter means; the empty list means everything."""
    return st.lists(conditions(), max_size=max_size)


@st.composite
def write_filter(draw: st.DrawFn, meaning: list[Condition]) -> str:
    """One of the texts that a person may write for these conditions."""
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
def _write_operand(draw: st.DrawFn, value: str | float | bool, form: str) -> str:
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


def filter_texts(max_size: int = 4) -> st.SearchStrategy[str]:
    """Texts of valid filters, with white space, quotes and number forms as people vary them."""
    return condition_lists(max_size).flatmap(write_filter)


def filters(max_size: int = 4) -> st.SearchStrategy[Filter]:
    """Valid filters of up to `max_size` constraints, the one that matches everything included."""
    return filter_texts(max_size).map(Filter.parse)


def notifications(max_size: int = 6) -> st.SearchStrategy[dict[str, str | int | float | bool]]:
    """Notifications that the broker accepts, on the names and values that the filters use."""
    return st.dictionaries(names, values, min_size=1, max_size=max_size)
