"""Checks packed filters (packing.py) before the index translates them.

`record_kernel.translate` trusts its input, and numba checks no bounds. Packed filters come from other processes: with a
change of a subscription, with a Matcher's share of the subscriptions, or from the registry. A filter that passes these
checks is complete and respects every limit on which the arrays of the index depend: constraints, values, bytes, finite
numbers, valid UTF-8, and lists in ascending order without duplicates.
"""

from __future__ import annotations

import numpy as np

from tidegate.index.record_kernel import ABSENT, CONSTRAINTS_MAX, CONTAINS, EQUAL, EXISTS, NOT_EQUAL, PREFIX, RANGE
from tidegate.index.tables import I64
from tidegate.kernels.bytes_kernel import Bytes
from tidegate.kernels.cache import inlined, kernel
from tidegate.kernels.msgpack_kernel import MALFORMED, array_at, is_boolean, is_text, read_number, text_at, text_bounds
from tidegate.kernels.scan_kernel import ACCEPTED, check_value
from tidegate.notification import NAME_BYTES_MAX

# Values in all constraints of one filter together; must be equal to `filters.VALUES_MAX`.
VALUES_MAX = 256
# The text of a filter has at most 4096 characters of up to four bytes. Numbers may be longer when packed than in text.
FILTER_BYTES_MAX = 32 * 1024

# Classes of values, in the order in which the operands of a list are sorted.
BOOLEAN = 0
NUMBER = 1
TEXT = 2


@inlined
def class_at(data: Bytes, position: int) -> int:
    tag = data[position]
    if is_text(tag):
        return TEXT
    return BOOLEAN if is_boolean(tag) else NUMBER


@kernel
def is_ascending(data: Bytes, position: int, other: int) -> bool:
    """Returns whether the first of two checked values of one class is less than the second."""
    kind = class_at(data, position)
    if kind == NUMBER:
        number, _end = read_number(data, position)
        following, _end = read_number(data, other)
        return number < following
    if kind == BOOLEAN:
        return data[position] < data[other]
    start, stop = text_bounds(data, position)
    other_start, other_stop = text_bounds(data, other)
    for k in range(min(stop - start, other_stop - other_start)):
        if data[start + k] != data[other_start + k]:
            return data[start + k] < data[other_start + k]
    return stop - start < other_stop - other_start


@kernel
def check_operands(data: Bytes, position: int, end: int, operator: int, operands: int) -> int:
    """Returns the end of the operands, or MALFORMED if the operator does not accept them."""
    if operator == EXISTS or operator == ABSENT:
        return position if operands == 0 else MALFORMED
    is_list = operator == EQUAL or operator == NOT_EQUAL
    if operands < 1 or (not is_list and operands != (2 if operator == RANGE else 1)):
        return MALFORMED
    before = np.int64(-1)
    for _ in range(operands):
        stop, why = check_value(data, position, end)
        if stop < 0 or why != ACCEPTED:
            return MALFORMED
        kind = class_at(data, position)
        if operator >= PREFIX and operator <= CONTAINS:
            if kind != TEXT:
                return MALFORMED
        elif not is_list and kind == BOOLEAN:
            return MALFORMED
        if before >= 0:
            before_kind = class_at(data, before)
            if kind < before_kind or (not is_list and kind != before_kind):
                return MALFORMED
            if is_list and kind == before_kind and not is_ascending(data, before, position):
                return MALFORMED
        before = position
        position = stop
    return position


@kernel
def check_filter(data: Bytes, position: int, end: int) -> int:
    """Returns the end of one packed filter, or MALFORMED."""
    begin = position
    count, position = array_at(data, position, end)
    if count < 0 or count > CONSTRAINTS_MAX:
        return MALFORMED
    values = np.int64(0)
    for _ in range(count):
        items, position = array_at(data, position, end)
        if items < 2 or items - 2 > VALUES_MAX:
            return MALFORMED
        start, stop = text_at(data, position, end)
        if start < 0 or stop - start < 1 or stop - start > NAME_BYTES_MAX or stop >= end or data[stop] > ABSENT:
            return MALFORMED
        values += items - 2
        position = check_operands(data, stop + 1, end, np.int64(data[stop]), items - 2)
        if position < 0 or values > VALUES_MAX or position - begin > FILTER_BYTES_MAX:
            return MALFORMED
    return position


@kernel
def check_filters(data: Bytes, count: int) -> int:
    """Checks `count` packed filters that follow one another. Returns the index of the first malformed one, or -1."""
    position = np.int64(0)
    for k in range(count):
        position = check_filter(data, position, data.shape[0])
        if position < 0:
            return k
    return -1 if position == data.shape[0] else count - 1


@kernel
def check_filters_between(data: Bytes, ends: I64) -> int:
    """Does the same for filters that must each end exactly at their place in `ends`, which another process has sent."""
    position = np.int64(0)
    for k in range(ends.shape[0]):
        if ends[k] > data.shape[0] or check_filter(data, position, ends[k]) != ends[k]:
            return k
        position = ends[k]
    return -1
