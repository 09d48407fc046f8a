"""The kernel of range reads: finds the parts of each record of a page, and makes no Python object of a message.

A page (`tidegate.messages.Page`) holds records one behind the other: a checksum that the broker has verified, then an
array of group, time, body, device, sequence and headers. Every read of a byte is guarded by a comparison with the end
of its record: numba checks no bounds.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidegate.layers.deliver_kernel import put_bytes
from tidegate.layers.scan_kernel import MALFORMED, Bytes, Integers, big_endian, kernel, skip_value, text_at

CHECKSUM_BYTES: Final = 4
# The columns of what is found of a record: where its texts, its body and its headers lie, and its device's sequence.
GROUP: Final = 0
BODY: Final = 2
DEVICE: Final = 4
HEADERS: Final = 6
DEVICE_SEQUENCE: Final = 8
PARTS: Final = 9
_ARRAY_OF_SIX: Final = 0x96
_NO_HEADERS: Final = 0x80


@kernel
def find_parts(
    records: Bytes, ends: NDArray[np.uint32], parts: NDArray[np.int64], times: NDArray[np.uint64]
) -> tuple[int, int]:
    """(records understood, how many of them have headers); `times` are the bits of doubles. It stops at the first that
    is not as records are written, such as a text that is not UTF-8: its reader must look more closely."""
    start = np.int64(0)
    with_headers = 0
    for index in range(len(ends)):
        end = np.int64(ends[index])
        position = start + CHECKSUM_BYTES
        if position >= end or records[position] != _ARRAY_OF_SIX:
            return index, with_headers
        group, group_end = text_at(records, position + 1, end)
        if group < 0 or group_end + 9 > end or records[group_end] != 0xCB:
            return index, with_headers
        times[index] = big_endian(records, group_end + 1, 8)
        body = group_end + 9
        body_end = skip_value(records, body, end)
        if body_end == MALFORMED:
            return index, with_headers
        device, device_end = text_at(records, body_end, end)
        if device < 0:
            return index, with_headers
        sequence, headers = _whole_number(records, device_end, end)
        if headers < 0 or headers >= end:
            return index, with_headers
        if records[headers] != _NO_HEADERS:
            with_headers += 1
        parts[index, GROUP], parts[index, GROUP + 1] = group, group_end
        parts[index, BODY], parts[index, BODY + 1] = body, body_end
        parts[index, DEVICE], parts[index, DEVICE + 1] = device, device_end
        parts[index, HEADERS], parts[index, HEADERS + 1] = headers, end
        parts[index, DEVICE_SEQUENCE] = sequence
        start = end
    return len(ends), with_headers


@kernel
def gather(records: Bytes, starts: Integers, stops: Integers, gathered: Bytes, offsets: NDArray[np.int32]) -> None:
    """Puts pieces together, as Arrow keeps texts: the bytes one behind the other, and where each begins."""
    position = np.int64(0)
    offsets[0] = 0
    for index in range(len(starts)):
        position = put_bytes(gathered, position, records[starts[index] : stops[index]])
        offsets[index + 1] = position


@kernel
def _whole_number(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """(value, where it ends) of an unsigned whole number; the end is -1 when there is none."""
    if position >= end:
        return 0, -1
    tag = data[position]
    if tag < 0x80:
        return np.int64(tag), position + 1
    if not 0xCC <= tag <= 0xCF:
        return 0, -1
    width = 1 << np.int64(tag - 0xCC)
    if position + 1 + width > end:
        return 0, -1
    return np.int64(big_endian(data, position + 1, width)), position + 1 + width
