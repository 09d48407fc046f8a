"""The subscription index: which subscriptions does a notification satisfy, answered on its bytes by kernels.

A filter is a *record* (record_kernel): a program of a few words a constraint, shared by all who want the same. Records
are filed in a *tree* (tree_kernel) under their most selective constraints (estimate_kernel), so that a notification
meets only those whose path it satisfies; what it meets is ruled out by one-word guards or verified by running the
program (match_kernel). Strings and attribute names are interned and counted (vocabulary_kernel). All of it lies in flat
arrays (tables), which Python only grows: a kernel stops before it could run out of room, says so, and is called again.

When the plan of the tree is outdated (planning), a second tree grows beside it and takes its records over, some at a
time; meanwhile a notification is matched in both. One thread writes; any number read, each with a `reader` of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import Overloaded
from tidegate.filters import CONSTRAINTS_MAX, Explanation, Filter
from tidegate.layers.batch import Batch
from tidegate.layers.index import match_kernel, subscription_kernel, tree_kernel, vocabulary_kernel
from tidegate.layers.index import tables as t
from tidegate.layers.index.estimate_kernel import carry_histograms
from tidegate.layers.index.memory_kernel import silent_arithmetic
from tidegate.layers.index.packing import pack, unpack_record
from tidegate.layers.index.planning import Plan, learn_domains
from tidegate.layers.index.reader import Matches, Reader
from tidegate.layers.index.readers_and_writer import ReadersAndWriter

EVENTS_REMEMBERED: Final = 1 << 20
ADDED_AT_ONCE: Final = 4096
MOVED_AT_ONCE: Final = 256
LOOK_EVERY: Final = 64


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
    """`match` finds exactly the subscriptions whose `Filter.matches` says yes; ids are not negative.

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
        self._changed = 0  # subscriptions, since the writer last looked after the plan
        self._slot = 0  # of the filters, up to which they have moved to the new tree

    def __len__(self) -> int:
        return int(self.filters.state[t.SUBSCRIPTIONS])

    def add(self, subscription: int, subscription_filter: Filter) -> None:
        """Adds a subscription, or gives a known one another filter."""
        self.add_packed(np.array([subscription], np.int64), pack(subscription_filter))

    def add_packed(self, ids: NDArray[np.int64], filters: bytes) -> None:
        """Adds many: their packed filters stand one after another. Those before one that is refused are added."""
        data, ids = np.frombuffer(filters, np.uint8), np.ascontiguousarray(ids, np.int64)
        if len(ids) and ids.min() < 0:
            raise ValueError(f"subscription {ids.min()} is negative; use numbers from 0 on")
        position = 0
        for start in range(0, len(ids), ADDED_AT_ONCE):
            some = ids[start : start + ADDED_AT_ONCE]
            with self.lock.writing, silent_arithmetic():
                position = self._add(some, data, position)
            self._on_changes(len(some))

    def remove(self, subscription: int) -> None:
        """KeyError when there is no such subscription."""
        if not self.remove_many(np.array([subscription], np.int64)):
            raise KeyError(subscription)

    def remove_many(self, ids: NDArray[np.int64]) -> int:
        """Removes those that are there; how many were."""
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
        """For another thread."""
        reader = Reader(self)
        self._readers.add(reader)
        return reader

    def match(self, notifications: Iterable[Mapping[str, Any]]) -> list[list[int]]:
        """For each notification the ids of the subscriptions that it satisfies: for convenience, not for speed."""
        return self._reader.match(notifications)

    def match_batch(self, batch: Batch) -> Matches:
        """Notification i of the batch satisfies `ids[offsets[i]:offsets[i + 1]]`."""
        return self._reader.match_batch(batch)

    def match_frames(self, data: bytes) -> Matches:
        """The same for whole PUBLISH frames, one after another, which the door has checked."""
        return self._reader.match_frames(data)

    def match_maps(self, data: bytes, starts: NDArray[np.int64]) -> Matches:
        """The same for MessagePack maps at `starts` in `data`, which the door has checked."""
        return self._reader.match_maps(data, starts)

    def filter_of(self, subscription: int) -> Filter:
        """The filter of a subscription, as the index understands it; KeyError when there is none."""
        with self.lock.reading, silent_arithmetic():
            place = subscription_kernel.find_subscription(self.filters, subscription)
            if place < 0:
                raise KeyError(subscription)
            return unpack_record(self.vocabulary, self.filters, int(self.filters.subscriptions[place, t.RECORD]))

    def explain(self, notification: Mapping[str, Any], subscription: int) -> Explanation:
        """Why a notification satisfies a subscription, or why not; KeyError when there is no such subscription."""
        return self.filter_of(subscription).explain(notification)

    def maintain(self, most: int = MOVED_AT_ONCE) -> bool:
        """Does a little of what keeps the index fast, if there is anything to do: plans it anew when that is due, and
        files up to `most` filters by the new plan. True while there is more; for the writer, whenever it has time."""
        state = self.vocabulary.state
        if state[t.EVENTS] > EVENTS_REMEMBERED:
            self._age()
        if self.old_tree is self.tree:
            counters = self._counters()
            if not (
                self._plan.is_outdated(int(self.filters.state[t.COUNTED]), int(state[t.EVENTS]), self.tree)
                or self._plan.has_become_dear(
                    int(counters[match_kernel.NOTIFICATIONS]), int(counters[match_kernel.SCANNED])
                )
            ):
                return False
            self.plan()
        with self.lock.writing, silent_arithmetic():
            self._move(most)
        return self.old_tree is not self.tree

    def plan(self) -> None:
        """Makes a new plan, and an empty tree for it; `maintain` moves the filters over."""
        if self.old_tree is not self.tree:
            return
        with self.lock.writing, silent_arithmetic():
            tree = t.make_tree(self.vocabulary, generation=1 - int(self.tree.state[t.GENERATION]))
            tree.domains[:] = learn_domains(self.filters, len(tree.domains))
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

    def _on_changes(self, count: int) -> None:
        """The writer of filters also keeps the index fast: twice as many as have changed move on to a new plan."""
        self._changed += count
        if self._changed >= LOOK_EVERY:
            self.maintain(2 * self._changed)
            self._changed = 0

    def _add(self, ids: NDArray[np.int64], data: NDArray[np.uint8], position: int) -> int:
        done, words = 0, self.vocabulary.state
        while done < len(ids):
            if words[t.ATTRIBUTES] + CONSTRAINTS_MAX >= t.ATTRIBUTES_MAX:
                raise Overloaded(
                    "L607", f"filters name {words[t.ATTRIBUTES]} attributes", f"use fewer than {t.ATTRIBUTES_MAX}"
                )
            done, position = subscription_kernel.add_subscriptions(
                self.vocabulary, self.filters, self.old_tree, self.tree, self._scratch, ids, done, data, position
            )
            if done < len(ids) or self.tree.state[t.WANTED_NODES]:
                self._grow()
        return position

    def _move(self, most: int) -> None:
        """Moves records to the new tree. Slots shift when records go, so it looks again until the old tree is empty."""
        self._slot = subscription_kernel.move_records(
            self.vocabulary, self.filters, self.old_tree, self.tree, self._scratch, self._slot, most
        )
        if self.tree.state[t.WANTED_NODES]:
            self._grow()
        if self._slot >= len(self.filters.slots):
            self._slot = 0
            if self.old_tree.state[t.ENTRIES] == 0:
                self.old_tree = self.tree

    def _age(self) -> None:
        """What was seen long ago counts half: the counts stay small, and follow notifications that change."""
        self.vocabulary.state[t.EVENTS] //= 2
        self.vocabulary.attribute_seen[:] //= 2
        self.vocabulary.string_seen[:] //= 2
        self.tree.histogram[:] //= 2

    def _grow(self) -> None:
        """Makes room wherever a kernel found too little of it."""
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
        slots = _twice(vocabulary.slots, int(state[t.COUNTED]) + margin)
        if slots is not None:
            vocabulary_kernel.refill_strings(slots, vocabulary.slots)
            vocabulary = vocabulary._replace(slots=slots)
        self.vocabulary = vocabulary

    def _grow_filters(self) -> None:
        filters, state = self.filters, self.filters.state
        filters = _with_room(filters, int(state[t.TOP]), subscription_kernel.CODE_MARGIN, "code")
        filters = _with_room(filters, int(state[t.SUBSCRIPTION_TOP]), 2, "subscriptions", "ids")
        slots = _twice(filters.slots, int(state[t.COUNTED]) + 1)
        if slots is not None:
            subscription_kernel.refill_records(slots, filters.slots, filters.code)
            filters = filters._replace(slots=slots)
            self._slot = 0
        slots = _twice(filters.subscription_slots, int(state[t.SUBSCRIPTIONS]) + 1)
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
        tree = _with_room(tree, int(state[t.CELLS_TOP]), 1, "cells", "sides")
        routes = _twice(tree.routes, int(state[t.ROUTES]) + nodes)
        if routes is not None:
            tree_kernel.refill_routes(routes, tree.routes)
            tree = tree._replace(routes=routes)
        state[t.WANTED_NODES] = state[t.WANTED_ENTRIES] = 0
        return tree


def _with_room(tables: Any, used: int, margin: int, *names: str) -> Any:
    """The tables with room for `margin` rows more than are used in some arrays."""
    changed = {
        name: t.larger(getattr(tables, name), used, used + 2 * margin)
        for name in names
        if used + margin > len(getattr(tables, name))
    }
    return tables._replace(**changed) if changed else tables


def _twice(table: Any, items: int) -> Any:
    """An empty hash table for so many items, twice as large or more; None when the present one is large enough."""
    size = len(table)
    while 2 * items > size:
        size *= 2
    return None if size == len(table) else t.zeros((size, *table.shape[1:]), table.dtype)
