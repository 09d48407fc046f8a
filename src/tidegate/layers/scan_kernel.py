"""The door's kernel: walks PUBLISH frames as they lie in the read buffer, and makes no Python object of a notification.

It finds where each notification (a MessagePack map) starts and ends, and refuses those that break the rules of
`tidegate.notification.check`; a property test holds the two together. Three outcomes, never mixed up:

- a notification that is well-formed MessagePack but against the rules is *refused*, its neighbours are not;
- a frame that is not MessagePack of the right shape is *malformed*: what stood before it in the read is still good;
- a frame of another kind, an incomplete one, or one whose sequence does not follow on ends the walk.

Every read of a byte is guarded by a comparison with the end of its frame: numba checks no bounds.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tidegate.frames import HEADER_BYTES, Kind
from tidegate.notification import (
    ATTRIBUTES_MAX,
    INTEGER_MAX,
    NAME_BYTES_MAX,
    NOTIFICATION_BYTES_MAX,
    PAYLOAD,
    TEXT_BYTES_MAX,
)

# Without reference counts (`_nrt`), which cost two atomic operations for every array that is passed on or cut. So no
# kernel may allocate: what it needs, its caller owns. Unsigned indices are not asked whether they count from the end.
_OPTIONS: Final[dict[str, Any]] = {"cache": True, "nogil": True, "_nrt": False}
kernel = njit(**_OPTIONS)
inlined = njit(**_OPTIONS, inline="always")

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]

FRAME_PUBLISH: Final = int(Kind.PUBLISH)
FRAME_HEADER: Final = HEADER_BYTES
PAYLOAD_NAME: Final = np.frombuffer(PAYLOAD.encode(), np.uint8)

# Why a notification is refused: the numbers of the N2xx codes. MALFORMED is no code: the frame itself is broken.
ACCEPTED: Final = 0
MALFORMED: Final = -1
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

# The rows of what a walk finds.
START: Final = 0
STOP: Final = 1
REFUSED: Final = 2


@kernel
def big_endian(data: Bytes, position: int, width: int) -> int:
    value = np.uint64(0)
    for k in range(width):
        value = (value << np.uint64(8)) | np.uint64(data[position + k])
    return value


@kernel
def length_of(data: Bytes, position: int, end: int, width: int) -> int:
    """A length field of `width` bytes, or -1 when it is cut off. Kept in int64: numba mixes uint64 into floats."""
    if position + width > end:
        return -1
    value = np.int64(0)
    for k in range(width):
        value = (value << 8) | np.int64(data[position + k])
    return value


@kernel
def is_utf8(data: Bytes, start: int, end: int) -> bool:
    seen = np.uint8(0)
    for k in range(np.uint64(start), np.uint64(end)):
        seen |= data[k]
    if seen < 0x80:
        return True
    k = start
    while k < end:
        lead = data[k]
        if lead < 0x80:
            k += 1
            continue
        if lead < 0xC2 or lead > 0xF4:
            return False
        more = 1 if lead < 0xE0 else (2 if lead < 0xF0 else 3)
        if k + more >= end:
            return False
        second = data[k + 1]
        if lead == 0xE0 and second < 0xA0:
            return False
        if lead == 0xED and second > 0x9F:  # surrogates
            return False
        if lead == 0xF0 and second < 0x90:
            return False
        if lead == 0xF4 and second > 0x8F:
            return False
        for j in range(1, more + 1):
            if data[k + j] & 0xC0 != 0x80:
                return False
        k += more + 1
    return True


@inlined
def text_at(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """(start, end) of the bytes of a string; start is -1 when there is no whole, valid string here."""
    if position >= end:
        return -1, -1
    tag = data[position]
    if tag & 0xE0 == 0xA0:
        start = position + 1
        length = np.int64(tag & 0x1F)
    elif 0xD9 <= tag <= 0xDB:
        width = 1 << np.int64(tag - 0xD9)
        start = position + 1 + width
        length = length_of(data, position + 1, end, width)
    else:
        return -1, -1
    if length < 0 or start + length > end or not is_utf8(data, start, start + length):
        return -1, -1
    return start, start + length


@kernel
def skip_value(data: Bytes, position: int, end: int) -> int:
    """The end of one MessagePack value of any type, or MALFORMED. Iterative: depth costs no stack."""
    remaining = np.int64(1)
    while remaining > 0:
        if position >= end:
            return MALFORMED
        tag = data[position]
        remaining -= 1
        size = np.int64(0)
        head = np.int64(1)
        if tag < 0x80 or tag >= 0xE0 or tag == 0xC0 or tag == 0xC2 or tag == 0xC3:
            pass
        elif tag < 0x90:
            remaining += 2 * np.int64(tag & 15)
        elif tag < 0xA0:
            remaining += np.int64(tag & 15)
        elif tag < 0xC0 or 0xD9 <= tag <= 0xDB:
            _start, stop = text_at(data, position, end)
            if stop < 0:
                return MALFORMED
            position = stop
            continue
        elif 0xC4 <= tag <= 0xC6:  # bin
            width = 1 << np.int64(tag - 0xC4)
            size = length_of(data, position + 1, end, width)
            head = 1 + width
        elif 0xC7 <= tag <= 0xC9:  # ext
            width = 1 << np.int64(tag - 0xC7)
            size = length_of(data, position + 1, end, width)
            head = 2 + width
        elif tag == 0xCA or tag == 0xCB:
            size = np.int64(4 if tag == 0xCA else 8)
        elif 0xCC <= tag <= 0xD3:
            size = 1 << np.int64((tag - 0xCC) & 3)
        elif 0xD4 <= tag <= 0xD8:  # fixext
            size = 1 << np.int64(tag - 0xD4)
            head = np.int64(2)
        elif tag == 0xDC or tag == 0xDD or tag == 0xDE or tag == 0xDF:
            width = 2 if tag & 1 == 0 else 4
            count = length_of(data, position + 1, end, width)
            if count < 0:
                return MALFORMED
            remaining += count * (2 if tag >= 0xDE else 1)
            head = np.int64(1 + width)
        else:  # 0xC1 is never used
            return MALFORMED
        if size < 0 or position + head + size > end or remaining > end - position:
            return MALFORMED
        position += head + size
    return position


@inlined
def check_value(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """(end of the value, why it is refused or ACCEPTED); the end is MALFORMED when there is no whole value."""
    if position >= end:
        return MALFORMED, ACCEPTED
    tag = data[position]
    if tag == 0xCB or tag == 0xCA:
        stop = position + (9 if tag == 0xCB else 5)
        if stop > end:
            return MALFORMED, ACCEPTED
        # All exponent bits set: NaN or an infinity.
        mantissa_bits = 0xF0 if tag == 0xCB else 0x80
        if data[position + 1] & 0x7F == 0x7F and data[position + 2] & mantissa_bits == mantissa_bits:
            return stop, N_FINITE
        return stop, ACCEPTED
    if tag < 0x80 or tag >= 0xE0 or tag == 0xC2 or tag == 0xC3:
        return position + 1, ACCEPTED
    if tag & 0xE0 == 0xA0 or 0xD9 <= tag <= 0xDB:
        start, stop = text_at(data, position, end)
        if start < 0:
            return MALFORMED, ACCEPTED
        return stop, N_TEXT if stop - start > TEXT_BYTES_MAX else ACCEPTED
    if 0xCC <= tag <= 0xD3:
        width = 1 << np.int64((tag - 0xCC) & 3)
        stop = position + 1 + width
        if stop > end:
            return MALFORMED, ACCEPTED
        if width == 8:
            value = big_endian(data, position + 1, 8)
            if tag == 0xD3 and value >> np.uint64(63):
                value = ~value + np.uint64(1)
            if value > np.uint64(INTEGER_MAX):
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
    """Why this name is refused. `names` holds a cheap fingerprint of each earlier name, to find a name used twice."""
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
    """(end of one name with its value, why it is refused)."""
    start, stop = text_at(data, position, end)
    if start < 0:
        after_name = skip_value(data, position, end)
        return (skip_value(data, after_name, end) if after_name >= 0 else MALFORMED), N_NAME
    wrong_name = check_name(data, start, stop, seen, names, name_starts)
    if wrong_name == ACCEPTED and data[start] == 0x24:  # "$": only the payload may be named so, and it is bytes
        if not is_payload_name(data, start, stop):
            return skip_value(data, stop, end), N_RESERVED
        is_bytes = stop < end and 0xC4 <= data[stop] <= 0xC6
        return skip_value(data, stop, end), ACCEPTED if is_bytes else N_PAYLOAD
    after, wrong_value = check_value(data, stop, end)
    return after, wrong_name if wrong_name != ACCEPTED else wrong_value


@inlined
def check_map(data: Bytes, position: int, end: int, names: Integers, name_starts: Integers) -> tuple[int, int]:
    """(end of one notification, why it is refused or ACCEPTED); the end is MALFORMED when it is no whole map."""
    if position >= end:
        return MALFORMED, ACCEPTED
    tag = data[position]
    if tag & 0xF0 == 0x80:
        count = np.int64(tag & 15)
        body = position + 1
    elif tag == 0xDE or tag == 0xDF:
        width = 2 if tag == 0xDE else 4
        count = length_of(data, position + 1, end, width)
        body = position + 1 + width
    else:
        return MALFORMED, ACCEPTED
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
            names[seen] = -1
            if refused == ACCEPTED:
                refused = why
    if body - position > NOTIFICATION_BYTES_MAX and refused == ACCEPTED:
        refused = N_SIZE
    return body, refused


@kernel
def scan_maps(data: Bytes, position: int, end: int, found: Integers, names: Integers, count: int) -> int:
    """Walks one MessagePack array of notifications, of which `count` are found already: the new count, or MALFORMED.

    Column i of `found` becomes the start, the stop and the refusal of notification i. Stops short, with -2, when it has
    no room: the caller takes what it has and comes back. `names` is for the walk alone."""
    if position >= end:
        return MALFORMED
    tag = data[position]
    if tag & 0xF0 == 0x90:
        expected = np.int64(tag & 15)
        position += 1
    elif tag == 0xDC or tag == 0xDD:
        width = 2 if tag == 0xDC else 4
        expected = length_of(data, position + 1, end, width)
        position += 1 + width
    else:
        return MALFORMED
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


@kernel
def scan_frames(
    data: Bytes, position: int, end: int, next_sequence: int, found: Integers, names: Integers
) -> tuple[int, int, int]:
    """Walks PUBLISH frames: (position after the last good frame, notifications found, MALFORMED or 0 for what follows).

    `next_sequence` is that of the first notification, read from the first frame by the caller."""
    count = np.int64(0)
    while end - position >= FRAME_HEADER and data[position + 4] == FRAME_PUBLISH:
        length = np.int64(0)
        sequence = np.int64(0)
        for k in range(4):
            length |= np.int64(data[position + k]) << (8 * k)
        for k in range(8):
            sequence |= np.int64(data[position + 8 + k]) << (8 * k)
        body = position + FRAME_HEADER
        if body + length > end or sequence != next_sequence + count:
            break
        after = scan_maps(data, body, body + length, found, names, count)
        if after == MALFORMED:
            return position, count, MALFORMED
        if after < 0:
            break
        count = after
        position = body + length
    return position, count, 0


def as_array(data: Any) -> Bytes:
    """A view of a bytes-like object that the kernels take."""
    return np.frombuffer(data, np.uint8)
