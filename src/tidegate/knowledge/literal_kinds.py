"""The kinds of literals in a graph, its datatypes and languages, remembered beside it.

A literal in a mask stands for all literals of its text, while the store finds one only by its datatype or language too:
so it is asked once for each kind there is. There are few; to find them costs a pass over the graph, which a restart
should not wait for. They are written down in a file before a triple of a new kind is. The file is taken away while
something happens whose kinds are not known beforehand: a graph without it is gone through once when it is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

Kind: TypeAlias = tuple[str, str]  # a datatype, or a language; neither for a plain string


class LiteralKinds:
    """Without a file they are known for the life of the process."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._kinds: set[Kind] = set()

    def __iter__(self) -> Iterator[Kind]:
        return iter(tuple(self._kinds))

    def load(self) -> bool:
        """Whether they are all known from the file."""
        if self._file is None or not self._file.exists():
            return False
        try:
            self._kinds = set(msgspec.json.decode(self._file.read_bytes(), type=list[Kind]))
        except msgspec.MsgspecError:
            return False
        return True

    def add(self, kinds: Iterable[Kind]) -> None:
        """To be called before literals of these kinds are stored."""
        new = set(kinds) - self._kinds
        if new:
            self._kinds |= new
            self.confirm()

    def doubt(self) -> None:
        """Literals of other kinds may be stored from now on, until `confirm`."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def confirm(self) -> None:
        """All kinds are known."""
        if self._file is not None:
            self.write(self._file)

    def write(self, file: Path) -> None:
        """Into a file, which appears when it is whole."""
        unfinished = file.with_suffix(".unfinished")
        with unfinished.open("wb") as written:
            written.write(msgspec.json.encode(sorted(self._kinds)))
            written.flush()
            os.fsync(written.fileno())
        unfinished.replace(file)
