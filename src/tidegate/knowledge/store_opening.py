"""Opens the store of a graph in its directory.

What may go wrong: a directory that cannot be opened (K107). A store on a full disk is opened read-only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyoxigraph as ox

from tidegate.errors import TidegateError
from tidegate.knowledge.store_files import is_disk_full, not_opened, unwritable
from tidegate.security.private_files import private_directory

# Names of files and directories inside the directory of a graph, or of a copy.
TRIPLES: Final = "triples"
KINDS: Final = "kinds.json"
COPIES: Final = "copies"
DUMP: Final = "triples.nq"
GRAPHS: Final = "graphs.json"


class ClosedStore:
    """Stands in for a store that could not be reopened: every use raises OSError."""

    def __getattr__(self, name: str) -> Any:
        raise OSError("the store of the knowledge base is not open")

    def __contains__(self, quad: object) -> bool:
        raise OSError("the store of the knowledge base is not open")

    def __len__(self) -> int:
        raise OSError("the store of the knowledge base is not open")

    def __iter__(self) -> Iterator[Any]:
        raise OSError("the store of the knowledge base is not open")


def open_store(directory: Path) -> tuple[ox.Store, TidegateError | None]:
    """Opens the store. Returns it, and a failure if it could only be opened read-only."""
    try:
        private_directory(directory)
        store = ox.Store(directory / TRIPLES)
        shutil.rmtree(directory / COPIES, ignore_errors=True)  # left behind by a process that was killed
        return store, None
    except (OSError, RuntimeError) as error:
        if is_disk_full(error):
            with contextlib.suppress(OSError, RuntimeError):
                return ox.Store.read_only(os.fspath(directory / TRIPLES)), unwritable(error)
        raise not_opened(directory, error) from error
