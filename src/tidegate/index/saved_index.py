"""A saved index: the arrays of a subscription index in one file, which other processes map into memory to match.

    magic, length and checksum of the head | head, in MessagePack | the arrays, each at a multiple of 64 bytes

The head records where each array lies, and a digest of all of them.

The file is mapped copy-on-write. Processes share its pages, but the counts that matching updates to estimate
selectivity stay private to each process. So the kernels work on the same arrays as in the index that was saved, and
nothing that they write reaches the file. A saved index cannot be changed and has no `add`: save another file instead.

What may go wrong: the file does not exist, is truncated, has another type or other arrays, was changed after it was
saved, or was saved by a version whose kernels use another layout. The kernels trust what they read, so loading checks
all of this and raises D819. The digest detects damage; it does not prove who wrote the file, so keep the directory
writable for Spark's user only. A file must not be shortened while a process has it mapped.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import sys
import uuid
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.errors import BadInput
from tidegate.index import tables as t
from tidegate.index.reader import Matches, Reader
from tidegate.index.readers_and_writer import ReadersAndWriter
from tidegate.index.subscription_index import SubscriptionIndex
from tidegate.kernels.cache import kernel_version

MAGIC: Final = b"TGINDEX2"
START: Final = struct.Struct("<8sII")  # magic, bytes of the head, its checksum
ALIGNMENT_BYTES: Final = 64
DIGEST_BYTES: Final = 16
FILTERS_AT_ONCE: Final = 1 << 16  # that one step moves to the new plan

_TABLES: Final = ("vocabulary", "filters", "tree")
_HASH_TABLES: Final = ("vocabulary.slots", "filters.slots", "filters.subscription_slots", "tree.routes")


class Placed(msgspec.Struct, array_like=True):
    """The place of an array in the file. The offset is counted from the aligned end of the head."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Head(msgspec.Struct):
    kernels: str
    byte_order: str
    arrays: dict[str, Placed]
    arrays_bytes: int
    digest: bytes


def save_index(index: SubscriptionIndex, path: Path) -> int:
    """Makes a plan for the filters that the index has now, and writes the index to a file. Returns its size in bytes.

    The file appears under its name only when it is complete."""
    _finish_moving(index)
    index.plan()
    _finish_moving(index)
    arrays = {f"{table}.{name}": array for table in _TABLES for name, array in getattr(index, table)._asdict().items()}
    placed, end = {}, 0
    for name, array in arrays.items():
        placed[name] = Placed(array.dtype.str, array.shape, end)
        end = _aligned(end + array.nbytes)
    # The digest covers the padding between the arrays too, since loading computes it over the file as a whole.
    digest = blake2b(digest_size=DIGEST_BYTES)
    at = 0
    for name, array in arrays.items():
        digest.update(bytes(placed[name].offset - at))
        digest.update(array.data)
        at = placed[name].offset + array.nbytes
    digest.update(bytes(end - at))
    head = msgspec.msgpack.encode(Head(kernel_version(), sys.byteorder, placed, end, digest.digest()))
    base = _aligned(START.size + len(head))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each writer uses its own temporary file: a task that Spark retries may write the same index at the same time.
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(START.pack(MAGIC, len(head), crc32(head)) + head)
            for name, array in arrays.items():
                file.seek(base + placed[name].offset)
                file.write(array.data)
            file.truncate(base + end)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return base + end


def _finish_moving(index: SubscriptionIndex) -> None:
    while index.maintain(FILTERS_AT_ONCE):
        pass


class SavedIndex:
    """A read-only index from a file, for matching in one thread. Raises BadInput D819 if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        data = _map(path)
        head, base = _read_head(path, data)
        arrays = _arrays(path, data, head, base)
        self.vocabulary = t.Vocabulary(*(arrays[f"vocabulary.{name}"] for name in t.Vocabulary._fields))
        self.filters = t.Filters(*(arrays[f"filters.{name}"] for name in t.Filters._fields))
        self.tree = self.old_tree = t.Tree(*(arrays[f"tree.{name}"] for name in t.Tree._fields))
        self.lock = ReadersAndWriter()
        self._reader = Reader(self)

    def __len__(self) -> int:
        return int(self.filters.state[t.SUBSCRIPTIONS])

    def match(self, notifications: Iterable[Mapping[str, Any]]) -> list[list[int]]:
        """Returns the ids of the subscriptions that each notification satisfies. Convenient, but slow."""
        return self._reader.match(notifications)

    def match_maps(self, data: bytes, starts: NDArray[np.int64]) -> Matches:
        """Returns (offsets, ids): the map at `starts[i]` in `data` satisfies `ids[offsets[i]:offsets[i + 1]]`.

        `scan_kernel` must have accepted the maps."""
        return self._reader.match_maps(data, starts)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise _unusable(path, "is empty") from None
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from error


def _read_head(path: Path, data: mmap.mmap) -> tuple[Head, int]:
    """Checks the head and the digest. Returns the head, and where the arrays begin."""
    if len(data) < START.size or data[: len(MAGIC)] != MAGIC:
        raise _unusable(path, "is not a saved index")
    _magic, length, checksum = START.unpack_from(data)
    written = data[START.size : START.size + length]
    if len(written) != length or crc32(written) != checksum:
        raise _unusable(path, "is damaged")
    try:
        head = msgspec.msgpack.decode(written, type=Head)
    except msgspec.DecodeError as error:
        raise _unusable(path, "has a malformed header") from error
    if head.byte_order != sys.byteorder:
        raise _unusable(path, f"was saved on a {head.byte_order}-endian machine; this is {sys.byteorder}-endian")
    if head.kernels != kernel_version():
        raise _unusable(path, "was saved by another version of Tidegate")
    base = _aligned(START.size + length)
    if len(data) != base + head.arrays_bytes:
        raise _unusable(path, f"has {len(data)} bytes instead of {base + head.arrays_bytes}")
    with memoryview(data) as view, view[base:] as arrays:
        if blake2b(arrays, digest_size=DIGEST_BYTES).digest() != head.digest:
            raise _unusable(path, "is damaged: its arrays do not match their digest")
    return head, base


def _arrays(path: Path, data: mmap.mmap, head: Head, base: int) -> dict[str, Any]:
    """Returns the arrays. Checks that each has the type and shape that the kernels expect, and lies within the file."""
    vocabulary = t.make_vocabulary(0)
    tables: dict[str, t.Vocabulary | t.Filters | t.Tree] = {
        "vocabulary": vocabulary,
        "filters": t.make_filters(),
        "tree": t.make_tree(vocabulary, 0),
    }
    arrays = {}
    for table, fields in tables.items():
        for field, like in fields._asdict().items():
            name = f"{table}.{field}"
            placed = head.arrays.get(name)
            if placed is None or not _is_like(placed, like, head.arrays_bytes):
                raise _unusable(path, f"lacks a valid array {name}")
            count = math.prod(placed.shape)
            arrays[name] = np.frombuffer(data, like.dtype, count, base + placed.offset).reshape(placed.shape)
    if not _fit_together(arrays):
        raise _unusable(path, "has arrays whose sizes do not match")
    return arrays


def _is_like(placed: Placed, like: NDArray[Any], room_bytes: int) -> bool:
    if placed.dtype != like.dtype.str or len(placed.shape) != like.ndim or placed.shape[1:] != like.shape[1:]:
        return False
    size_bytes = math.prod(placed.shape) * like.itemsize
    is_inside = placed.offset >= 0 and placed.offset + size_bytes <= room_bytes
    return placed.shape[0] > 0 and is_inside and placed.offset % ALIGNMENT_BYTES == 0


def _fit_together(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Returns whether arrays that share row numbers are long enough for each other, the hash tables have a power of two
    of slots, and the states have their fixed size."""
    strings, attributes = len(arrays["vocabulary.strings"]), len(arrays["vocabulary.attributes"])
    return (
        all(len(arrays[f"{table}.state"]) == t.STATE_SIZE for table in _TABLES)
        and all(len(arrays[name]).bit_count() == 1 for name in _HASH_TABLES)
        and len(arrays["vocabulary.string_seen"]) >= strings
        and len(arrays["vocabulary.attribute_seen"]) >= attributes
        and len(arrays["filters.ids"]) >= len(arrays["filters.subscriptions"])
        and len(arrays["tree.pattern_bits"]) == t.PATTERN_WORDS
        and all(len(arrays[f"tree.{name}"]) >= attributes for name in ("roots", "domains", "histogram"))
        and len(arrays["tree.token_nodes"]) >= strings
        and len(arrays["tree.node_keys"]) >= len(arrays["tree.nodes"])
    )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _unusable(path: Path, fault: str) -> BadInput:
    return BadInput(
        "D819",
        f"the index file {str(path)!r} {fault}",
        "build the index again, in a directory that every Spark machine can read",
    )
