"""The outbox kernel: writes the notifications of a batch into one delivery frame for each outbox that wants some.

Input: a batch's bytes with the subscriptions that each notification satisfies; and, for every local subscription, its
id, its outbox and the number its client gave it. The original bytes are copied, never decoded. The caller passes
whole batches and gets frames back in `out`, as many notifications as fit; it takes the frames and comes back for
the rest, so the memory of a step is bounded however many subscriptions match.

A subscription that ended while the notification was under way has another id at its place, and is passed over.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tidegate.frames import HEADER_BYTES, Kind

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]

FRAME_HEADER: Final = HEADER_BYTES
FRAME_DELIVER: Final = int(Kind.DELIVER)
ID_BYTES: Final = 5
# array of three, array header of the ids, sequence as uint64
ITEM_BYTES: Final = 1 + 5 + 9
LOCAL_MASK: Final = 0xFFFFFFFF

kernel = njit(cache=True, nogil=True)
inlined = njit(cache=True, nogil=True, inline="always")


@inlined
def put_big_endian(out: Bytes, position: int, value: int, width: int) -> int:
    for k in range(width):
        out[position + k] = np.uint8((value >> (8 * (width - 1 - k))) & 0xFF)
    return position + width


@inlined
def put_little_endian(out: Bytes, position: int, value: int, width: int) -> int:
    for k in range(width):
        out[position + k] = np.uint8((value >> (8 * k)) & 0xFF)
    return position + width


@kernel
def plan(
    starts: Integers,
    stops: Integers,
    offsets: Integers,
    ids: Integers,
    begin: int,
    id_of: Integers,
    outbox_of: Integers,
    counts: Integers,
    sizes: Integers,
    last_seen: Integers,
    touched: Integers,
    frame_bytes: int,
    room: int,
) -> tuple[int, int]:
    """How many bytes each outbox needs: (first notification that does not fit any more, outboxes touched).

    Always takes at least one notification; `counts` and `sizes` are zero for every untouched outbox, before and after
    the caller's turn."""
    outboxes = np.int64(0)
    total = np.int64(0)
    for i in range(begin, starts.shape[0]):
        wanted = stops[i] - starts[i] + ITEM_BYTES + frame_bytes + ID_BYTES
        if i > begin and total + wanted * (offsets[i + 1] - offsets[i]) > room:
            return i, outboxes
        for j in range(offsets[i], offsets[i + 1]):
            local = ids[j] & LOCAL_MASK
            if local >= id_of.shape[0] or id_of[local] != ids[j]:
                continue
            outbox = outbox_of[local]
            if counts[outbox] == 0:
                touched[outboxes] = outbox
                outboxes += 1
                last_seen[outbox] = -1
                sizes[outbox] = frame_bytes
                total += frame_bytes
            if last_seen[outbox] != i:
                last_seen[outbox] = i
                counts[outbox] += 1
                sizes[outbox] += stops[i] - starts[i] + ITEM_BYTES
                total += stops[i] - starts[i] + ITEM_BYTES
            sizes[outbox] += ID_BYTES
            total += ID_BYTES
    return starts.shape[0], outboxes


@kernel
def write(
    data: Bytes,
    starts: Integers,
    stops: Integers,
    offsets: Integers,
    ids: Integers,
    begin: int,
    end: int,
    first_sequence: int,
    publisher: Bytes,
    id_of: Integers,
    outbox_of: Integers,
    client_id_of: Integers,
    counts: Integers,
    sizes: Integers,
    cursors: Integers,
    heads: Integers,
    touched: Integers,
    outboxes: int,
    out: Bytes,
    frames: Integers,
) -> None:
    """Writes the planned frames into `out`; row k of `frames` becomes (outbox, start, stop, notifications)."""
    position = np.int64(0)
    for k in range(outboxes):
        outbox = touched[k]
        frames[k, 0] = outbox
        frames[k, 1] = position
        frames[k, 3] = counts[outbox]
        cursor = position + FRAME_HEADER
        out[cursor] = 0x92
        cursor += 1
        for j in range(publisher.shape[0]):
            out[cursor + j] = publisher[j]
        cursor += publisher.shape[0]
        out[cursor] = 0xDD
        cursors[outbox] = put_big_endian(out, cursor + 1, counts[outbox], 4)
        heads[outbox] = -1
        position += sizes[outbox]
        counts[outbox] = 0
        sizes[outbox] = 0
    links = np.empty(max_matches(offsets, begin, end), np.int64)
    for i in range(begin, end):
        write_notification(
            data, starts[i], stops[i], ids[offsets[i] : offsets[i + 1]], first_sequence + i,
            id_of, outbox_of, client_id_of, cursors, heads, links, out,
        )  # fmt: skip
    for k in range(outboxes):
        close_frame(out, frames, k, cursors[frames[k, 0]])


@kernel
def max_matches(offsets: Integers, begin: int, end: int) -> int:
    most = np.int64(1)
    for i in range(begin, end):
        most = max(most, offsets[i + 1] - offsets[i])
    return most


@inlined
def write_notification(
    data: Bytes,
    start: int,
    stop: int,
    ids: Integers,
    sequence: int,
    id_of: Integers,
    outbox_of: Integers,
    client_id_of: Integers,
    cursors: Integers,
    heads: Integers,
    links: Integers,
    out: Bytes,
) -> None:
    """One notification into the frame of each outbox among its matches.

    The matches of one outbox are chained through `links`, from `heads[outbox]`; the head of a chain writes the item.
    -1 ends a chain, and `heads` is -1 again for all when this returns."""
    for j in range(ids.shape[0] - 1, -1, -1):
        local = ids[j] & LOCAL_MASK
        if local < id_of.shape[0] and id_of[local] == ids[j]:
            outbox = outbox_of[local]
            links[j] = heads[outbox]
            heads[outbox] = j
    for j in range(ids.shape[0]):
        local = ids[j] & LOCAL_MASK
        if local >= id_of.shape[0] or id_of[local] != ids[j] or heads[outbox_of[local]] != j:
            continue
        outbox = outbox_of[local]
        cursor = cursors[outbox]
        out[cursor] = 0x93
        cursor = write_ids(ids, j, links, client_id_of, out, cursor + 1)
        out[cursor] = 0xCF
        cursor = put_big_endian(out, cursor + 1, sequence, 8)
        for k in range(stop - start):
            out[cursor + k] = data[start + k]
        cursors[outbox] = cursor + stop - start
        heads[outbox] = -1


@inlined
def write_ids(ids: Integers, head: int, links: Integers, client_id_of: Integers, out: Bytes, cursor: int) -> int:
    """A single subscription as a number, several as an array of numbers."""
    if links[head] == -1:
        out[cursor] = 0xCE
        return put_big_endian(out, cursor + 1, client_id_of[ids[head] & LOCAL_MASK], 4)
    out[cursor] = 0xDD
    count_at = cursor + 1
    cursor += 5
    count = np.int64(0)
    link = head
    while link != -1:
        out[cursor] = 0xCE
        cursor = put_big_endian(out, cursor + 1, client_id_of[ids[link] & LOCAL_MASK], 4)
        link = links[link]
        count += 1
    put_big_endian(out, count_at, count, 4)
    return cursor


@inlined
def close_frame(out: Bytes, frames: Integers, k: int, cursor: int) -> None:
    start = frames[k, 1]
    frames[k, 2] = cursor
    put_little_endian(out, start, cursor - start - FRAME_HEADER, 4)
    out[start + 4] = FRAME_DELIVER
    put_little_endian(out, start + 5, 0, 3)
    put_little_endian(out, start + 8, 0, 8)
