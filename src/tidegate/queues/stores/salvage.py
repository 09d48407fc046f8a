"""Salvages a damaged environment: copies what can be read, entry by entry, into a new one that takes its place.

Everything reachable is copied. Messages below a damaged branch are found on pages that are neither reached nor free.
This needs a sound list of free pages: without it, deleted messages would reappear. A corrupt record goes to `aside`,
counters are recomputed, and databases that this version does not know are copied unchanged. The damaged environment is
kept under another name until somebody removes it.

Messages below a damaged page that are found nowhere are lost.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, TypeAlias

import lmdb

from tidegate.queues.definition import Definition, Durability, QueueSettings
from tidegate.queues.records import is_sound
from tidegate.queues.stores import store_identity
from tidegate.queues.stores.group_commit import MAP_BYTES
from tidegate.queues.stores.inspection import Inspection
from tidegate.queues.stores.layout import (
    KEY,
    NAMES,
    PREFIX,
    Counters,
    StoredDefinition,
    pack_counters,
    pack_definition,
    sequence_of,
    unpack_counters,
    unpack_definition,
    unpack_deliveries,
)
from tidegate.storage.lmdb_pages import FREE, MAIN, Numbers, PageFile

COPIED_AT_ONCE: Final = 10_000
DATABASES_MAX: Final = 64
COUNTERS_BYTES_MAX: Final = 36

Advance: TypeAlias = Callable[[int], None]
# By queue number: the least number of physical queues that it has, and its durability.
Nameless: TypeAlias = dict[int, tuple[int, Durability]]


@dataclass
class Salvaged:
    """Messages by the prefix of their physical queue: how many were kept, and how many were set aside as corrupt.
    `found` counts those from pages that no tree reaches. `damaged` is where the old environment is now."""

    kept: dict[bytes, int] = field(default_factory=dict)
    aside: dict[bytes, int] = field(default_factory=dict)
    found: int = 0
    recovered_queues: list[str] = field(default_factory=list)
    damaged: Path | None = None


def salvage(
    file: PageFile,
    inspection: Inspection,
    environment: Path,
    identity: str | None,
    nameless: Nameless | None,
    advance: Advance,
) -> Salvaged:
    """Replaces `environment`, whose file is open, by a sound one. With `nameless` it holds definitions, some of which
    are damaged: those queues, and other queues with messages but no definition, get new names."""
    new = environment.with_name(environment.name + ".repaired")
    _remove_environment(new)
    new.mkdir()
    try:
        map_bytes = max(MAP_BYTES, 4 * inspection.size_bytes)
        with lmdb.open(str(new), map_size=map_bytes, max_dbs=DATABASES_MAX, sync=False) as target:
            copy = _Copy(file, inspection, target, advance)
            copy.copy_reached()
            copy.copy_lost()
            copy.write_counters()
            if nameless is not None:
                copy.name_queues(nameless)
            if identity is not None:
                copy.write_identity(identity)
            target.sync(True)
    except BaseException:
        _remove_environment(new)
        raise
    damaged = environment.with_name(f"{environment.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    environment.rename(damaged)
    new.rename(environment)
    _sync_directory(environment.parent)
    copy.result.damaged = damaged
    return copy.result


def nameless_queues(inspections: Mapping[Durability, Inspection]) -> Nameless | None:
    """Returns queues with messages and without a definition. Returns None if the definitions are sound, since then such
    messages are remains of dropped queues."""
    registry = inspections.get("fsync")
    if registry is None or registry.structure is None:
        return None
    trees = registry.structure.trees
    are_sound = "queues" in trees and not trees["queues"].problems and not trees[MAIN].problems
    if are_sound and not any(text.startswith("queues:") for text in registry.problems):
        return None
    found: Nameless = {}
    for durability, inspection in inspections.items():
        for prefix in inspection.counts:
            number, physical = PREFIX.unpack(prefix)
            found[number] = (max(found.get(number, (1, durability))[0], physical + 1), durability)
    return found


class _Copy:
    """One copy in progress."""

    def __init__(self, file: PageFile, inspection: Inspection, target: lmdb.Environment, advance: Advance) -> None:
        self._file = file
        self._structure = inspection.structure
        self._target = target
        self._advance = advance
        self._counters: dict[bytes, Counters] = {}
        self._definitions: dict[bytes, StoredDefinition] = {}
        trees = self._structure.trees if self._structure is not None else {}
        self._names = [name for name in trees if name not in (FREE, MAIN)]
        self._databases = {name: target.open_db(name.encode()) for name in dict.fromkeys([*NAMES, *self._names])}
        self.result = Salvaged()

    def copy_reached(self) -> None:
        for name in self._names:
            assert self._structure is not None
            put = {"messages": self._put_message, "counters": self._note_counters, "queues": self._put_definition}.get(
                name, partial(self._put_other, name)
            )
            self._copy(self._structure.trees[name].leaves, put)

    def copy_lost(self) -> None:
        """Copies the entries of pages that no tree reaches, if it is certain that these pages are not free."""
        structure = self._structure
        if structure is not None and not structure.problems and not structure.trees[FREE].problems:
            self._copy(self._file.lost_leaves(structure), self._put_lost)

    def write_counters(self) -> None:
        with self._target.begin(write=True) as transaction:
            for prefix, counters in self._counters.items():
                transaction.put(prefix, pack_counters(counters), db=self._databases["counters"])

    def write_identity(self, identity: str) -> None:
        database = self._target.open_db(store_identity.DATABASE.encode())
        with self._target.begin(write=True) as transaction:
            transaction.put(store_identity.KEY, identity.encode(), db=database)

    def name_queues(self, nameless: Nameless) -> None:
        """Gives queues whose definition is lost a new name, and a queue for their dead letters."""
        wanted = dict(nameless)
        for prefix in self.result.kept:
            number, physical = PREFIX.unpack(prefix)
            physical_queues, durability = wanted.get(number, (1, "fsync"))
            wanted[number] = (max(physical_queues, physical + 1), durability)
        known = {definition.number for definition in self._definitions.values()}
        next_number = max([*known, *wanted, 0]) + 1
        with self._target.begin(write=True) as transaction:
            for number in sorted(wanted.keys() - known):
                physical_queues, durability = wanted[number]
                settings = QueueSettings(physical_queues=physical_queues, durability=durability)
                definition = Definition(f"recovered-{number}", settings)
                for each, its_number in ((definition, number), (definition.dead_letters(), next_number)):
                    key, stored = each.name.encode(), StoredDefinition(its_number, each.settings, each.id)
                    transaction.put(key, pack_definition(key, stored), db=self._databases["queues"])
                next_number += 1
                self.result.recovered_queues.append(definition.name)

    def _copy(self, leaves: Numbers, put: Callable[[lmdb.Transaction, bytes, bytes], object]) -> None:
        assert self._structure is not None
        entries = self._file.entries(self._structure.meta.page_bytes, leaves)
        while batch := list(islice(entries, COPIED_AT_ONCE)):
            with self._target.begin(write=True) as transaction:
                for key, value, _flags in batch:
                    put(transaction, key, value)
            self._advance(len(batch))

    def _put_lost(self, transaction: lmdb.Transaction, key: bytes, value: bytes) -> None:
        """Identifies an entry of a lost page by its key and checksum, and copies it; entries without a checksum are
        skipped."""
        if len(key) == KEY.size:
            if is_sound(value):
                self.result.found += self._put_message(transaction, key, value)
        elif len(key) == PREFIX.size and len(value) <= COUNTERS_BYTES_MAX:
            self._note_counters(transaction, key, value)
        else:
            self._put_definition(transaction, key, value)

    def _put_message(self, transaction: lmdb.Transaction, key: bytes, value: bytes) -> bool:
        if len(key) != KEY.size:
            return False
        prefix = key[: PREFIX.size]
        if not is_sound(value):
            self.result.aside[prefix] = self.result.aside.get(prefix, 0) + 1
            transaction.put(key, value, db=self._databases["aside"])
            return False
        if not transaction.put(key, value, db=self._databases["messages"], overwrite=False):
            return False
        now = self._counters.get(prefix, Counters())
        self._counters[prefix] = now._replace(
            next=max(now.next, sequence_of(key) + 1),
            messages=now.messages + 1,
            size_bytes=now.size_bytes + len(value),
        )
        self.result.kept[prefix] = self.result.kept.get(prefix, 0) + 1
        return True

    def _note_counters(self, _transaction: lmdb.Transaction, key: bytes, value: bytes) -> None:
        """Keeps what cannot be recomputed: the next sequence, and how far messages were delivered."""
        with contextlib.suppress(lmdb.CorruptedError):
            kept = unpack_counters(value)
            now = self._counters.get(key, Counters())
            self._counters[key] = now._replace(
                next=max(now.next, kept.next), delivered_below=max(now.delivered_below, kept.delivered_below)
            )

    def _put_definition(self, transaction: lmdb.Transaction, key: bytes, value: bytes) -> None:
        with contextlib.suppress(lmdb.CorruptedError, UnicodeDecodeError):
            key.decode()
            self._definitions[key] = unpack_definition(key, value)
            transaction.put(key, value, db=self._databases["queues"])

    def _put_other(self, name: str, transaction: lmdb.Transaction, key: bytes, value: bytes) -> None:
        with contextlib.suppress(lmdb.CorruptedError):
            if name == "deliveries":
                unpack_deliveries(value)
            transaction.put(key, value, db=self._databases[name])


def _remove_environment(path: Path) -> None:
    for name in (store_identity.DATA, "lock.mdb"):
        (path / name).unlink(missing_ok=True)
    if path.is_dir():
        path.rmdir()


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
