"""Packed filters: a filter as MessagePack, [[name, operator, operand, …], …], as the kernels read it.

It is how filters reach an index in bulk. An operator is its place in `OPERATORS`; the kernels know the same numbers.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tidegate.filters import Filter, Operator

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
_encode = msgspec.msgpack.Encoder().encode


def pack(subscription_filter: Filter) -> bytes:
    return _encode([(c.name, _NUMBER_OF[c.operator], *c.operands) for c in subscription_filter.constraints])
