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

from tidegate.frames import HEADER_BYTES, Kind
from tidegate.layers.scan_kernel import Bytes, Integers, inlined, kernel
from tidegate.layers.subscription_table import CLIENT_ID, ID, OUTBOX

FRAME_HEADER: Final = HEADER_BYTES
FRAME_DELIVER: Final = int(Kind.DELIVER)
ID_BYTES: Final = 5
# array of three, array header of the ids, sequence as uint64
ITEM_BYTES: Final = 1 + 5 + 9
# array of two, array header of the items; between them stands the publisher
BODY_BYTES: Final = 1 + 5
LOCAL_MASK: Final = 0xFFFFFFFF

# What is known of an outbox during a step; COUNT is 0 and HEAD is -1 for all of them between two steps.
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
def put_big_endian(out: Bytes, position: int, value: int, width: int) -> int:
    for k in range(width):
        out[np.uint64(position + k)] = np.uint8((value >> (8 * (width - 1 - k))) & 0xFF)
    return position + width


@inlined
def put_little_endian(out: Bytes, position: int, value: int, width: int) -> int:
    for k in range(width):
        out[np.uint64(position + k)] = np.uint8((value >> (8 * k)) & 0xFF)
    return position + width


@inlined
def put_bytes(out: Bytes, position: int, source: Bytes) -> int:
    """Cut first and copied by a plain index: so the compiler copies many bytes at a time."""
    length: int = source.shape[0]
    target = out[position : position + length]
    for k in range(length):
        target[k] = source[k]
    return position + length


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
    """Writes frames of the notifications from `begin` on: (first notification that did not fit, frames written).

    The first is `begin` itself when not even that one fits, with all who want it."""
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
    """How many bytes each outbox needs: (first notification that does not fit any more, outboxes that get a frame)."""
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
        out[cursor] = 0x92
        cursor = put_bytes(out, cursor + 1, publisher)
        out[cursor] = 0xDD
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
    """One notification into the frame of each outbox among its matches.

    The matches of one outbox are chained through `links`, from its HEAD; the head of a chain writes the item. -1 ends a
    chain, and HEAD is -1 again for all when this returns."""
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
        out[cursor] = 0x93
        cursor = write_ids(ids, j, links, subscriptions, out, cursor + 1)
        out[cursor] = 0xCF
        cursor = put_big_endian(out, cursor + 1, sequence, 8)
        outbox[CURSOR] = put_bytes(out, cursor, notification)
        outbox[HEAD] = -1


@inlined
def write_ids(ids: Integers, head: int, links: Integers, subscriptions: Integers, out: Bytes, cursor: int) -> int:
    """A single subscription as a number, several as an array of numbers."""
    if links[head] == -1:
        out[cursor] = 0xCE
        put_big_endian(out, cursor + 1, subscriptions[ids[head] & LOCAL_MASK, CLIENT_ID], 4)
        return cursor + ID_BYTES
    out[cursor] = 0xDD
    count_at = cursor + 1
    cursor += 5
    count = np.int64(0)
    link = head
    while link != -1:
        out[cursor] = 0xCE
        cursor = put_big_endian(out, cursor + 1, subscriptions[ids[link] & LOCAL_MASK, CLIENT_ID], 4)
        link = links[link]
        count += 1
    put_big_endian(out, count_at, count, 4)
    return cursor
