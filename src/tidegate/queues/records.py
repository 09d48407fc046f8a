"""Records as a store keeps them: sealed with a checksum, so that what a disk has spoilt is not taken for a message.

A sealed record is a CRC-32 (little-endian) and the `Record` in MessagePack. Its group stands first in it; nearly all
messages have none, which one byte tells.
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
# An array of six, then an empty string: a record without a group.
_NO_GROUP: Final = b"\x96\xa0"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def seal(record: Record) -> bytes:
    body = _encode(record)
    return _CHECKSUM.pack(crc32(body)) + body


def unseal(sealed: bytes) -> bytes | None:
    """The record in MessagePack; None for one that is corrupt."""
    return sealed[CHECKSUM_BYTES:] if is_sound(sealed) else None


def is_sound(sealed: bytes | memoryview) -> bool:
    return len(sealed) > CHECKSUM_BYTES and _CHECKSUM.unpack_from(sealed)[0] == crc32(sealed[CHECKSUM_BYTES:])


def corrupt_among(sizes: Iterable[int], records: bytes) -> list[int]:
    """Which of the sealed records that lie one behind the other are corrupt. `is_sound` for many, at once."""
    view, start, corrupt = memoryview(records), 0, []
    stored_at = _CHECKSUM.unpack_from
    for index, size in enumerate(sizes):
        body, end = start + CHECKSUM_BYTES, start + size
        if body >= end or stored_at(view, start)[0] != crc32(view[body:end]):
            corrupt.append(index)
        start = end
    return corrupt


def has_group(sealed: bytes) -> bool:
    """Perhaps: `group_of` knows."""
    return not sealed.startswith(_NO_GROUP, CHECKSUM_BYTES)


def group_of(sealed: bytes) -> str:
    """The group of a sealed record; none for a corrupt one, whose reader will notice."""
    if not has_group(sealed):
        return ""
    try:
        return _decode(sealed[CHECKSUM_BYTES:]).group
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def decode_record(body: bytes | msgspec.Raw) -> Record:
    return _decode(body)
