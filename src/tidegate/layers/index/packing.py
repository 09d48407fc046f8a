"""Packed filters: a filter as MessagePack, [[name, operator, operand, …], …], as the kernels read it; and back.

It is how filters reach an index in bulk. An operator is its place in `OPERATORS`; the kernels know the same numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from tidegate.filters import Constraint, Filter, Operator
from tidegate.layers.index import record_kernel as k
from tidegate.layers.index import tables as t
from tidegate.notification import INTEGER_MAX, Value

OPERATORS: Final = (
    Operator.EQUAL,
    Operator.NOT_EQUAL,
    Operator.BELOW,
    Operator.AT_MOST,
    Operator.ABOVE,
    Operator.AT_LEAST,
    Operator.RANGE,
    Operator.PREFIX,
    Operator.SUFFIX,
    Operator.CONTAINS,
    Operator.EXISTS,
    Operator.ABSENT,
)
_NUMBER_OF: Final = {operator: number for number, operator in enumerate(OPERATORS)}
_PLAIN: Final = {
    k.K_EXISTS: Operator.EXISTS,
    k.K_ABSENT: Operator.ABSENT,
    k.K_STRING: Operator.EQUAL,
    k.K_BOOLEAN: Operator.EQUAL,
    k.K_ONE_OF: Operator.EQUAL,
    k.K_NONE_OF: Operator.NOT_EQUAL,
    k.K_PREFIX: Operator.PREFIX,
    k.K_SUFFIX: Operator.SUFFIX,
    k.K_CONTAINS: Operator.CONTAINS,
}
_encode = msgspec.msgpack.Encoder().encode


def pack(subscription_filter: Filter) -> bytes:
    return _encode([(c.name, _NUMBER_OF[c.operator], *c.operands) for c in subscription_filter.constraints])


def unpack_record(vocabulary: t.Vocabulary, filters: t.Filters, record: int) -> Filter:
    """The filter that a record was made of, but for the order of its constraints; bounds that were joined are one."""
    words = [int(word) for word in filters.code[record : record + (int(filters.code[record + k.META]) & 0xFFFF)]]
    constraints: list[Constraint] = []
    at = k.HEAD_WORDS
    while at < len(words):
        following = at + 1 + (words[at] >> 21 & 0x3FF)
        constraints += _read_constraints(vocabulary, words[at], words[at + 1 : following])
        at = following
    return Filter(tuple(constraints))


def _read_constraints(vocabulary: t.Vocabulary, head: int, operands: list[int]) -> Iterator[Constraint]:
    kind, payload = head >> 16 & 0xF, head >> 32
    name = _text(vocabulary, int(vocabulary.attributes[head & 0xFFFF, t.NAME]))
    if kind == k.K_INTERVAL:
        yield from _read_interval(name, _number(operands[0]), _number(operands[1]))
    elif kind == k.K_TEXT_RANGE:
        low, high = (_text(vocabulary, operand - 1) if operand else None for operand in operands)
        yield from _read_bounds(name, low, high, payload & 1 != 0, payload & 2 != 0)
    else:
        yield Constraint(name, _PLAIN[kind], tuple(_read_values(vocabulary, kind, payload, operands)))


def _read_interval(name: str, low: float, high: float) -> Iterator[Constraint]:
    """A strict bound is kept as the number next to it, which is longer when written down."""
    if low == high:
        yield Constraint(name, Operator.EQUAL, (low,))
        return
    below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    is_above, is_below = len(repr(below)) < len(repr(low)), len(repr(above)) < len(repr(high))
    first = _whole(below) if is_above else low
    last = _whole(above) if is_below else high
    yield from _read_bounds(
        name, first if math.isfinite(low) else None, last if math.isfinite(high) else None, is_above, is_below
    )


def _read_bounds(name: str, low: Any, high: Any, is_above: bool, is_below: bool) -> Iterator[Constraint]:
    if low is not None and high is not None and not is_above and not is_below:
        yield Constraint(name, Operator.RANGE, (low, high))
        return
    if low is not None:
        yield Constraint(name, Operator.ABOVE if is_above else Operator.AT_LEAST, (low,))
    if high is not None:
        yield Constraint(name, Operator.BELOW if is_below else Operator.AT_MOST, (high,))


def _read_values(vocabulary: t.Vocabulary, kind: int, payload: int, operands: list[int]) -> Iterator[Value]:
    if kind in (k.K_ONE_OF, k.K_NONE_OF):
        yield from (bool(value) for value in range(2) if payload >> 20 + value & 1)
        numbers = payload & 0x3FF
        yield from map(_number, operands[:numbers])
        yield from (_text(vocabulary, operand) for operand in operands[numbers:])
    elif kind == k.K_BOOLEAN:
        yield payload & 1 == 1
    elif kind in (k.K_STRING, k.K_PREFIX, k.K_SUFFIX, k.K_CONTAINS):
        yield _text(vocabulary, payload)


def _number(word: int) -> float | int:
    return _whole(struct.unpack("<d", struct.pack("<Q", word))[0])


def _whole(number: float) -> float | int:
    """Of equal numbers there is one form: 1.0 is 1."""
    return int(number) if abs(number) <= INTEGER_MAX and number.is_integer() else number


def _text(vocabulary: t.Vocabulary, string: int) -> str:
    offset, length = int(vocabulary.strings[string, t.OFFSET]), int(vocabulary.strings[string, t.LENGTH])
    return vocabulary.words[offset : offset + (length + 7) // 8].tobytes()[:length].decode()
