"""Messages of a logical queue, as clients, controllers and stores pass them on.

A producer gives a `NewMessage`; the enqueue controller adds the time and it becomes a `Record`, which is what a store
keeps (sealed with a checksum); a consumer gets a `Leased`: the record as it was stored, and the receipt by which to
delete, extend or release it. Bodies stay bytes of MessagePack all the way: only the two ends look into them.

Everything here is plain msgspec: the client uses this module too. docs/protocols.md describes the frames around it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

# The body of one message. Larger things belong into an object store, with their address in a message.
MESSAGE_BYTES_MAX: Final = 256 * 1024
BATCH_MESSAGES_MAX: Final = 10_000
# Numbers of batches stay exact in Lua, where Redis compares them, and in JSON.
BATCH_NUMBER_MAX: Final = 2**53
TEXT_CHARACTERS_MAX: Final = 256
HEADERS_MAX: Final = 32
HEADER_CHARACTERS_MAX: Final = 1024
# The bodies of one reply: what a consumer on a thin line can take while its leases last.
REPLY_BYTES_MAX: Final = 4 * 1024 * 1024
# The records of a range read: large enough that a request costs little, small enough to stay in a processor's cache.
PAGE_BYTES_MAX: Final = 1024 * 1024
WAIT_S_MAX: Final = 3600.0
VISIBILITY_S_MAX: Final = 12 * 3600.0


class NewMessage(msgspec.Struct, array_like=True, gc=False):
    """What is enqueued. `group`: messages of one group keep their order. `device` and `sequence`, from 1, together
    name the message, so that one that is sent again is kept once."""

    body: msgspec.Raw
    group: str = ""
    device: str = ""
    sequence: int = 0
    headers: dict[str, str] = {}


class Record(msgspec.Struct, array_like=True, gc=False):
    """What a store keeps of a message. The group stands first, where a store finds it without looking further."""

    group: str
    enqueued_at: float
    body: msgspec.Raw
    device: str = ""
    sequence: int = 0
    headers: dict[str, str] = {}


class Leased(msgspec.Struct, array_like=True, gc=False):
    """What a consumer gets: a record, and whose it is for now. `delivery` counts from 1; `queue` and `sequence` say
    where it lies: the physical queue, and its number there."""

    receipt: str
    delivery: int
    queue: int
    sequence: int
    record: msgspec.Raw


class Kept(msgspec.Struct, array_like=True, gc=False):
    """What a range read gets: a record at its place, leased by nobody."""

    sequence: int
    record: msgspec.Raw


class Page(msgspec.Struct):
    """What a range read gets for machines: the records one behind the other, each as it is stored (its checksum in
    four bytes, then the Record); where each ends, in 4 bytes, and its sequence, in 8 bytes, both little-endian."""

    sequences: bytes
    ends: bytes
    records: memoryview


class Enqueue(msgspec.Struct, omit_defaults=True):
    """With `producer` and `number`, from 1, it is a numbered batch: nothing of it is kept when the queue has had that
    number, or a higher one, of that producer."""

    queue: str
    messages: list[NewMessage]
    producer: str = ""
    number: int = 0


class Enqueued(msgspec.Struct):
    """`accepted` counts the messages that the queue answers for, `duplicates` those among them that it had already."""

    accepted: int
    duplicates: int
    durability: str


class Dequeue(msgspec.Struct, omit_defaults=True):
    """At most `max` messages; the request is held for up to `wait_s` until `min` are there, or fewer that have waited
    for the queue's `linger_s`. They are hidden from others for `visibility_s`."""

    queue: str
    max: int = 100
    min: int = 1
    wait_s: float = 20.0
    visibility_s: float = 30.0


class Settle(msgspec.Struct, omit_defaults=True):
    """What becomes of leased messages: `delete`, `extend` (by `visibility_s` from now), `release` (to be delivered
    again after `delay_s`), or `return` (as release, but as if it had not been delivered)."""

    queue: str
    action: str
    receipts: list[str]
    visibility_s: float = 30.0
    delay_s: float = 0.0


class Settled(msgspec.Struct):
    """How many it was done for; the others' leases had ended, or never were."""

    done: int
    stale: int


class Level(msgspec.Struct, frozen=True):
    """How full a physical queue is. `waiting` can be leased now; `oldest_at` is when the oldest message came, or None;
    sequences from `first` to below `next` are, or were, in it."""

    messages: int
    bytes: int
    waiting: int
    leased: int
    oldest_at: float | None
    first: int
    next: int


class Levels(msgspec.Struct, frozen=True):
    """The physical queues of the logical queue with this `id`, which one that is made later under its name has not."""

    id: str
    levels: list[Level]


class QueueCall(msgspec.Struct, omit_defaults=True):
    """Everything about queues that is not in the hot path: `action` with its arguments."""

    action: str
    name: str = ""
    arguments: dict[str, Any] = {}
