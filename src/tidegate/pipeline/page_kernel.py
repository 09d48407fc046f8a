"""The kernel of range reads: finds the parts of each record of a page without making Python objects of messages.

A page (`tidegate.messages.Page`) holds consecutive records: a checksum that the broker has verified, then an array of
group, time, body, device, sequence and headers. Numba checks no bounds, so every read of a byte is preceded by a
comparison with the end of its record.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidegate.kernels.bytes_kernel import Bytes, Integers, big_endian_word, put_bytes
from tidegate.kernels.cache import kernel
from tidegate.kernels.msgpack_kernel import (
    FIXARRAY,
    FIXMAP,
    FLOAT_64,
    is_unsigned,
    read_integer,
    skip_value,
    text_at,
)

CHECKSUM_BYTES: Final = 4
# Columns of `parts`: start and end of each text, of the body and of the headers, then the sequence of the device.
GROUP: Final = 0
BODY: Final = 2
DEVICE: Final = 4
HEADERS: Final = 6
DEVICE_SEQUENCE: Final = 8
PARTS: Final = 9
_ARRAY_OF_SIX: Final = FIXARRAY + 6
_NO_HEADERS: Final = FIXMAP


@kernel
def find_parts(
    records: Bytes, ends: NDArray[np.uint32], parts: NDArray[np.int64], times: NDArray[np.uint64]
) -> tuple[int, int]:
    """Returns (records understood, how many of them have headers). `times` receives the bits of doubles.

    Stops at the first record in an unusual form, such as one with a text that is not UTF-8. The caller must decode such
    a page record by record."""
    start = np.int64(0)
    with_headers = 0
    for index in range(len(ends)):
        end = np.int64(ends[index])
        position = start + CHECKSUM_BYTES
        if position >= end or records[position] != _ARRAY_OF_SIX:
            return index, with_headers
        group, group_end = text_at(records, position + 1, end)
        if group < 0 or group_end + 9 > end or records[group_end] != FLOAT_64:
            return index, with_headers
        times[index] = big_endian_word(records, group_end + 1)
        body = group_end + 9
        body_end = skip_value(records, body, end)
        if body_end < 0:
            return index, with_headers
        device, device_end = text_at(records, body_end, end)
        if device < 0:
            return index, with_headers
        headers = skip_value(records, device_end, end)
        if headers < 0 or headers >= end or not is_unsigned(records[device_end]):
            return index, with_headers
        sequence, _end = read_integer(records, device_end)
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
    """Joins pieces in the layout of Arrow's texts: the bytes one after another, and where each begins."""
    position = np.int64(0)
    offsets[0] = 0
    for index in range(len(starts)):
        position = put_bytes(gathered, position, records[starts[index] : stops[index]])
        offsets[index + 1] = position
