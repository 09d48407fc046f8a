"""The subscription index: which subscriptions does a notification satisfy, answered on its bytes by kernels.

A filter is a *program* (program_kernel): a few words a constraint, shared by all who want the same. Programs are filed
in a *tree* (tree_kernel) under their most selective constraints, so that a notification meets only those whose path
it satisfies; what it meets is ruled out by one-word guards or verified by running the program (match_kernel). Strings
and attribute names are interned and counted (storage_kernel). All of it lies in flat arrays (tables), which Python
only grows: a kernel stops before it could run out of room, says so, and is called again.

Invariant: every program says exactly what `Filter.matches` says, and is filed in exactly the nodes to which its
constraints lead in their order; removal walks the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numba
import numpy as np
from numpy.typing import NDArray

from tidegate.errors import Overloaded
from tidegate.filters import CONSTRAINTS_MAX, Filter
from tidegate.layers.index import match_kernel, storage_kernel, subscription_kernel, tree_kernel
from tidegate.layers.index import tables as t
from tidegate.layers.index.packing import pack
from tidegate.notification import check

if TYPE_CHECKING:
    from tidegate.layers.batch import Batch

ATTRIBUTES_MAX: Final = 1 << 16
OUT_IDS: Final = 1 << 14
EVENTS_REMEMBERED: Final = 1 << 24

Matches = tuple[NDArray[np.int64], NDArray[np.int64]]


def _wrapping() -> contextlib.AbstractContextManager[None]:
    """Without the compiler the kernels run on numpy's integers, which warn where hashes wrap around, as they should."""
    return np.errstate(over="ignore") if numba.config.DISABLE_JIT else contextlib.nullcontext()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class IndexStatistics:
    """`visited`, `scanned` and `verified` count nodes and entries over all notifications matched so far."""

    subscriptions: int
    filters: int
    attributes: int
    strings: int
    nodes: int
    entries: int
    bytes: int
    visited: int
    scanned: int
    verified: int


class SubscriptionIndex:
    """`match` finds exactly the subscriptions whose `Filter.matches` says yes. One thread at a time.

    `add` raises Overloaded, and changes nothing, when filters name more attributes than the index can number."""

    def __init__(self) -> None:
        self._tables = t.make_tables()
        self._scratch = subscription_kernel.make_scratch()
        self._context = match_kernel.make_context(self._tables)
        self._out = np.empty(OUT_IDS, np.int64)

    def __len__(self) -> int:
        return int(self._tables.state[t.SUBSCRIPTIONS])

    def add(self, subscription: int, subscription_filter: Filter) -> None:
        """Adds a subscription, or gives a known one another filter."""
        self.add_packed(np.array([subscription], np.int64), pack(subscription_filter))

    def add_packed(self, ids: NDArray[np.int64], filters: bytes) -> None:
        """Adds many: their packed filters stand one after another."""
        data = np.frombuffer(filters, np.uint8)
        done, position = 0, 0
        with _wrapping():
            while done < len(ids):
                done, position = subscription_kernel.add_subscriptions(
                    self._tables, self._scratch, ids, done, data, position
                )
                if done < len(ids) or self._tables.state[t.WANTED_NODES]:
                    self._grow()

    def remove(self, subscription: int) -> None:
        """KeyError when there is no such subscription."""
        if not self.remove_many(np.array([subscription], np.int64)):
            raise KeyError(subscription)

    def remove_many(self, ids: NDArray[np.int64]) -> int:
        """Removes those that are there; how many were."""
        with _wrapping():
            return int(subscription_kernel.remove_subscriptions(self._tables, self._scratch, ids))

    def match(self, notifications: Iterable[Mapping[str, Any]]) -> list[list[int]]:
        """For each notification the ids of the subscriptions that it satisfies: for convenience, not for speed."""
        maps = [_encode_checked(notification) for notification in notifications]
        starts = np.cumsum([0, *map(len, maps)], dtype=np.int64)
        offsets, ids = self.match_maps(b"".join(maps), starts[:-1])
        return [ids[offsets[i] : offsets[i + 1]].tolist() for i in range(len(maps))]

    def match_batch(self, batch: Batch) -> Matches:
        """Notification i of the batch satisfies `ids[offsets[i]:offsets[i + 1]]`."""
        return self.match_maps(batch.data, batch.starts)

    def match_maps(self, data: bytes, starts: NDArray[np.int64]) -> Matches:
        """The same for MessagePack maps at `starts` in `data`, which the door has checked."""
        if self._tables.state[t.EVENTS] > EVENTS_REMEMBERED:
            self._age()
        view = np.frombuffer(data, np.uint8)
        offsets = np.zeros(len(starts) + 1, np.int64)
        done, needed = 0, 0
        with _wrapping():
            while done < len(starts):
                done, needed = match_kernel.match_maps(
                    self._tables, self._context, view, starts, done, offsets, self._out
                )
                if done < len(starts):
                    self._widen(needed, int(offsets[done]))
        return offsets, self._out[:needed].copy()

    def statistics(self) -> IndexStatistics:
        state, counters = self._tables.state, self._context.counters
        return IndexStatistics(
            subscriptions=int(state[t.SUBSCRIPTIONS]),
            filters=int(state[t.FILTERS]),
            attributes=int(state[t.ATTRIBUTES]),
            strings=int(state[t.STRINGS]),
            nodes=int(state[t.NODES]),
            entries=int(state[t.ENTRIES]),
            bytes=sum(array.nbytes for array in self._tables) - self._tables.code_numbers.nbytes,
            visited=int(counters[match_kernel.VISITED]),
            scanned=int(counters[match_kernel.SCANNED]),
            verified=int(counters[match_kernel.VERIFIED]),
        )

    def _age(self) -> None:
        """What was seen long ago counts half: the counts stay small, and follow notifications that change."""
        self._tables.state[t.EVENTS] //= 2
        self._tables.attribute_seen[:] //= 2
        self._tables.string_seen[:] //= 2

    def _widen(self, needed: int, used: int) -> None:
        """More room for the ids of one call."""
        out = np.empty(max(needed, 2 * len(self._out)), np.int64)
        out[:used] = self._out[:used]
        self._out = out

    def _grow(self) -> None:
        """Makes room wherever a kernel found too little of it."""
        state = self._tables.state
        if state[t.ATTRIBUTE_TOP] + CONSTRAINTS_MAX > ATTRIBUTES_MAX:
            raise Overloaded(
                "L607", f"filters name {state[t.ATTRIBUTES]} attributes", f"use fewer than {ATTRIBUTES_MAX}"
            )
        self._tables = self._tables._replace(**self._larger_arrays())
        self._refill_tables()
        state[t.WANTED_NODES] = state[t.WANTED_ENTRIES] = 0
        counters = self._context.counters
        self._context = match_kernel.make_context(self._tables)
        self._context.counters[:] = counters

    def _larger_arrays(self) -> dict[str, Any]:
        state, kernel = self._tables.state, subscription_kernel
        wanted = (
            (t.STRING_TOP, kernel.STRINGS_MARGIN, ("strings", "string_hashes", "attribute_of", "string_seen")),
            (t.BYTES_TOP, kernel.BYTES_MARGIN, ("bytes",)),
            (t.CODE_TOP, kernel.CODE_MARGIN, ("code",)),
            (
                t.ATTRIBUTE_TOP,
                CONSTRAINTS_MAX,
                ("attributes", "buckets", "domains", "names", "attribute_seen"),
            ),
            (t.FILTER_TOP, 2, ("filters", "filter_hashes")),
            (t.SUBSCRIPTION_TOP, 2, ("subscriptions", "subscription_ids")),
            (t.NODE_TOP, state[t.WANTED_NODES], ("nodes", "node_keys")),
            (t.DIMENSION_TOP, state[t.WANTED_NODES], ("dimensions",)),
            (t.ENTRY_TOP, state[t.WANTED_ENTRIES], ("guards", "entries")),
        )
        changed: dict[str, Any] = {}
        for top, margin, names in wanted:
            used = int(state[top])
            for name in names:
                if used + margin > len(getattr(self._tables, name)):
                    changed[name] = t.larger(getattr(self._tables, name), used, used + 2 * int(margin))
        if "code" in changed:
            changed["code_numbers"] = changed["code"].view(np.float64)
        return changed

    def _refill_tables(self) -> None:
        """Hash tables are never more than half full."""
        tables, state = self._tables, self._tables.state
        strings = _twice(tables.string_slots, int(state[t.STRINGS]) + subscription_kernel.STRINGS_MARGIN)
        if strings is not None:
            storage_kernel.refill(strings, tables.string_hashes, tables.string_slots)
            tables = tables._replace(string_slots=strings)
        filters = _twice(tables.filter_slots, int(state[t.FILTERS]) + 1)
        if filters is not None:
            storage_kernel.refill(filters, tables.filter_hashes, tables.filter_slots)
            tables = tables._replace(filter_slots=filters)
        subscriptions = _twice(tables.subscription_slots, int(state[t.SUBSCRIPTIONS]) + 1)
        if subscriptions is not None:
            old = tables.subscription_slots
            tables = tables._replace(subscription_slots=subscriptions)
            subscription_kernel.refill_subscriptions(tables, old)
        keys = _twice(tables.route_keys, int(state[t.ROUTES] + state[t.WANTED_NODES]))
        if keys is not None:
            nodes = np.zeros(len(keys), np.int32)
            tree_kernel.refill_routes(keys, nodes, tables.route_keys, tables.route_nodes)
            tables = tables._replace(route_keys=keys, route_nodes=nodes)
        self._tables = tables


def _encode_checked(notification: Mapping[str, Any]) -> bytes:
    """The kernels trust what they read: the door's rules hold here too."""
    check(notification)
    return msgspec.msgpack.encode(notification)


def _twice(table: Any, items: int) -> Any:
    """An empty hash table for so many items, twice as large or more; None when the present one is large enough."""
    size = len(table)
    while 2 * items > size:
        size *= 2
    return None if size == len(table) else np.zeros(size, table.dtype)
