"""The subscription index: finds the subscriptions that a notification satisfies. Kernels do this on its raw bytes.

A filter is stored as a *record* (record_kernel): a program of a few words per constraint, shared by all subscriptions
with the same filter. Records are filed in a *tree* (tree_kernel) under their most selective constraints
(estimate_kernel), so a notification meets only records whose path it satisfies. Small guards rule out most of these;
the programs of the rest are run (match_kernel). Strings and attribute names are interned and counted
(vocabulary_kernel).

All data lies in flat arrays (tables), which Python only grows. A kernel stops before it could run out of room and
reports how far it came; Python grows the arrays and calls it again.

When the plan of the tree is outdated (planning), a second tree takes over its records, a few at a time. Meanwhile
notifications are matched in both trees. One thread writes; any number of threads read, each with its own `reader`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import Overloaded
from tidegate.filters import CONSTRAINTS_MAX, Explanation, Filter
from tidegate.index import hash_table_kernel, match_kernel, subscription_kernel
from tidegate.index import tables as t
from tidegate.index.estimate_kernel import carry_histograms
from tidegate.index.packing import check_packed, pack, unpack_record
from tidegate.index.planning import Plan, learn_domains
from tidegate.index.reader import Matches, Reader
from tidegate.index.readers_and_writer import ReadersAndWriter
from tidegate.kernels.intrinsic_kernel import silent_arithmetic

if TYPE_CHECKING:
    from tidegate.layers.batch import Batch

EVENTS_REMEMBERED: Final = 1 << 20  # sampled notifications; above, all counts are halved
ADDED_AT_ONCE: Final = 4096  # subscriptions; readers wait meanwhile
MOVED_AT_ONCE: Final = 256
MAINTAIN_EVERY: Final = 64  # changed subscriptions after which the plan is checked


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
    plans: int
    notifications: int
    visited: int
    scanned: int
    verified: int


class SubscriptionIndex:
    """`match` finds exactly the subscriptions whose `Filter.matches` returns true. Ids must not be negative.

    `add` raises Overloaded, and changes nothing, when filters name more attributes than the index can number."""

    def __init__(self, seed: int | None = None) -> None:
        self.vocabulary = t.make_vocabulary(secrets.randbits(62) if seed is None else seed)
        self.filters = t.make_filters()
        self.tree = self.old_tree = t.make_tree(self.vocabulary, generation=0)
        self.lock = ReadersAndWriter()
        self._scratch = subscription_kernel.make_scratch()
        self._readers: WeakSet[Reader] = WeakSet()
        self._reader = self.reader()
        self._plan = Plan()
        self._plans = 0
        self._changed = 0  # subscriptions changed since the writer last called `maintain`
        self._slot = 0  # records in earlier slots of `filters.slots` have moved to the new tree

    def __len__(self) -> int:
        return int(self.filters.state[t.SUBSCRIPTIONS])

    def add(self, subscription: int, subscription_filter: Filter) -> None:
        """Adds a subscription, or replaces the filter of an existing one."""
        self.add_packed(np.array([subscription], np.int64), pack(subscription_filter))

    def add_packed(self, ids: NDArray[np.int64], filters: bytes) -> None:
        """Adds many subscriptions, whose packed filters follow one another in `filters`.

        Raises ForeignFrame, and adds none, if a filter is malformed or there are not as many filters as ids. Raises
        Overloaded at the first subscription that does not fit; those before it have been added."""
        with silent_arithmetic():
            check_packed(filters, len(ids))
        data, ids = np.frombuffer(filters, np.uint8), np.ascontiguousarray(ids, np.int64)
        if len(ids) and ids.min() < 0:
            raise ValueError(f"the subscription id {ids.min()} is negative; use ids of 0 or more")
        position = 0
        for start in range(0, len(ids), ADDED_AT_ONCE):
            some = ids[start : start + ADDED_AT_ONCE]
            with self.lock.writing, silent_arithmetic():
                position = self._add(some, data, position)
            self._on_changes(len(some))

    def remove(self, subscription: int) -> None:
        """Removes a subscription. Raises KeyError if it does not exist."""
        if not self.remove_many(np.array([subscription], np.int64)):
            raise KeyError(subscription)

    def remove_many(self, ids: NDArray[np.int64]) -> int:
        """Removes those of the subscriptions that exist, and returns how many did."""
        with self.lock.writing, silent_arithmetic():
            removed = subscription_kernel.remove_subscriptions(
                self.vocabulary,
                self.filters,
                self.old_tree,
                self.tree,
                self._scratch,
                np.ascontiguousarray(ids, np.int64),
            )
        self._on_changes(len(ids))
        return int(removed)

    def reader(self) -> Reader:
        """Returns a new reader, for use by another thread."""
        reader = Reader(self)
        self._readers.add(reader)
        return reader

    def match(self, notifications: Iterable[Mapping[str, Any]]) -> list[list[int]]:
        """Returns the ids of the subscriptions that each notification satisfies. Convenient, but slow."""
        return self._reader.match(notifications)

    def match_batch(self, batch: Batch) -> Matches:
        """Returns (offsets, ids): notification i of the batch satisfies `ids[offsets[i]:offsets[i + 1]]`."""
        return self._reader.match_batch(batch)

    def match_frames(self, data: bytes) -> Matches:
        """Does the same for whole PUBLISH frames, one after another, that `scan_kernel` has accepted."""
        return self._reader.match_frames(data)

    def match_maps(self, data: bytes, starts: NDArray[np.int64]) -> Matches:
        """Does the same for the MessagePack maps at `starts` in `data`, which `scan_kernel` has accepted."""
        return self._reader.match_maps(data, starts)

    def filter_of(self, subscription: int) -> Filter:
        """Returns the filter of a subscription as the index stores it. Raises KeyError for an unknown subscription."""
        with self.lock.reading, silent_arithmetic():
            place = subscription_kernel.find_subscription(self.filters, subscription)
            if place < 0:
                raise KeyError(subscription)
            return unpack_record(self.vocabulary, self.filters, int(self.filters.subscriptions[place, t.RECORD]))

    def explain(self, notification: Mapping[str, Any], subscription: int) -> Explanation:
        """Explains why a notification satisfies a subscription or not. Raises KeyError for an unknown subscription."""
        return self.filter_of(subscription).explain(notification)

    def maintain(self, most: int = MOVED_AT_ONCE) -> bool:
        """Does one step of the work that keeps the index fast: makes a new plan if one is due, and moves up to `most`
        filters to the new tree. Returns whether work is left. The writer calls this whenever it has time."""
        state = self.vocabulary.state
        if state[t.EVENTS] > EVENTS_REMEMBERED:
            self._age()
        if self.old_tree is self.tree:
            if not (
                self._plan.is_outdated(int(self.filters.state[t.COUNTED]), int(state[t.EVENTS]), self.tree)
                or self._plan.has_become_expensive(*self._cost())
            ):
                return False
            self.plan()
        with self.lock.writing, silent_arithmetic():
            self._move(most)
        return self.old_tree is not self.tree

    def plan(self) -> None:
        """Makes a new plan and an empty tree for it. `maintain` then moves the filters to that tree."""
        if self.old_tree is not self.tree:
            return
        with self.lock.writing, silent_arithmetic():
            tree = t.make_tree(self.vocabulary, generation=1 - int(self.tree.state[t.GENERATION]))
            tree.domains[:], busiest = learn_domains(self.filters, len(tree.domains))
            tree = _with_cell_rows(tree, busiest[: t.CELL_ROWS_MAX])
            carry_histograms(self.tree, tree, int(self.vocabulary.state[t.ATTRIBUTE_TOP]))
            self.old_tree, self.tree, self._slot = self.tree, tree, 0
            self._plan = Plan(int(self.filters.state[t.COUNTED]), int(self.vocabulary.state[t.EVENTS]))
            self._plans += 1

    def statistics(self) -> IndexStatistics:
        filters, words, counters = self.filters.state, self.vocabulary.state, self._counters()
        trees = [self.tree] if self.old_tree is self.tree else [self.tree, self.old_tree]
        return IndexStatistics(
            subscriptions=int(filters[t.SUBSCRIPTIONS]),
            filters=int(filters[t.COUNTED]),
            attributes=int(words[t.ATTRIBUTES]),
            strings=int(words[t.COUNTED]),
            nodes=sum(int(tree.state[t.COUNTED]) for tree in trees),
            entries=sum(int(tree.state[t.ENTRIES]) for tree in trees),
            bytes=sum(array.nbytes for arrays in (self.vocabulary, self.filters, *trees) for array in arrays),
            plans=self._plans,
            notifications=int(counters[match_kernel.NOTIFICATIONS]),
            visited=int(counters[match_kernel.VISITED]),
            scanned=int(counters[match_kernel.SCANNED]),
            verified=int(counters[match_kernel.VERIFIED]),
        )

    def _counters(self) -> t.I64:
        counted: t.I64 = np.sum([reader.counters for reader in list(self._readers)], axis=0)
        return counted

    def _cost(self) -> tuple[int, int]:
        """Returns how many notifications were matched so far, and how many entries were scanned for them."""
        counters = self._counters()
        return int(counters[match_kernel.NOTIFICATIONS]), int(counters[match_kernel.SCANNED])

    def _on_changes(self, count: int) -> None:
        """Lets the writer pay for maintenance: for each changed subscription, two filters move to the new tree.

        So a move always ends, however fast subscriptions change."""
        self._changed += count
        if self._changed >= MAINTAIN_EVERY:
            self.maintain(2 * self._changed)
            self._changed = 0

    def _add(self, ids: NDArray[np.int64], data: NDArray[np.uint8], position: int) -> int:
        done, words = 0, self.vocabulary.state
        while done < len(ids):
            if words[t.ATTRIBUTES] + CONSTRAINTS_MAX >= t.ATTRIBUTES_MAX:
                raise Overloaded(
                    "L607",
                    f"filters name {words[t.ATTRIBUTES]} attributes, too close to the limit of {t.ATTRIBUTES_MAX}",
                    "use the same attribute names in more filters, or remove subscriptions",
                )
            done, position = subscription_kernel.add_subscriptions(
                self.vocabulary, self.filters, self.old_tree, self.tree, self._scratch, ids, done, data, position
            )
            if done < len(ids) or self.tree.state[t.WANTED_NODES]:
                self._grow()
        return position

    def _move(self, most: int) -> None:
        """Moves up to `most` records to the new tree.

        Removals shift the slots, so one pass can miss records. The search starts again until the old tree is empty."""
        self._slot = subscription_kernel.move_records(
            self.vocabulary, self.filters, self.old_tree, self.tree, self._scratch, self._slot, most
        )
        if self.tree.state[t.WANTED_NODES]:
            self._grow()
        if self._slot >= len(self.filters.slots):
            self._slot = 0
            if self.old_tree.state[t.ENTRIES] == 0:
                self.old_tree = self.tree
                # What earlier plans and the move have cost does not count: the first window of this plan begins here.
                self._plan.begin_window(*self._cost())

    def _age(self) -> None:
        """Halves all counts of sampled notifications, so that recent ones weigh more and the counts stay small."""
        self.vocabulary.state[t.EVENTS] //= 2
        self.vocabulary.attribute_seen[:] //= 2
        self.vocabulary.string_seen[:] //= 2
        self.tree.histogram[:] //= 2

    def _grow(self) -> None:
        """Grows every array in which a kernel found too little room."""
        is_moving = self.old_tree is not self.tree
        self._grow_vocabulary()
        self._grow_filters()
        self.tree = self._grow_tree(self.tree)
        self.old_tree = self._grow_tree(self.old_tree) if is_moving else self.tree

    def _grow_vocabulary(self) -> None:
        vocabulary, state = self.vocabulary, self.vocabulary.state
        margin = subscription_kernel.STRINGS_MARGIN
        vocabulary = _with_room(vocabulary, int(state[t.TOP]), margin, "strings", "string_seen")
        vocabulary = _with_room(vocabulary, int(state[t.WORDS_TOP]), subscription_kernel.WORDS_MARGIN, "words")
        vocabulary = _with_room(
            vocabulary, int(state[t.ATTRIBUTE_TOP]), CONSTRAINTS_MAX, "attributes", "attribute_seen"
        )
        slots = _larger_hash_table(vocabulary.slots, int(state[t.COUNTED]) + margin)
        if slots is not None:
            hash_table_kernel.refill_pairs(slots, vocabulary.slots)
            vocabulary = vocabulary._replace(slots=slots)
        self.vocabulary = vocabulary

    def _grow_filters(self) -> None:
        filters, state = self.filters, self.filters.state
        filters = _with_room(filters, int(state[t.TOP]), subscription_kernel.CODE_MARGIN, "code")
        filters = _with_room(filters, int(state[t.SUBSCRIPTION_TOP]), 2, "subscriptions", "ids")
        slots = _larger_hash_table(filters.slots, int(state[t.COUNTED]) + 1)
        if slots is not None:
            subscription_kernel.refill_records(slots, filters.slots, filters.code)
            filters = filters._replace(slots=slots)
            self._slot = 0  # the records have new slots, so the move starts from the first one again
        slots = _larger_hash_table(filters.subscription_slots, int(state[t.SUBSCRIPTIONS]) + 1)
        if slots is not None:
            subscription_kernel.refill_subscriptions(slots, filters.subscription_slots, filters.ids)
            filters = filters._replace(subscription_slots=slots)
        self.filters = filters

    def _grow_tree(self, tree: t.Tree) -> t.Tree:
        state = tree.state
        nodes, entries = int(state[t.WANTED_NODES]), int(state[t.WANTED_ENTRIES])
        for name, rows in (("token_nodes", self.vocabulary.strings), ("roots", self.vocabulary.attributes)):
            if len(getattr(tree, name)) < len(rows):
                names = (name,) if name == "token_nodes" else ("roots", "domains", "histogram")
                tree = _with_room(tree, len(getattr(tree, name)), len(rows) - len(getattr(tree, name)), *names)
        tree = _with_room(tree, int(state[t.TOP]), nodes, "nodes", "node_keys")
        tree = _with_room(tree, int(state[t.DIMENSION_TOP]), nodes, "dimensions")
        tree = _with_room(tree, int(state[t.ENTRY_TOP]), entries, "entries")
        if state[t.CELLS_TOP] < t.CELL_ROWS_MAX:
            tree = _with_room(tree, int(state[t.CELLS_TOP]), 1, "cells", "sides")
        routes = _larger_hash_table(tree.routes, int(state[t.ROUTES]) + nodes)
        if routes is not None:
            hash_table_kernel.refill_pairs(routes, tree.routes)
            tree = tree._replace(routes=routes)
        state[t.WANTED_NODES] = state[t.WANTED_ENTRIES] = 0
        return tree


def _with_cell_rows(tree: t.Tree, attributes: t.I64) -> t.Tree:
    """Returns a new tree with a row of cells for each of these attributes. An attribute that is added later takes the
    next row, as long as there are rows left."""
    tree = _with_room(tree, 0, len(attributes), "cells", "sides")
    tree.roots[attributes, t.CELLS] = np.arange(1, len(attributes) + 1)
    tree.state[t.CELLS_TOP] = len(attributes)
    return tree


def _with_room(tables: Any, used: int, margin: int, *names: str) -> Any:
    """Returns the tables with room for `margin` more rows than are in use in the named arrays."""
    changed = {
        name: t.larger(getattr(tables, name), used, used + 2 * margin)
        for name in names
        if used + margin > len(getattr(tables, name))
    }
    return tables._replace(**changed) if changed else tables


def _larger_hash_table(table: Any, items: int) -> Any:
    """Returns an empty hash table, doubled until it suits `items` items; None if the current one is large enough."""
    size = len(table)
    while 2 * items > size:
        size *= 2
    return None if size == len(table) else t.zeros((size, *table.shape[1:]), table.dtype)
