"""A saved index: the arrays of a subscription index in one file, which others map into memory to match with.

    magic, length and checksum of the head | head, in MessagePack | the arrays, each at a multiple of 64 bytes

The file is mapped copy-on-write: processes share its pages, and what matching counts for the estimate of selectivity
stays with the process that counts. So the kernels see the same arrays as in the index that was saved, and nothing that
they do reaches the file. It cannot be changed: there is no `add` here; what has other subscriptions is another file.

What may go wrong: the file is not there, is cut off, is no such file, or was saved by a version whose kernels lay out
their arrays otherwise. The kernels trust what they read, so all of this is found out before, and is D819.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.errors import BadInput
from tidegate.layers.index import tables as t
from tidegate.layers.index.reader import Matches, Reader
from tidegate.layers.index.readers_and_writer import ReadersAndWriter
from tidegate.layers.index.subscription_index import SubscriptionIndex
from tidegate.layers.kernel_cache import kernel_version

MAGIC: Final = b"TGINDEX1"
START: Final = struct.Struct("<8sII")  # magic, bytes of the head, its checksum
ALIGNMENT_BYTES: Final = 64
FILTERS_AT_ONCE: Final = 1 << 16  # that move to the last plan

_TABLES: Final = ("vocabulary", "filters", "tree")


class Placed(msgspec.Struct, array_like=True):
    """Where an array lies, counted from the end of the head."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Head(msgspec.Struct):
    kernels: str
    byte_order: str
    arrays: dict[str, Placed]
    arrays_bytes: int


def save_index(index: SubscriptionIndex, path: Path) -> int:
    """Writes the index, planned for the filters that it has now; the file is there as a whole or not at all.
    Returns its size in bytes."""
    _settle(index)
    index.plan()
    _settle(index)
    arrays = {f"{table}.{name}": array for table in _TABLES for name, array in getattr(index, table)._asdict().items()}
    placed, end = {}, 0
    for name, array in arrays.items():
        placed[name] = Placed(array.dtype.str, array.shape, end)
        end = _aligned(end + array.nbytes)
    head = msgspec.msgpack.encode(Head(kernel_version(), sys.byteorder, placed, end))
    base = _aligned(START.size + len(head))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A second writer of the same file, such as a task that is tried again, has a temporary one of its own.
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


def _settle(index: SubscriptionIndex) -> None:
    while index.maintain(FILTERS_AT_ONCE):
        pass


class SavedIndex:
    """An index that is there to be matched with, by one thread. BadInput D819 when the file cannot be used."""

    def __init__(self, path: Path) -> None:
        data = _map(path)
        head, base = _read_head(path, data)
        arrays = {name: _array(data, base, placed) for name, placed in head.arrays.items()}
        self.vocabulary = t.Vocabulary(*(arrays[f"vocabulary.{name}"] for name in t.Vocabulary._fields))
        self.filters = t.Filters(*(arrays[f"filters.{name}"] for name in t.Filters._fields))
        self.tree = self.old_tree = t.Tree(*(arrays[f"tree.{name}"] for name in t.Tree._fields))
        self.lock = ReadersAndWriter()
        self._reader = Reader(self)

    def __len__(self) -> int:
        return int(self.filters.state[t.SUBSCRIPTIONS])

    def match(self, notifications: Iterable[Mapping[str, Any]]) -> list[list[int]]:
        """For each notification the ids of the subscriptions that it satisfies: for convenience, not for speed."""
        return self._reader.match(notifications)

    def match_maps(self, data: bytes, starts: NDArray[np.int64]) -> Matches:
        """The map at `starts[i]` of `data`, which the door has checked, satisfies `ids[offsets[i]:offsets[i + 1]]`."""
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
    """The head, and where the arrays begin."""
    if len(data) < START.size or data[: len(MAGIC)] != MAGIC:
        raise _unusable(path, "is no index")
    _magic, length, checksum = START.unpack_from(data)
    written = data[START.size : START.size + length]
    if len(written) != length or crc32(written) != checksum:
        raise _unusable(path, "is damaged")
    head = msgspec.msgpack.decode(written, type=Head)
    if head.byte_order != sys.byteorder:
        raise _unusable(path, f"was saved on a machine that is {head.byte_order}-endian, not {sys.byteorder}-endian")
    if head.kernels != kernel_version():
        raise _unusable(path, "was saved by another version of Tidegate")
    base = _aligned(START.size + length)
    if len(data) != base + head.arrays_bytes:
        raise _unusable(path, f"has {len(data)} bytes of {base + head.arrays_bytes}")
    return head, base


def _array(data: mmap.mmap, base: int, placed: Placed) -> Any:
    count = int(np.prod(placed.shape))
    return np.frombuffer(data, np.dtype(placed.dtype), count, base + placed.offset).reshape(placed.shape)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _unusable(path: Path, fault: str) -> BadInput:
    return BadInput(
        "D819", f"the index {str(path)!r} {fault}", "build it anew, in a directory that every machine of Spark can see"
    )
