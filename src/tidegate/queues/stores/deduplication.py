"""Deduplication in LMDB: what a queue remembers of publishers and devices, so that a repeated message is stored once.

Decisions are made in memory, before the commit that makes them durable. A commit writes only differences to the state
on the disk, so that a failed commit leaves no trace in later ones. A sender that repeats a message which is on its way
to the disk waits for a later commit, and fails if the original's commit has failed.

Covers grow with every commit. The growth is appended to a log, one record per commit, and folded into the covers now
and then. Opening the store reads both.

What may go wrong: a commit fails (`take_back`), or there are too many publishers (the least recently seen is forgotten,
and counted).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import lmdb

from tidegate.queues.covers import FormerFilter, Run, covered, filter_tag
from tidegate.queues.definition import QueueSettings
from tidegate.queues.store import Batches, Entry, Runs, StoreCounts
from tidegate.queues.stores.group_commit import Write
from tidegate.queues.stores.layout import Databases, pack_runs
from tidegate.queues.stores.physical_queue import PhysicalQueue


@dataclass(slots=True, eq=False)
class Fresh:
    """The new part of an enqueue, by physical queue: entries, the identities to remember for them, and the runs that
    cover them. `filters` are new to their physical queues; `duplicates` counts the other entries."""

    batches: Batches = field(default_factory=dict)
    identities: dict[int, list[bytes]] = field(default_factory=dict)
    grown: Runs = field(default_factory=dict)
    filters: list[tuple[PhysicalQueue, str]] = field(default_factory=list)
    duplicates: int = 0


class Deduplication:
    """Deduplicates for one logical queue. Each `without_duplicates` is followed by `keep` or by `take_back`."""

    def __init__(self, databases: Databases, physical: list[PhysicalQueue], counts: StoreCounts) -> None:
        self._databases = databases
        self._physical = physical
        self._counts = counts
        self._in_flight: set[Fresh] = set()

    def without_duplicates(self, batches: Batches, runs: Runs, settings: QueueSettings, now_s: float) -> Fresh:
        """Returns the new entries, and remembers them from now on. If it raises FormerFilter, nothing has changed."""
        fresh = Fresh()
        self._in_flight.add(fresh)
        try:
            for physical, entries in batches.items():
                at = self._physical[physical]
                at.forget_identities(now_s - settings.deduplication_s, settings.deduplication_messages_max)
                stale = _accept_new(fresh, at, entries, runs.get(physical, []), settings.deduplication_s > 0, now_s)
                fresh.duplicates += len(stale)
                if stale:
                    entries = [entry for index, entry in enumerate(entries) if index not in stale]
                fresh.batches[physical] = entries
        except FormerFilter:
            self.take_back(fresh)
            raise
        return fresh

    def has(self, batches: Batches, runs: Runs, since_s: float) -> bool:
        """Returns whether every entry is covered, or came after `since_s`."""
        for physical, entries in batches.items():
            at = self._physical[physical]
            is_known = [at.identities.get(entry.identity, float("-inf")) > since_s for entry in entries]
            for run in runs.get(physical, ()):
                for index, is_in in enumerate(covered(at.covers.get(run.key), run.places) or (), run.start):
                    is_known[index] = is_known[index] or is_in
            if not all(is_known):
                return False
        return True

    def write_covers(self, fresh: Fresh, now_s: float) -> Write | None:
        """Returns the write that a commit does besides its entries: covers that grow, and covers to forget."""
        if not fresh.grown:
            return None
        logged: list[tuple[bytes, bytes, bool]] = []
        filters: dict[bytes, str] = {}
        forgotten: list[bytes] = []
        for physical, runs in fresh.grown.items():
            at = self._physical[physical]
            logged.append((at.prefix, pack_runs(runs), at.is_fold_due(len(runs))))
            for text in {run.filter for run in runs} - {"", *at.filters.values()}:
                fresh.filters.append((at, text))
                filters[at.prefix + filter_tag(text)] = text
                forgotten += [at.prefix + tag for tag in at.surplus_filters]
            keys = at.covers.forget_surplus()
            self._counts.forgotten_publishers += len(keys)
            forgotten += [at.prefix + key for key in keys]
        databases, time_ms = self._databases, int(1000 * now_s)

        def write(transaction: lmdb.Transaction) -> None:
            for prefix, packed, is_due in logged:
                databases.log_runs(transaction, prefix, packed, time_ms)
                if is_due or forgotten:
                    databases.fold_runs(transaction, prefix, time_ms)
            for key, text in filters.items():
                databases.write_filter(transaction, key, text, time_ms)
            for key in forgotten:
                databases.forget_cover(transaction, key)

        return write

    def keep(self, fresh: Fresh) -> None:
        """Confirms that a commit is on the disk."""
        self._in_flight.discard(fresh)
        for at, text in fresh.filters:
            at.add_filter(filter_tag(text), text)

    def take_back(self, fresh: Fresh) -> None:
        """Undoes a failed commit: it is neither remembered nor covered. The covers become those on the disk, plus those
        of other commits in flight."""
        self._in_flight.discard(fresh)
        for physical, identities in fresh.identities.items():
            for identity in identities:
                self._physical[physical].identities.pop(identity, None)
        if not fresh.grown:
            return
        # Intervals that have merged cannot be taken apart, so the covers are read from the disk again.
        with self._databases.commit.reading() as transaction:
            for physical in fresh.grown:
                at = self._physical[physical]
                at.covers.replace(self._databases.read_covers(transaction, at.prefix))
                for other in self._in_flight:
                    for run in other.grown.get(physical, ()):
                        at.covers.grow(run)


def _accept_new(
    fresh: Fresh, at: PhysicalQueue, entries: list[Entry], runs: list[Run], remembers: bool, now_s: float
) -> set[int]:
    """Remembers and covers the new entries of a physical queue. Returns the indexes of the duplicates."""
    stale: set[int] = set()
    end = 0
    grown: list[Run] = []
    # A queue has nearly always had one filter, and remembers no identities. Then one comparison is enough for a feed.
    is_simple = len(at.filters) < 2 and not at.identities
    known_filter = next(iter(at.filters.values()), "")
    for run in runs:
        if end < run.start and remembers:
            _remember(fresh, at, entries, range(end, run.start), stale, now_s)
        end = run.start + len(run.places)
        bounds = at.covers.get(run.key)
        is_above = bounds is None or run.places[0] > bounds[-1]
        if not (is_simple and is_above and run.filter and known_filter in ("", run.filter)):
            before = at.stored_before(run)
            if before is not None:
                stale.update(index for index, is_stored in enumerate(before, run.start) if is_stored)
            if at.identities:
                stale.update(index for index in range(run.start, end) if entries[index].identity in at.identities)
            if stale and stale.issuperset(range(run.start, end)):
                continue
        grown.append(run)
        fresh.grown[at.number] = grown
        if not at.covers.grow(run) and not run.filter:
            _remember(fresh, at, entries, range(run.start, end), stale, now_s)
    if end < len(entries) and remembers:
        _remember(fresh, at, entries, range(end, len(entries)), stale, now_s)
    return stale


def _remember(
    fresh: Fresh, at: PhysicalQueue, entries: list[Entry], indexes: range, stale: set[int], now_s: float
) -> None:
    """Remembers the identities of entries that are not duplicates. The second of two equal entries is a duplicate."""
    remembered = fresh.identities.setdefault(at.number, [])
    for index in indexes:
        identity = entries[index].identity
        if not identity or index in stale:
            continue
        if identity in at.identities:
            stale.add(index)
        else:
            at.identities[identity] = now_s
            remembered.append(identity)
