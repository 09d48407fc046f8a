"""The outbox kernel: writes the notifications of a batch into one delivery frame for each outbox that wants some.

Input: a batch's bytes with the subscriptions that each notification satisfies; and, for every local subscription, its
id, its outbox and the number its client gave it. The original bytes are copied, never decoded. Each step writes frames
for as many notifications as fit into `out`. The caller takes the frames and calls again for the rest, so the memory of
a step is bounded however many subscriptions match.

If a subscription ended while the notification was in flight, its place in the table holds another id. The kernel skips
such a match.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tidegate.frames import HEADER_BYTES, Kind
from tidegate.kernels.bytes_kernel import Bytes, Integers, put_big_endian, put_bytes, put_little_endian
from tidegate.kernels.cache import inlined, kernel
from tidegate.kernels.msgpack_kernel import ARRAY_32, FIXARRAY, UINT_32, UINT_64
from tidegate.layers.subscription_table import CLIENT_ID, ID, OUTBOX

FRAME_HEADER: Final = HEADER_BYTES
FRAME_DELIVER: Final = int(Kind.DELIVER)
ID_BYTES: Final = 5
# array of three, array header of the ids, sequence as uint64
ITEM_BYTES: Final = 1 + 5 + 9
# array of two, array header of the items; the publisher is between them
BODY_BYTES: Final = 1 + 5
LOCAL_MASK: Final = 0xFFFFFFFF

# The columns of an outbox during a step. Between two steps COUNT is 0 and HEAD is -1 for every outbox.
COUNT: Final = 0
SIZE: Final = 1
LAST_SEEN: Final = 2
CURSOR: Final = 3
HEAD: Final = 4
OUTBOX_COLUMNS: Final = 5

# The columns of the frames that a step has written.
FRAME_OUTBOX: Final = 0
FRAME_START: Final = 1
FRAME_STOP: Final = 2
FRAME_COUNT: Final = 3
FRAME_COLUMNS: Final = 4


@inlined
def is_live(subscriptions: Integers, subscription: int) -> bool:
    local = subscription & LOCAL_MASK
    return bool(local < subscriptions.shape[0] and subscriptions[local, ID] == subscription)


@kernel
def write_frames(
    data: Bytes,
    starts: Integers,
    stops: Integers,
    offsets: Integers,
    ids: Integers,
    begin: int,
    first_sequence: int,
    publisher: Bytes,
    subscriptions: Integers,
    outboxes: Integers,
    links: Integers,
    out: Bytes,
    frames: Integers,
) -> tuple[int, int]:
    """Writes frames of the notifications from `begin` on. Returns (first notification that did not fit, frames
    written). The first number is `begin` if that notification has more matches than `out` can hold."""
    frame_bytes = FRAME_HEADER + BODY_BYTES + publisher.shape[0]
    end, count = plan(starts, stops, offsets, ids, begin, subscriptions, outboxes, frame_bytes, out.shape[0], frames)
    open_frames(publisher, outboxes, out, frames, count)
    for i in range(begin, end):
        write_notification(
            data[starts[i] : stops[i]], ids[offsets[i] : offsets[i + 1]], first_sequence + i,
            subscriptions, outboxes, links, out,
        )  # fmt: skip
    close_frames(outboxes, out, frames, count)
    return end, count


@kernel
def plan(
    starts: Integers,
    stops: Integers,
    offsets: Integers,
    ids: Integers,
    begin: int,
    subscriptions: Integers,
    outboxes: Integers,
    frame_bytes: int,
    room: int,
    frames: Integers,
) -> tuple[int, int]:
    """Computes how many bytes each outbox needs. Returns (first notification that does not fit, outboxes that get a
    frame). The test for room assumes a new frame for every match, so a step never overruns `out`."""
    count = np.int64(0)
    total = np.int64(0)
    for i in range(begin, starts.shape[0]):
        item_bytes = stops[i] - starts[i] + ITEM_BYTES
        if total + (item_bytes + frame_bytes + ID_BYTES) * (offsets[i + 1] - offsets[i]) > room:
            return i, count
        for j in range(offsets[i], offsets[i + 1]):
            if not is_live(subscriptions, ids[j]):
                continue
            outbox = outboxes[subscriptions[ids[j] & LOCAL_MASK, OUTBOX]]
            needed = np.int64(ID_BYTES)
            if outbox[COUNT] == 0:
                frames[count, FRAME_OUTBOX] = subscriptions[ids[j] & LOCAL_MASK, OUTBOX]
                count += 1
                outbox[LAST_SEEN] = -1
                outbox[SIZE] = 0
                needed += frame_bytes
            if outbox[LAST_SEEN] != i:
                outbox[LAST_SEEN] = i
                outbox[COUNT] += 1
                needed += item_bytes
            outbox[SIZE] += needed
            total += needed
    return starts.shape[0], count


@inlined
def open_frames(publisher: Bytes, outboxes: Integers, out: Bytes, frames: Integers, count: int) -> None:
    position = np.int64(0)
    for k in range(count):
        outbox = outboxes[frames[k, FRAME_OUTBOX]]
        frames[k, FRAME_START] = position
        frames[k, FRAME_COUNT] = outbox[COUNT]
        cursor = position + FRAME_HEADER
        out[cursor] = FIXARRAY + 2
        cursor = put_bytes(out, cursor + 1, publisher)
        out[cursor] = ARRAY_32
        outbox[CURSOR] = put_big_endian(out, cursor + 1, outbox[COUNT], 4)
        position += outbox[SIZE]
        outbox[COUNT] = 0


@inlined
def close_frames(outboxes: Integers, out: Bytes, frames: Integers, count: int) -> None:
    for k in range(count):
        start = frames[k, FRAME_START]
        stop = outboxes[frames[k, FRAME_OUTBOX], CURSOR]
        frames[k, FRAME_STOP] = stop
        put_little_endian(out, start, stop - start - FRAME_HEADER, 4)
        out[start + 4] = FRAME_DELIVER
        put_little_endian(out, start + 5, 0, 3)
        put_little_endian(out, start + 8, 0, 8)


@inlined
def write_notification(
    notification: Bytes,
    ids: Integers,
    sequence: int,
    subscriptions: Integers,
    outboxes: Integers,
    links: Integers,
    out: Bytes,
) -> None:
    """Writes one notification into the frame of each outbox among its matches.

    The matches of one outbox are chained through `links`, from its HEAD; the head of a chain writes the item. -1 ends a
    chain. HEAD is -1 again for every outbox when this returns."""
    # Backwards, so that a chain begins with the first match of its outbox and keeps the order of the ids.
    for j in range(ids.shape[0] - 1, -1, -1):
        if is_live(subscriptions, ids[j]):
            outbox = outboxes[subscriptions[ids[j] & LOCAL_MASK, OUTBOX]]
            links[j] = outbox[HEAD]
            outbox[HEAD] = j
    for j in range(ids.shape[0]):
        if not is_live(subscriptions, ids[j]):
            continue
        outbox = outboxes[subscriptions[ids[j] & LOCAL_MASK, OUTBOX]]
        if outbox[HEAD] != j:
            continue
        cursor = outbox[CURSOR]
        out[cursor] = FIXARRAY + 3
        cursor = write_ids(ids, j, links, subscriptions, out, cursor + 1)
        out[cursor] = UINT_64
        cursor = put_big_endian(out, cursor + 1, sequence, 8)
        outbox[CURSOR] = put_bytes(out, cursor, notification)
        outbox[HEAD] = -1


@inlined
def write_ids(ids: Integers, head: int, links: Integers, subscriptions: Integers, out: Bytes, cursor: int) -> int:
    """Writes a single subscription as a number, several as an array of numbers. Returns the position after them."""
    if links[head] == -1:
        out[cursor] = UINT_32
        put_big_endian(out, cursor + 1, subscriptions[ids[head] & LOCAL_MASK, CLIENT_ID], 4)
        return cursor + ID_BYTES
    out[cursor] = ARRAY_32
    count_at = cursor + 1
    cursor += 5
    count = np.int64(0)
    link = head
    while link != -1:
        out[cursor] = UINT_32
        cursor = put_big_endian(out, cursor + 1, subscriptions[ids[link] & LOCAL_MASK, CLIENT_ID], 4)
        link = links[link]
        count += 1
    put_big_endian(out, count_at, count, 4)
    return cursor
