"""Records as a store keeps them: sealed with a checksum, so that a record damaged on disk is not delivered as a
message.

A sealed record is a CRC-32 (little-endian) followed by the `Record` in MessagePack. The group is its first field.
Nearly all messages have no group, which a single byte shows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final
from zlib import crc32

import msgspec

from tidegate.messages import Record

_CHECKSUM: Final = struct.Struct("<I")
CHECKSUM_BYTES: Final = _CHECKSUM.size
# MessagePack: an array of six elements, the first an empty string. So starts a record without a group.
_NO_GROUP: Final = b"\x96\xa0"
# The same, followed by the type byte of a 64-bit float: the time at which the message was enqueued.
_NO_GROUP_AT: Final = _NO_GROUP + b"\xcb"
_AT: Final = struct.Struct(">d")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def seal(record: Record) -> bytes:
    body = _encode(record)
    return _CHECKSUM.pack(crc32(body)) + body


def unseal(sealed: bytes) -> bytes | None:
    """Returns the record in MessagePack; None if it is corrupt."""
    return sealed[CHECKSUM_BYTES:] if is_sound(sealed) else None


def is_sound(sealed: bytes | memoryview) -> bool:
    return len(sealed) > CHECKSUM_BYTES and _CHECKSUM.unpack_from(sealed)[0] == crc32(sealed[CHECKSUM_BYTES:])


def corrupt_among(sizes: Iterable[int], records: bytes) -> list[int]:
    """Returns the indexes of the corrupt ones among concatenated sealed records. Checks many at once, as `is_sound`
    does one."""
    view, start, corrupt = memoryview(records), 0, []
    stored_at = _CHECKSUM.unpack_from
    for index, size in enumerate(sizes):
        body, end = start + CHECKSUM_BYTES, start + size
        if body >= end or stored_at(view, start)[0] != crc32(view[body:end]):
            corrupt.append(index)
        start = end
    return corrupt


def has_group(sealed: bytes) -> bool:
    """Returns false if a record certainly has no group; otherwise `group_of` must decide."""
    return not sealed.startswith(_NO_GROUP, CHECKSUM_BYTES)


def group_of(sealed: bytes) -> str:
    """Returns the group of a sealed record; an empty group for a corrupt record, which is detected when it is read."""
    if not has_group(sealed):
        return ""
    try:
        return _decode(sealed[CHECKSUM_BYTES:]).group
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def enqueued_at(sealed: bytes | memoryview) -> float | None:
    """Returns when a record was enqueued, by its broker's clock; None for a corrupt record, which is detected when it
    is read."""
    at = CHECKSUM_BYTES + len(_NO_GROUP_AT)
    if sealed[CHECKSUM_BYTES:at] == _NO_GROUP_AT and len(sealed) >= at + _AT.size:
        came_at: float = _AT.unpack_from(sealed, at)[0]
        return came_at
    try:
        return _decode(sealed[CHECKSUM_BYTES:]).enqueued_at
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode_record(body: bytes | msgspec.Raw) -> Record:
    return _decode(body)


def body_of(sealed: bytes) -> msgspec.Raw:
    """Returns the body of a sealed record that is sound."""
    return _decode(sealed[CHECKSUM_BYTES:]).body
