"""The kinds of literals in a graph (their datatypes and languages), stored in a file beside it.

A literal in a mask matches all literals with its text. The store finds a literal only together with its datatype or
language, so the graph queries it once per kind. There are few kinds, but finding them takes a scan of the whole graph,
which would delay a restart.

Invariant: if the file exists, it lists all kinds in the graph. A new kind is written to the file before its first
triple is stored. During an operation whose kinds are not known in advance, the file is deleted. If the file is missing
when a graph is opened, the graph is scanned once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from tidegate.knowledge.store_files import sync_directory

Kind: TypeAlias = tuple[str, str]  # a datatype, or a language; neither for a plain string


class LiteralKinds:
    """The known kinds. Without a file they last only as long as the process."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._kinds: set[Kind] = set()

    def __iter__(self) -> Iterator[Kind]:
        return iter(tuple(self._kinds))

    def load(self) -> bool:
        """Reads the file. Returns False if it is missing or unreadable, so that the kinds are unknown."""
        if self._file is None or not self._file.exists():
            return False
        try:
            self._kinds = set(msgspec.json.decode(self._file.read_bytes(), type=list[Kind]))
        except msgspec.MsgspecError:
            return False
        return True

    def add(self, kinds: Iterable[Kind]) -> None:
        """Adds kinds; call it before literals of these kinds are stored. If the file cannot be written, nothing
        changes."""
        new = set(kinds) - self._kinds
        if new:
            before, self._kinds = self._kinds, self._kinds | new
            try:
                self.save()
            except OSError:
                self._kinds = before
                raise

    def invalidate(self) -> None:
        """Deletes the file, because literals of unknown kinds may be stored from now on, until `save`."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            sync_directory(self._file.parent)

    def save(self) -> None:
        """Writes the file again, once all kinds are known."""
        if self._file is not None:
            self.write(self._file)

    def write(self, file: Path) -> None:
        """Writes the kinds to a file, which appears only once it is complete."""
        unfinished = file.with_suffix(".unfinished")
        with unfinished.open("wb") as written:
            written.write(msgspec.json.encode(sorted(self._kinds)))
            written.flush()
            os.fsync(written.fileno())
        unfinished.replace(file)
        sync_directory(file.parent)
