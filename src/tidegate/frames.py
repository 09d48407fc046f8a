"""Frames of the native protocol and their bytes: what a client and a Connection Point say to each other over TCP.

A frame is a 16-byte little-endian header (body length, kind, flags, zero, sequence) and a body in MessagePack, so
any language can write it. Two kinds carry notifications, as plain maps whose bytes travel unchanged from the
publisher's socket to the subscriber's:

    PUBLISH  [map, map, …]                                       header's sequence: that of the first notification
    DELIVER  [publisher, [[subscriptions, sequence, map], …]]    header's sequence: 0

Queue requests carry `tidegate.messages`, whose bodies travel unchanged too; each has a number, and gets one answer.
All others are small control frames. docs/protocols.md describes the conversation. Nothing here imports numpy: the
client uses this module too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final

import msgspec

from tidegate.errors import ProtocolError

PROTOCOL_VERSION: Final = 1
HEADER: Final = struct.Struct("<IBBHQ")
HEADER_BYTES: Final = HEADER.size
# What a client accepts in one frame; a broker splits deliveries long before.
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
# A frame that is worth memory of its own.
LONG_FRAME_BYTES: Final = 64 * 1024


class Kind(IntEnum):
    """What a frame is. Below 64 from the client, from 64 on from the broker."""

    HELLO = 1
    PUBLISH = 2
    SUBSCRIBE = 3
    UNSUBSCRIBE = 4
    PING = 5
    STATUS = 6
    GOODBYE = 7
    ENQUEUE = 8  # the sequence of this and the next four is the request's number, which the client chooses
    DEQUEUE = 9
    SETTLE = 10
    QUEUE_CALL = 11
    CANCEL = 12  # header only: the dequeue of this number is no longer wanted
    REBIND = 13  # a subscription gets another filter, in one step
    WELCOME = 64
    ACKNOWLEDGE = 65  # header only: every notification up to `sequence` is delivered or was refused
    REFUSE = 66
    DELIVER = 67
    GAP = 68
    SUBSCRIBED = 69
    UNSUBSCRIBED = 70
    PONG = 71
    STATUS_REPLY = 72
    ERROR = 73
    CLOSING = 74  # header only: the broker goes down tidily; what it accepted is delivered
    REPLY = 75  # to the request of this number
    FAILED = 76  # an ErrorBody for the request of this number; the connection stays
    REBOUND = 77  # header only: what is published from now on is matched by the other filter; sequence: the id


class Hello(msgspec.Struct, omit_defaults=True):
    """The first frame of a client. A publisher's name carries its incarnation: sequences start at 1 for each name.
    A connection that only subscribes names none."""

    version: int = PROTOCOL_VERSION
    publisher: str = ""
    token: str = ""


class Welcome(msgspec.Struct):
    """The broker's answer: how far this publisher is acknowledged, and how much it may have under way."""

    version: int
    broker: str
    acknowledged: int
    frame_bytes_max: int
    window_bytes: int


class Subscribe(msgspec.Struct, omit_defaults=True):
    """`id` is chosen by the client and is unique within its connection."""

    id: int
    filter: str
    policy: str = "drop-oldest"


class Unsubscribe(msgspec.Struct):
    id: int


class Rebind(msgspec.Struct):
    id: int
    filter: str


class Refusal(msgspec.Struct):
    """One notification that broke the rules; its neighbours in the frame were accepted."""

    sequence: int
    code: str
    message: str
    remedy: str


class Gap(msgspec.Struct):
    """Deliveries that were dropped because the subscriber was slow, by subscription."""

    dropped: dict[int, int]


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """An error; with `subscription` it ends that one. Without, an ERROR closes the connection, and a FAILED answers
    one request."""

    code: str
    message: str
    remedy: str
    column: int | None = None
    subscription: int | None = None
    retry_after_s: float | None = None


class Delivered(msgspec.Struct, array_like=True, gc=False):
    """One notification as it reaches a connection: for one of its subscriptions, or for several."""

    subscriptions: int | tuple[int, ...]
    sequence: int
    notification: dict[str, Any]


_encoder = msgspec.msgpack.Encoder()
_deliver_decoder = msgspec.msgpack.Decoder(tuple[str, list[Delivered]])


def encode_frame(kind: Kind, body: Any = None, sequence: int = 0) -> bytes:
    """One frame; `body` is any value that MessagePack can carry, or None for a frame that is a header only."""
    encoded = b"" if body is None else _encoder.encode(body)
    return HEADER.pack(len(encoded), kind, 0, 0, sequence) + encoded


def publish_frame(first_sequence: int, body: bytes) -> bytes:
    """A PUBLISH frame of an array of notifications that is encoded already."""
    return HEADER.pack(len(body), Kind.PUBLISH, 0, 0, first_sequence) + body


def join_maps(maps: list[bytes]) -> bytes:
    """An array of notifications that are encoded already."""
    return b"".join((_array_header(len(maps)), *maps))


def decode_body(body: bytes | memoryview, shape: type[Any]) -> Any:
    """The body of a control frame, or ProtocolError when it is not of that shape."""
    try:
        return msgspec.msgpack.decode(body, type=shape)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(
            "P303",
            f"the body of a {shape.__name__} frame is malformed: {error}",
            "see docs/protocols.md for its fields",
        ) from error


def decode_deliver(body: bytes | memoryview) -> tuple[str, list[Delivered]]:
    """The publisher of a DELIVER frame and its deliveries."""
    return _deliver_decoder.decode(body)


class PartialFrame:
    """The beginning of a connection's next frame. Nothing is looked at before the frame is complete, so one that comes
    byte by byte costs no more than another.

    A reader adds what it has read into a buffer of its own; or it reads the rest of a long frame straight to where it
    belongs, which is `room`, and says how much has come: so a megabyte is not copied again and again."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._wanted = HEADER_BYTES
        self._room = memoryview(b"")

    def add(self, read: memoryview) -> bytes:
        """What is kept and what was read now, as bytes that nobody writes to; empty while no frame is complete."""
        if len(self._kept) + len(read) >= self._wanted:
            return b"".join((self._kept, read))
        self._kept += read
        return b""

    def room(self) -> memoryview:
        """Where the rest of a long frame belongs; empty when none has begun."""
        if not self._room and self._wanted >= LONG_FRAME_BYTES:
            begun = len(self._kept)
            self._kept += bytes(self._wanted - begun)
            self._room = memoryview(self._kept)[begun:]
        return self._room

    def fill(self, size_bytes: int) -> memoryview:
        """So much has come into the room: the whole frame, or nothing yet. Nobody writes to it any more, and kernels
        must see that: for arrays that can be written to they would be compiled once more."""
        self._room = self._room[size_bytes:]
        return memoryview(b"") if self._room else memoryview(self._kept).toreadonly()

    def take(self, buffer: memoryview, size_bytes: int) -> memoryview:
        """So much was read, into the room if there is any, else into the reader's own buffer: what is complete."""
        return self.fill(size_bytes) if self._room else memoryview(self.add(buffer[:size_bytes]))

    def keep(self, rest: memoryview) -> None:
        """Keeps what follows the last complete frame; its header, once there, says how much is wanted."""
        self._kept = bytearray(rest)
        self._wanted = HEADER_BYTES
        self._room = memoryview(b"")
        if len(rest) >= HEADER_BYTES:
            self._wanted += HEADER.unpack_from(rest)[0]

    def clear(self) -> None:
        self.keep(memoryview(b""))


def split_frames(data: bytes | bytearray | memoryview, length_max: int) -> Iterator[tuple[int, int, int, int]]:
    """(kind, sequence, start of the body, its end) of every complete frame at the front of `data`."""
    position = 0
    while len(data) - position >= HEADER_BYTES:
        length, kind, _flags, _zero, sequence = HEADER.unpack_from(data, position)
        if length > length_max:
            raise frame_too_long(length, length_max)
        start = position + HEADER_BYTES
        if start + length > len(data):
            return
        yield kind, sequence, start, start + length
        position = start + length


def frame_too_long(length: int, length_max: int) -> ProtocolError:
    return ProtocolError(
        "P302",
        f"a frame of {length} bytes is announced, {length_max} are allowed",
        "send smaller batches; bytes of another protocol look like this too",
    )


def _array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    return struct.pack(">BH", 0xDC, count) if count < 65_536 else struct.pack(">BI", 0xDD, count)
