"""Frames of the native protocol and their bytes: the messages between a client and a Connection Point over TCP.

A frame is a 16-byte little-endian header (body length, kind, flags, zero, sequence) and a body in MessagePack, so
any language can write it. Two kinds carry notifications as plain maps, whose bytes travel unchanged from the
publisher's socket to the subscriber's:

    PUBLISH  [map, map, …]                                       header's sequence: that of the first notification
    DELIVER  [publisher, [[subscriptions, sequence, map], …]]    header's sequence: 0

Queue requests carry `tidegate.messages`, whose bodies travel unchanged too. Each request has a number and gets one
answer. All other frames are small control frames. docs/protocols.md describes the exchange of frames. This module must
not import numpy, because the client uses it too.
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
# The largest frame that a client accepts. A broker splits its deliveries into far smaller ones.
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
# From this size on, a frame gets its own buffer and is read straight into it.
LONG_FRAME_BYTES: Final = 64 * 1024


class Kind(IntEnum):
    """The kind of a frame. Clients send kinds below 64, brokers those from 64 on."""

    HELLO = 1
    PUBLISH = 2
    SUBSCRIBE = 3
    UNSUBSCRIBE = 4
    PING = 5
    STATUS = 6
    GOODBYE = 7
    ENQUEUE = 8  # in this and the next four, the sequence is the request's number, which the client chooses
    DEQUEUE = 9
    SETTLE = 10
    QUEUE_CALL = 11
    CANCEL = 12  # header only: cancels the dequeue of this number
    REBIND = 13  # replaces the filter of a subscription, atomically
    WELCOME = 64
    ACKNOWLEDGE = 65  # header only: every notification up to `sequence` was delivered or refused
    REFUSE = 66
    DELIVER = 67
    GAP = 68
    SUBSCRIBED = 69
    UNSUBSCRIBED = 70
    PONG = 71
    STATUS_REPLY = 72
    ERROR = 73
    CLOSING = 74  # header only: the broker is shutting down, and has delivered what it accepted
    REPLY = 75  # the answer to the request of this number
    FAILED = 76  # an ErrorBody for the request of this number; the connection stays open
    REBOUND = 77  # header only: from now on notifications are matched by the new filter; sequence: the id


class Hello(msgspec.Struct, omit_defaults=True):
    """The first frame of a client. A publisher's name is unique to its incarnation: sequences start at 1 for each name.
    A connection that only subscribes leaves it empty. `key` is a secret; only clients that present it can use the
    name."""

    version: int = PROTOCOL_VERSION
    publisher: str = ""
    token: str = ""
    key: str = ""


class Welcome(msgspec.Struct, omit_defaults=True):
    """The broker's answer to Hello: the last acknowledged sequence of this publisher, those up to it that full queues
    refused, and how many bytes may be unacknowledged."""

    version: int
    broker: str
    acknowledged: int
    frame_bytes_max: int
    window_bytes: int
    refused: list[Refusal] = []


class Subscribe(msgspec.Struct, omit_defaults=True):
    """Begins a subscription. The client chooses `id`, which is unique within its connection."""

    id: int
    filter: str
    policy: str = "drop-oldest"


class Unsubscribe(msgspec.Struct):
    id: int


class Rebind(msgspec.Struct):
    id: int
    filter: str


class Refusal(msgspec.Struct, omit_defaults=True):
    """One notification that is invalid, or that a full queue did not store. The others of its frame were accepted. With
    `last`, the refusal covers all notifications from `sequence` to `last`."""

    sequence: int
    code: str
    message: str
    remedy: str
    last: int | None = None


class Gap(msgspec.Struct):
    """The number of deliveries dropped because the subscriber was slow, by subscription."""

    dropped: dict[int, int]


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """An error. With `subscription` it ends that subscription. Without, an ERROR frame closes the connection, and a
    FAILED frame answers one request."""

    code: str
    message: str
    remedy: str
    column: int | None = None
    subscription: int | None = None
    retry_after_s: float | None = None


class Delivered(msgspec.Struct, array_like=True, gc=False):
    """One notification as a connection receives it, for one of its subscriptions or for several."""

    subscriptions: int | tuple[int, ...]
    sequence: int
    notification: dict[str, Any]


_encoder = msgspec.msgpack.Encoder()
_deliver_decoder = msgspec.msgpack.Decoder(tuple[str, list[Delivered]])


def encode_frame(kind: Kind, body: Any = None, sequence: int = 0) -> bytes:
    """Returns one frame. `body` is any value that MessagePack can carry, or None for a frame without a body."""
    encoded = b"" if body is None else _encoder.encode(body)
    return HEADER.pack(len(encoded), kind, 0, 0, sequence) + encoded


def publish_frame(first_sequence: int, body: bytes) -> bytes:
    """Returns a PUBLISH frame. `body` is an array of notifications, already encoded."""
    return HEADER.pack(len(body), Kind.PUBLISH, 0, 0, first_sequence) + body


def join_maps(maps: list[bytes]) -> bytes:
    """Joins encoded notifications into one encoded array."""
    return b"".join((_array_header(len(maps)), *maps))


def decode_body(body: bytes | memoryview, shape: type[Any]) -> Any:
    """Returns the body of a control frame. Raises ProtocolError if it does not have the given shape."""
    try:
        return msgspec.msgpack.decode(body, type=shape)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(
            "P303",
            f"the body of a {shape.__name__} frame is malformed: {error}",
            "see docs/protocols.md for its fields",
        ) from error


def decode_deliver(body: bytes | memoryview) -> tuple[str, list[Delivered]]:
    """Returns the publisher of a DELIVER frame and the deliveries."""
    return _deliver_decoder.decode(body)


class PartialFrame:
    """The incomplete frame at the end of what a connection has read. Nothing is parsed before the frame is complete, so
    a frame that arrives byte by byte costs no more than one that arrives at once.

    A reader reads short frames into its own buffer and adds the bytes here. It reads the rest of a long frame directly
    into `room` and reports the number of bytes, so that a megabyte is not copied at every read."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._wanted = HEADER_BYTES
        self._room = memoryview(b"")

    def add(self, read: memoryview) -> bytes:
        """Returns the kept bytes and those just read, as an immutable copy; empty while no frame is complete."""
        if len(self._kept) + len(read) >= self._wanted:
            return b"".join((self._kept, read))
        self._kept += read
        return b""

    def room(self) -> memoryview:
        """Returns the buffer for the rest of a long frame; empty if no long frame has begun."""
        if not self._room and self._wanted >= LONG_FRAME_BYTES:
            begun = len(self._kept)
            self._kept += bytes(self._wanted - begun)
            self._room = memoryview(self._kept)[begun:]
        return self._room

    def fill(self, size_bytes: int) -> memoryview:
        """Notes that `size_bytes` were read into `room`. Returns the frame once it is complete, else an empty view.

        The view is read-only, as all other input of the compiled kernels is: they would be compiled a second time for
        writable arrays."""
        self._room = self._room[size_bytes:]
        return memoryview(b"") if self._room else memoryview(self._kept).toreadonly()

    def take(self, buffer: memoryview, size_bytes: int) -> memoryview:
        """Notes that `size_bytes` were read, into `room` if there is one, else into the reader's `buffer`. Returns the
        bytes that can be split into frames."""
        return self.fill(size_bytes) if self._room else memoryview(self.add(buffer[:size_bytes]))

    def keep(self, rest: memoryview) -> None:
        """Keeps the bytes after the last complete frame. Their header, once complete, gives the size to wait for."""
        self._kept = bytearray(rest)
        self._wanted = HEADER_BYTES
        self._room = memoryview(b"")
        if len(rest) >= HEADER_BYTES:
            self._wanted += HEADER.unpack_from(rest)[0]

    def clear(self) -> None:
        self.keep(memoryview(b""))


def split_frames(data: bytes | bytearray | memoryview, length_max: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (kind, sequence, start of the body, its end) for every complete frame at the front of `data`."""
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
        f"the frame has {length} bytes by its header; at most {length_max} are allowed",
        "send smaller batches, or check that the peer uses the native protocol and its port",
    )


def _array_header(count: int) -> bytes:
    # MessagePack has three headers by length: fixarray, array 16 and array 32.
    if count < 16:
        return bytes((0x90 | count,))
    return struct.pack(">BH", 0xDC, count) if count < 65_536 else struct.pack(">BI", 0xDD, count)
