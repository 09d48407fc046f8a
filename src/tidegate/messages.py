"""Messages of a logical queue, as clients, controllers and stores exchange them.

A producer sends a `NewMessage`. The enqueue controller adds the time and makes it a `Record`, which a store keeps with
a checksum. A consumer receives a `Leased`: the record as it was stored, and a receipt to delete, extend or release it.
Bodies stay MessagePack bytes all the way; only the producer and the consumer decode them.

This module needs only msgspec, because the client uses it too. docs/protocols.md describes the frames around it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

# The largest body of one message. Put larger objects into an object store, and their address into a message.
MESSAGE_BYTES_MAX: Final = 256 * 1024
BATCH_MESSAGES_MAX: Final = 10_000
# Batch numbers must stay exact in Lua, where Redis compares them, and in JSON.
BATCH_NUMBER_MAX: Final = 2**53
TEXT_CHARACTERS_MAX: Final = 256
HEADERS_MAX: Final = 32
HEADER_CHARACTERS_MAX: Final = 1024
# The largest reply to a dequeue: a consumer on a slow line must receive it before its leases expire.
REPLY_BYTES_MAX: Final = 4 * 1024 * 1024
# The records of one range read: large enough to amortise the request, small enough to stay in a processor's cache.
PAGE_BYTES_MAX: Final = 1024 * 1024
WAIT_S_MAX: Final = 3600.0
VISIBILITY_S_MAX: Final = 12 * 3600.0


class NewMessage(msgspec.Struct, array_like=True, gc=False):
    """A message to enqueue. Messages of one `group` keep their order. `device` and `sequence`, from 1, together
    identify the message, so that the queue keeps it once even if it is sent again."""

    body: msgspec.Raw
    group: str = ""
    device: str = ""
    sequence: int = 0
    headers: dict[str, str] = {}


class Record(msgspec.Struct, array_like=True, gc=False):
    """A message as a store keeps it. The group comes first, so that a store reads it without decoding the rest."""

    group: str
    enqueued_at: float
    body: msgspec.Raw
    device: str = ""
    sequence: int = 0
    headers: dict[str, str] = {}


class Leased(msgspec.Struct, array_like=True, gc=False):
    """A record leased to a consumer. `delivery` counts deliveries from 1; `queue` and `sequence` are its place: the
    physical queue, and its number there."""

    receipt: str
    delivery: int
    queue: int
    sequence: int
    record: msgspec.Raw


class Kept(msgspec.Struct, array_like=True, gc=False):
    """One record of a range read, with its sequence. Reading does not lease it."""

    sequence: int
    record: msgspec.Raw


class Page(msgspec.Struct):
    """The result of a range read as bytes, for bulk readers. `records` are concatenated as they are stored: each has
    its checksum in 4 bytes, then the Record. `ends` has the end of each in 4 bytes, `sequences` its sequence in 8
    bytes, both little-endian."""

    sequences: bytes
    ends: bytes
    records: memoryview


class Enqueue(msgspec.Struct, omit_defaults=True):
    """Messages to enqueue. With `producer` and `number`, from 1, they are a numbered batch. The queue ignores a batch
    whose number is not above the last one of that producer."""

    queue: str
    messages: list[NewMessage]
    producer: str = ""
    number: int = 0


class Enqueued(msgspec.Struct):
    """The answer to Enqueue. `accepted` counts the messages that the queue takes responsibility for; `duplicates`
    counts those among them that it already had."""

    accepted: int
    duplicates: int
    durability: str


class Dequeue(msgspec.Struct, omit_defaults=True):
    """Asks for at most `max` messages. The broker holds the request for up to `wait_s` until `min` messages are
    available, or fewer that have waited for the queue's `linger_s`. They are hidden from other consumers for
    `visibility_s`."""

    queue: str
    max: int = 100
    min: int = 1
    wait_s: float = 20.0
    visibility_s: float = 30.0


class Settle(msgspec.Struct, omit_defaults=True):
    """Ends or extends leases. The actions are `delete`, `extend` (until `visibility_s` from now), `release` (deliver
    again after `delay_s`) and `return` (release, without counting the delivery)."""

    queue: str
    action: str
    receipts: list[str]
    visibility_s: float = 30.0
    delay_s: float = 0.0


class Settled(msgspec.Struct):
    """The answer to Settle. `done` counts the messages that were settled, `stale` the receipts without a current
    lease."""

    done: int
    stale: int


class Level(msgspec.Struct, frozen=True):
    """How full a physical queue is. `waiting` messages can be leased now. `oldest_at` is when the oldest message
    arrived, or None. Sequences from `first` to below `next` are, or were, in it. `publishers` counts the publishers
    whose numbers it remembers."""

    messages: int
    bytes: int
    waiting: int
    leased: int
    oldest_at: float | None
    first: int
    next: int
    publishers: int = 0


class Levels(msgspec.Struct, frozen=True):
    """The levels of all physical queues of a logical queue. A queue that is dropped and created again gets another
    `id`."""

    id: str
    levels: list[Level]


class QueueCall(msgspec.Struct, omit_defaults=True):
    """A queue request outside the hot path: an `action` with its arguments."""

    action: str
    name: str = ""
    arguments: dict[str, Any] = {}
