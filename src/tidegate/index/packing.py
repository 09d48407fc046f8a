"""Packs filters into MessagePack, [[name, operator, operand, …], …], as the kernels read them, and unpacks records.

Filters reach an index in this form, alone or in bulk. An operator is encoded as its position in `OPERATORS`; the
kernels use the same numbers.

What may go wrong: another process sends packed filters that are malformed. `check_packed` and `check_entries` raise
ForeignFrame before a kernel reads them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from tidegate.errors import ForeignFrame
from tidegate.filters import Constraint, Filter, Operator
from tidegate.index import packed_kernel
from tidegate.index import record_kernel as k
from tidegate.index import tables as t
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
_OPERATOR_OF_KIND: Final = {
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


def check_packed(filters: bytes, count: int) -> None:
    """Raises ForeignFrame unless `filters` is exactly `count` packed filters, one after another."""
    wrong = packed_kernel.check_filters(np.frombuffer(filters, np.uint8), count)
    if wrong >= 0 or (not count and filters):
        raise _malformed(wrong, count)


def check_entries(filters: Sequence[bytes]) -> None:
    """Raises ForeignFrame unless each item is exactly one packed filter."""
    ends = np.cumsum([len(each) for each in filters], dtype=np.int64)
    wrong = packed_kernel.check_filters_between(np.frombuffer(b"".join(filters), np.uint8), ends)
    if wrong >= 0:
        raise _malformed(wrong, len(filters))


def _malformed(place: int, count: int) -> ForeignFrame:
    return ForeignFrame(f"packed filter {place + 1} of {count} is malformed")


def unpack_record(vocabulary: t.Vocabulary, filters: t.Filters, record: int) -> Filter:
    """Returns the filter that a record was made from.

    The order of its constraints may differ, and bounds that were merged into one interval stay merged."""
    size = int(filters.code[record + k.META]) & k.RECORD_WORDS_MASK
    words = [int(word) for word in filters.code[record : record + size]]
    constraints: list[Constraint] = []
    at = k.HEAD_WORDS
    while at < len(words):
        following = at + 1 + (words[at] >> k.WORDS_SHIFT & k.WORDS_MASK)
        constraints += _read_constraints(vocabulary, words[at], words[at + 1 : following])
        at = following
    return Filter(tuple(constraints))


def _read_constraints(vocabulary: t.Vocabulary, head: int, operands: list[int]) -> Iterator[Constraint]:
    kind, payload = head >> k.KIND_SHIFT & k.KIND_MASK, head >> k.PAYLOAD_SHIFT
    name = _text(vocabulary, int(vocabulary.attributes[head & k.ATTRIBUTE_MASK, t.NAME]))
    if kind == k.K_INTERVAL:
        yield from _read_interval(name, _number(operands[0]), _number(operands[1]))
    elif kind == k.K_TEXT_RANGE:
        low, high = (_text(vocabulary, operand - 1) if operand else None for operand in operands)
        yield from _read_bounds(name, low, high, bool(payload & k.LOW_IS_STRICT), bool(payload & k.HIGH_IS_STRICT))
    else:
        yield Constraint(name, _OPERATOR_OF_KIND[kind], tuple(_read_values(vocabulary, kind, payload, operands)))


def _read_interval(name: str, low: float, high: float) -> Iterator[Constraint]:
    """Yields the constraints of an interval, guessing which of its bounds were strict.

    A record stores a strict bound as the adjacent double, which has a longer decimal form than the original bound."""
    if low == high:
        yield Constraint(name, Operator.EQUAL, (low,))
        return
    below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    is_above, is_below = len(repr(below)) < len(repr(low)), len(repr(above)) < len(repr(high))
    first = _integer_if_whole(below) if is_above else low
    last = _integer_if_whole(above) if is_below else high
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
        yield from (bool(value) for value in range(2) if payload >> k.BOOLEANS_SHIFT + value & 1)
        numbers = payload & k.LIST_COUNT_MASK
        yield from map(_number, operands[:numbers])
        yield from (_text(vocabulary, operand) for operand in operands[numbers:])
    elif kind == k.K_BOOLEAN:
        yield payload & 1 == 1
    elif kind in (k.K_STRING, k.K_PREFIX, k.K_SUFFIX, k.K_CONTAINS):
        yield _text(vocabulary, payload)


def _number(word: int) -> float | int:
    return _integer_if_whole(struct.unpack("<d", struct.pack("<Q", word))[0])


def _integer_if_whole(number: float) -> float | int:
    """Returns the one form that equal numbers share: 1.0 becomes 1."""
    return int(number) if abs(number) <= INTEGER_MAX and number.is_integer() else number


def _text(vocabulary: t.Vocabulary, string: int) -> str:
    offset, length = int(vocabulary.strings[string, t.OFFSET]), int(vocabulary.strings[string, t.LENGTH])
    return vocabulary.words[offset : offset + (length + 7) // 8].tobytes()[:length].decode()
