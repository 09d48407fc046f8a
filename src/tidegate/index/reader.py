"""A reader of an index: matches notifications in one thread, concurrently with other readers and the single writer.

A reader holds the lock for the length of one batch. While a second tree takes over the records of the first, the reader
matches in both and joins the results: every record is in exactly one of the trees, so no id is found twice.

What may go wrong: the kernels trust their input. Callers pass only notifications that `scan_kernel` or
`notification.check` has accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.index import match_kernel
from tidegate.index import tables as t
from tidegate.kernels.intrinsic_kernel import silent_arithmetic
from tidegate.notification import check

if TYPE_CHECKING:
    from tidegate.index.readers_and_writer import ReadersAndWriter
    from tidegate.layers.batch import Batch

OUT_IDS: Final = 1 << 14

Matches = tuple[NDArray[np.int64], NDArray[np.int64]]


class SearchableIndex(Protocol):
    """The tables that a reader reads. `old_tree` differs from `tree` only while records move from one to the other."""

    vocabulary: t.Vocabulary
    filters: t.Filters
    tree: t.Tree
    old_tree: t.Tree
    lock: ReadersAndWriter


class Reader:
    """Matches for one thread. A result is exact for the subscriptions as they are between two changes by the writer."""

    def __init__(self, index: SearchableIndex) -> None:
        self._index = index
        self._context = match_kernel.make_context(index.vocabulary, index.tree)
        self._out = np.empty(OUT_IDS, np.int64)

    @property
    def counters(self) -> t.I64:
        return self._context.counters

    def match(self, notifications: Iterable[Mapping[str, Any]]) -> list[list[int]]:
        """Returns the ids of the subscriptions that each notification satisfies. Convenient, but slow."""
        maps = [_encode_checked(notification) for notification in notifications]
        starts = np.cumsum([0, *map(len, maps)], dtype=np.int64)
        offsets, ids = self.match_maps(b"".join(maps), starts[:-1])
        return [ids[offsets[i] : offsets[i + 1]].tolist() for i in range(len(maps))]

    def match_batch(self, batch: Batch) -> Matches:
        """Returns (offsets, ids): notification i of the batch satisfies `ids[offsets[i]:offsets[i + 1]]`."""
        return self.match_maps(batch.data, batch.starts)

    def match_frames(self, data: bytes) -> Matches:
        """Does the same for whole PUBLISH frames, one after another, that `scan_kernel` has accepted."""
        view = np.frombuffer(data, np.uint8)
        starts = np.empty(match_kernel.count_in_frames(view), np.int64)
        match_kernel.find_in_frames(view, starts)
        return self.match_maps(data, starts)

    def match_maps(self, data: bytes | memoryview, starts: NDArray[np.int64]) -> Matches:
        """Does the same for the MessagePack maps at `starts` in `data`, which `scan_kernel` has accepted."""
        view = np.frombuffer(data, np.uint8)
        with self._index.lock.reading, silent_arithmetic():
            tree, old = self._index.tree, self._index.old_tree
            found = self._match_in(tree, view, starts)
            if old is tree:
                return found
            return _join(found, self._match_in(old, view, starts))

    def _match_in(self, tree: t.Tree, view: NDArray[np.uint8], starts: NDArray[np.int64]) -> Matches:
        vocabulary, filters = self._index.vocabulary, self._index.filters
        self._fit_context(tree)
        offsets = np.zeros(len(starts) + 1, np.int64)
        done, needed = 0, 0
        while done < len(starts):
            done, needed = match_kernel.match_maps(
                vocabulary, filters, tree, self._context, view, starts, done, offsets, self._out
            )
            if done < len(starts):
                self._widen(needed, int(offsets[done]))
        return offsets, self._out[:needed].copy()

    def _fit_context(self, tree: t.Tree) -> None:
        """Makes sure that the context has a row for every attribute and room for every node."""
        vocabulary, context = self._index.vocabulary, self._context
        if len(context.nodes) <= len(tree.nodes) or len(context.values) < len(vocabulary.attributes):
            self._context = match_kernel.make_context(vocabulary, tree)
            self._context.counters[:] = context.counters

    def _widen(self, needed: int, used: int) -> None:
        """Makes more room for the ids of one call, and keeps those found so far."""
        out = np.empty(max(needed, 2 * len(self._out)), np.int64)
        out[:used] = self._out[:used]
        self._out = out


def _join(found: Matches, more: Matches) -> Matches:
    offsets, ids = np.zeros_like(found[0]), np.empty(len(found[1]) + len(more[1]), np.int64)
    match_kernel.join_matches(*found, *more, offsets, ids)
    return offsets, ids


def _encode_checked(notification: Mapping[str, Any]) -> bytes:
    """Checks a notification before it is encoded, since the kernels trust what they read."""
    check(notification)
    return msgspec.msgpack.encode(notification)
