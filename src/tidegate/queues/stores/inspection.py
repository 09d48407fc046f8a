"""Inspection: the contents and the problems of an environment, read from its pages alone, before LMDB opens it.

`inspect` checks the structure of every tree (`lmdb_pages`), the definitions, and the counters of each physical queue
against the reachable messages. It reads no record; `find_corrupt` does, for `tidegate queue verify`.

A start refuses an environment with problems: C447 if the file was cut off, C448 for all others. A count that differs
from the reachable messages is no problem of the structure: the queue is served, and the difference is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import lmdb

from tidegate.errors import ConfigError
from tidegate.queues.records import is_sound
from tidegate.queues.stores import store_identity
from tidegate.queues.stores.layout import (
    KEY,
    NAMES,
    PREFIX,
    Counters,
    StoredDefinition,
    unpack_counters,
    unpack_definition,
    unpack_deliveries,
)
from tidegate.storage.lmdb_pages import FREE, MAIN, Meta, PageFile, Run, Structure

REPORT_EVERY: Final = 1000
# Another process may commit twice during one attempt, so that the state is gone and another attempt is needed.
TRIES_MAX: Final = 20


@dataclass(frozen=True)
class PhysicalCount:
    """Compares the counters of a physical queue with its reachable messages."""

    counters: Counters
    reached: int
    reached_bytes: int
    last: int

    @property
    def unreachable(self) -> int:
        return max(0, self.counters.messages - self.reached)

    @property
    def is_consistent(self) -> bool:
        counted = (self.counters.messages, self.counters.size_bytes)
        return counted == (self.reached, self.reached_bytes) and self.counters.next > self.last


@dataclass
class Inspection:
    """`counts` are by the prefix of a physical queue, `definitions` by name; `structure` is None if no meta page is
    usable."""

    path: Path
    size_bytes: int
    structure: Structure | None = None
    problems: list[str] = field(default_factory=list)
    counts: dict[bytes, PhysicalCount] = field(default_factory=dict)
    definitions: dict[str, StoredDefinition] = field(default_factory=dict)
    identity: str | None = None

    @property
    def is_cut_off(self) -> bool:
        if self.structure is None:
            return False
        return any("end of the file" in text for text in self.structure.all_problems())

    def raise_if_damaged(self, directory: Path) -> None:
        """Raises if LMDB must not open the environment."""
        remedy = (
            f"restore it from a copy; or recover what can be read: tidegate queue verify --data {directory} --repair"
        )
        if self.is_cut_off:
            assert self.structure is not None
            pages = self.structure.meta.last_page + 1
            raise ConfigError(
                "C447",
                f"{self.path} was cut off: it has {self.size_bytes} bytes, but needs up to "
                f"{pages * self.structure.meta.page_bytes}",
                remedy,
            )
        if self.problems:
            more = f", and {len(self.problems) - 1} more problems" if len(self.problems) > 1 else ""
            raise ConfigError("C448", f"{self.path} is damaged: {self.problems[0]}{more}", remedy)


def inspect(file: PageFile, transaction: int | None = None) -> Inspection:
    """Checks the newest state of a file, or the state of a `transaction` that a reader holds."""
    found = Inspection(file.path, len(file.data))
    metas, problems = file.metas()
    found.problems += problems
    if transaction is None and len(metas) == 2:
        found.problems += _check_order(metas)
    if transaction is not None:
        metas = [meta for meta in metas if meta.transaction == transaction]
    if not metas:
        return found
    structure = found.structure = file.check(max(metas, key=lambda meta: meta.transaction))
    found.problems += structure.all_problems()
    _read_contents(file, structure, found)
    return found


def check_shared(environment: lmdb.Environment, path: Path) -> list[str]:
    """Checks the structure of an open environment that other processes may write to: a reader holds the state that is
    checked. Returns the problems."""
    problems: list[str] = []
    for _ in range(TRIES_MAX):
        with environment.begin() as transaction, PageFile(path / store_identity.DATA) as file:
            metas, problems = file.metas()
            for meta in metas:
                if meta.transaction == transaction.id() and not problems:
                    return file.check(meta).all_problems()
    return problems or ["it changes too fast to be checked"]


def find_corrupt(
    file: PageFile, structure: Structure, advance: Callable[[int], None] = lambda _count: None
) -> dict[bytes, list[int]]:
    """Reads every message. Returns the sequences of corrupt records by the prefix of their physical queue."""
    corrupt: dict[bytes, list[int]] = {}
    tree = structure.trees.get("messages")
    if tree is None:
        return corrupt
    done = 0
    for key, value, _flags in file.entries(structure.meta.page_bytes, tree.leaves):
        done += 1
        if done % REPORT_EVERY == 0:
            advance(REPORT_EVERY)
        if not is_sound(value) and len(key) == KEY.size:
            corrupt.setdefault(key[: PREFIX.size], []).append(int.from_bytes(key[PREFIX.size :], "big"))
    advance(done % REPORT_EVERY)
    return corrupt


def _check_order(metas: list[Meta]) -> list[str]:
    """Checks that the two meta pages are one commit apart, since commits write them in turn. Otherwise LMDB would take
    an older state for the newest. Without syncs, a power cut can cause that too."""
    first, second = (meta.transaction for meta in metas)
    if abs(first - second) == 1 or first == second == 0:
        return []
    return [f"the meta pages are of commits {first} and {second}, which are not consecutive"]


def _read_contents(file: PageFile, structure: Structure, found: Inspection) -> None:
    page_bytes, trees = structure.meta.page_bytes, structure.trees
    if store_identity.DATABASE in trees:
        for key, value, _flags in file.entries(page_bytes, trees[store_identity.DATABASE].leaves):
            if key == store_identity.KEY:
                found.identity = value.decode("ascii", "replace")
        found.problems += [f"database {name} is missing" for name in NAMES if name not in trees]
    runs = _messages(file, structure, found)
    counters: dict[bytes, Counters] = {}
    for database, key, value in _entries(file, structure, "queues", "counters", "deliveries"):
        try:
            if database == "queues":
                found.definitions[key.decode()] = unpack_definition(key, value)
            elif database == "counters" and len(key) == PREFIX.size:
                counters[key] = unpack_counters(value)
            elif database == "deliveries" and len(key) == KEY.size:
                unpack_deliveries(value)
            else:
                found.problems.append(f"{database}: a key has the wrong size, {len(key)} bytes")
        except (lmdb.CorruptedError, UnicodeDecodeError) as error:
            found.problems.append(f"{database}: entry {key.hex()}: {error}")
    for prefix in sorted(counters.keys() | runs.keys()):
        run = runs.get(prefix, Run(prefix, 0, 0, 0))
        found.counts[prefix] = PhysicalCount(counters.get(prefix, Counters()), run.entries, run.size_bytes, run.last)


def _messages(file: PageFile, structure: Structure, found: Inspection) -> dict[bytes, Run]:
    tree = structure.trees.get("messages")
    if tree is None:
        return {}
    runs = file.runs(structure.meta.page_bytes, tree.leaves, PREFIX.size)
    if sum(run.entries for run in runs) != tree.entries:
        found.problems.append("messages: has a key that is not that of a message")
    return {run.prefix: run for run in runs}


def _entries(file: PageFile, structure: Structure, *names: str) -> list[tuple[str, bytes, bytes]]:
    return [
        (name, key, value)
        for name in names
        if name in structure.trees and name not in (FREE, MAIN)
        for key, value, _flags in file.entries(structure.meta.page_bytes, structure.trees[name].leaves)
    ]


def unmounted(directory: Path) -> ConfigError:
    return ConfigError(
        "C449",
        f"{directory} holds no store, but require_store is set",
        "mount the volume; or start once without require_store to create a new store",
    )
