"""Checks notifications where they enter the broker: scans PUBLISH frames in the read buffer, without Python objects.

The scan finds where each notification (a MessagePack map) starts and ends, and refuses those that break the rules of
`tidegate.notification.check`. A property test checks that the two agree. There are three separate outcomes:

- A notification that is well-formed MessagePack but breaks the rules is *refused*. Its neighbours are not.
- A frame that is not MessagePack of the right shape is *malformed*. The frames before it are still accepted.
- A frame of another kind, an incomplete frame, or one with a gap in its sequence ends the scan.

Invariant: each read of a byte is preceded by a comparison with the end of its frame, since numba checks no bounds.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tidegate.frames import HEADER_BYTES, Kind
from tidegate.kernels.bytes_kernel import LOWER_HALF, Bytes, Integers, U, big_endian_word, load_word
from tidegate.kernels.cache import inlined, kernel
from tidegate.kernels.msgpack_kernel import (
    FLOAT_32,
    FLOAT_64,
    INT_64,
    MALFORMED,
    UINT_8,
    array_at,
    integer_bytes,
    is_boolean,
    is_bytes,
    is_small_integer,
    is_text,
    map_at,
    skip_value,
    text_at,
)
from tidegate.notification import (
    ATTRIBUTES_MAX,
    INTEGER_MAX,
    NAME_BYTES_MAX,
    NOTIFICATION_BYTES_MAX,
    PAYLOAD,
    TEXT_BYTES_MAX,
)

FRAME_PUBLISH: Final = int(Kind.PUBLISH)
FRAME_HEADER: Final = HEADER_BYTES
# Places in the header: the length of the body is in the first four bytes.
FRAME_KIND: Final = 4
FRAME_SEQUENCE: Final = 8
PAYLOAD_NAME: Final = np.frombuffer(PAYLOAD.encode(), np.uint8)

# Why a notification is refused: the numbers of the N2xx error codes.
ACCEPTED: Final = 0
N_EMPTY: Final = 201
N_ATTRIBUTES: Final = 202
N_NAME: Final = 203
N_RESERVED: Final = 204
N_TYPE: Final = 205
N_TEXT: Final = 206
N_INTEGER: Final = 207
N_FINITE: Final = 208
N_PAYLOAD: Final = 209
N_TWICE: Final = 210
N_SIZE: Final = 211

# Rows of `found`, the result of a scan.
START: Final = 0
STOP: Final = 1
REFUSED: Final = 2


@inlined
def check_value(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Returns (end of the value, reason for refusal or ACCEPTED). The end is MALFORMED if the value is incomplete."""
    if position >= end:
        return MALFORMED, ACCEPTED
    tag = data[position]
    if tag == FLOAT_64 or tag == FLOAT_32:
        stop = position + (9 if tag == FLOAT_64 else 5)
        if stop > end:
            return MALFORMED, ACCEPTED
        # If all exponent bits are set, the number is NaN or infinite.
        mantissa_bits = 0xF0 if tag == FLOAT_64 else 0x80
        if data[position + 1] & 0x7F == 0x7F and data[position + 2] & mantissa_bits == mantissa_bits:
            return stop, N_FINITE
        return stop, ACCEPTED
    if is_small_integer(tag) or is_boolean(tag):
        return position + 1, ACCEPTED
    if is_text(tag):
        start, stop = text_at(data, position, end)
        return stop, N_TEXT if stop - start > TEXT_BYTES_MAX else ACCEPTED
    if tag >= UINT_8 and tag <= INT_64:
        width = integer_bytes(tag)
        stop = position + 1 + width
        if stop > end:
            return MALFORMED, ACCEPTED
        if width == 8:
            value = big_endian_word(data, position + 1)
            if tag == INT_64 and value >> U(63):
                value = ~value + U(1)
            if value > U(INTEGER_MAX):
                return stop, N_INTEGER
        return stop, ACCEPTED
    return skip_value(data, position, end), N_TYPE


@inlined
def same_bytes(data: Bytes, start: int, other: int, length: int) -> bool:
    for k in range(length):
        if data[start + k] != data[other + k]:
            return False
    return True


@inlined
def is_payload_name(data: Bytes, start: int, stop: int) -> bool:
    if stop - start != PAYLOAD_NAME.shape[0]:
        return False
    for k in range(stop - start):
        if data[start + k] != PAYLOAD_NAME[k]:
            return False
    return True


@inlined
def check_name(data: Bytes, start: int, stop: int, seen: int, names: Integers, name_starts: Integers) -> int:
    """Returns why a name is refused, or ACCEPTED. `names` holds a cheap fingerprint of each earlier name, to find
    duplicates."""
    length = stop - start
    if length < 1 or length > NAME_BYTES_MAX:
        return N_NAME
    fingerprint = length | np.int64(data[start]) << 8 | np.int64(data[stop - 1]) << 16
    fingerprint |= np.int64(data[start + length // 2]) << 24
    for k in range(seen):
        if names[k] == fingerprint and same_bytes(data, start, name_starts[k], length):
            return N_TWICE
    names[seen] = fingerprint
    name_starts[seen] = start
    return ACCEPTED


@inlined
def check_entry(
    data: Bytes, position: int, end: int, seen: int, names: Integers, name_starts: Integers
) -> tuple[int, int]:
    """Checks one name and its value. Returns (end of the value, reason for refusal or ACCEPTED)."""
    start, stop = text_at(data, position, end)
    if start < 0:
        after_name = skip_value(data, position, end)
        return (skip_value(data, after_name, end) if after_name >= 0 else MALFORMED), N_NAME
    wrong_name = check_name(data, start, stop, seen, names, name_starts)
    if wrong_name == ACCEPTED and data[start] == 0x24:  # "$": reserved for the payload, which must be bytes
        if not is_payload_name(data, start, stop):
            return skip_value(data, stop, end), N_RESERVED
        has_bytes = stop < end and is_bytes(data[stop])
        return skip_value(data, stop, end), ACCEPTED if has_bytes else N_PAYLOAD
    after, wrong_value = check_value(data, stop, end)
    return after, wrong_name if wrong_name != ACCEPTED else wrong_value


@inlined
def check_map(data: Bytes, position: int, end: int, names: Integers, name_starts: Integers) -> tuple[int, int]:
    """Checks one notification. Returns (end or MALFORMED, reason for refusal or ACCEPTED)."""
    count, body = map_at(data, position, end)
    if count < 0:
        return MALFORMED, ACCEPTED
    if count == 0:
        return body, N_EMPTY
    if count > ATTRIBUTES_MAX:
        return skip_value(data, position, end), N_ATTRIBUTES
    refused = ACCEPTED
    for seen in range(count):
        body, why = check_entry(data, body, end, seen, names, name_starts)
        if body < 0:
            return MALFORMED, ACCEPTED
        if why != ACCEPTED:
            # A refused entry may have left the fingerprint of an earlier notification here; no name equals -1.
            names[seen] = -1
            if refused == ACCEPTED:
                refused = why
    if body - position > NOTIFICATION_BYTES_MAX and refused == ACCEPTED:
        refused = N_SIZE
    return body, refused


@kernel
def scan_maps(data: Bytes, position: int, end: int, found: Integers, names: Integers, count: int) -> int:
    """Scans one MessagePack array of notifications after `count` others. Returns the new count, or MALFORMED.

    Column i of `found` receives the start, the stop and the refusal of notification i. Returns -2 if `found` has no
    room for the array: the caller processes what was found and calls again. `names` is working memory."""
    expected, position = array_at(data, position, end)
    if expected < 0 or expected > end - position:
        return MALFORMED
    if count + expected > found.shape[1]:
        return -2
    for i in range(count, count + expected):
        stop, why = check_map(data, position, end, names[0], names[1])
        if stop < 0:
            return MALFORMED
        found[START, i] = position
        found[STOP, i] = stop
        found[REFUSED, i] = why
        position = stop
    return count + expected if position == end else MALFORMED


@inlined
def frame_end(data: Bytes, position: int) -> int:
    """Returns the end of a frame, whose header is complete."""
    return position + FRAME_HEADER + np.int64(load_word(data, position) & LOWER_HALF)


@kernel
def scan_frames(
    data: Bytes, position: int, end: int, next_sequence: int, found: Integers, names: Integers
) -> tuple[int, int, int]:
    """Scans PUBLISH frames. Returns (position after the last good frame, notifications found, status).

    The status is MALFORMED if the next frame is malformed, otherwise 0. `next_sequence` is the sequence of the first
    notification, which the caller has read from the first frame."""
    count = np.int64(0)
    while end - position >= FRAME_HEADER and data[position + FRAME_KIND] == FRAME_PUBLISH:
        stop = frame_end(data, position)
        sequence = np.int64(load_word(data, position + FRAME_SEQUENCE))
        if stop > end or sequence != next_sequence + count:
            break
        after = scan_maps(data, position + FRAME_HEADER, stop, found, names, count)
        if after == MALFORMED:
            return position, count, MALFORMED
        if after < 0:
            break
        count = after
        position = stop
    return position, count, 0


@kernel
def check_maps(data: Bytes, starts: Integers, stops: Integers, names: Integers) -> int:
    """Checks the notifications of a batch whose starts and stops come from another process.

    They must follow one another within `data`, and each must fill the bytes from its start to its stop. Returns the
    index of the first that breaks a rule, or -1."""
    position = np.int64(0)
    for i in range(starts.shape[0]):
        if starts[i] < position or stops[i] > data.shape[0]:
            return i
        stop, why = check_map(data, starts[i], stops[i], names[0], names[1])
        if stop != stops[i] or why != ACCEPTED:
            return i
        position = stop
    return -1


def as_array(data: Any) -> Bytes:
    """Returns a view of a bytes-like object that the kernels accept."""
    return np.frombuffer(data, np.uint8)
