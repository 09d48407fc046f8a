"""The files of the graph's store: syncs the write-ahead log, checks for free disk space, and classifies errors.

The store (RocksDB, through pyoxigraph) appends every change to a write-ahead log, but syncs nothing. Its own `flush`
rewrites all tables, which costs more than twenty times as much as a sync of the log. So this module syncs the log: all
`*.log` files in the directory, because the store may have started another one, and the directory itself when the names
of the files have changed. A log that has disappeared needs no sync: the store has already written and synced its
content elsewhere.

After a failed write, the store refuses all changes until it is reopened. Reopening needs free disk space as well,
because the store then writes the content of the log to its tables.

What may go wrong, by the error of the store: the disk is full or fails (K131), a sync fails (K132), a file is damaged
(K130).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tidegate.errors import KnowledgeError, Unavailable

# The free space needed to reopen the store, in addition to that for the content of its log.
ROOM_BYTES: Final = 4 * 1024 * 1024
ROOM_FILE: Final = "room.unfinished"
DAMAGED: Final = "K130"
_DISK_FULL: Final = ("No space left on device", "File too large", "quota exceeded")
_LOCKED: Final = ("lock", "LOCK")
_CORRUPTION: Final = "Corruption"
_RESTORE: Final = "move the directory away, then run: tidegate knowledge restore FILE"


class Damaged(Unavailable):
    """A file of the store cannot be read. Only answers that need this file fail."""


class Unwritable(Unavailable):
    """The disk cannot store changes. With K131, no part of the change was made; with K132, it was made but not
    synced."""

    status = 507


class WriteAheadLog:
    """The log of a store in one directory. Any thread may sync it, but only one at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._synced_names: set[str] = set()

    def sync(self) -> None:
        """Waits until the disk has everything that was written before. Raises OSError if the sync fails."""
        logs = list(self._directory.glob("*.log"))
        for log in logs:
            with contextlib.suppress(FileNotFoundError):
                _sync(log, os.fdatasync)
        names = {log.name for log in logs}
        if names != self._synced_names:
            _sync(self._directory, os.fsync)
            self._synced_names = names

    def has_room(self) -> bool:
        """Reports whether the disk has enough free space to reopen the store."""
        size_bytes = sum(log.stat().st_size for log in self._directory.glob("*.log"))
        probe = self._directory.with_name(ROOM_FILE)
        try:
            with probe.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 2 * size_bytes + ROOM_BYTES)
        except OSError:
            return False
        finally:
            probe.unlink(missing_ok=True)
        return True


def sync_directory(directory: Path) -> None:
    """Syncs a directory, so that the names of its files survive a power cut."""
    _sync(directory, os.fsync)


def is_disk_full(error: Exception) -> bool:
    return any(reason in str(error) for reason in _DISK_FULL)


def is_damage(error: Exception) -> bool:
    return _CORRUPTION in str(error)


def damaged(error: Exception) -> Damaged:
    return Damaged(DAMAGED, f"a file of the knowledge base cannot be read: {error}", f"stop the broker, {_RESTORE}")


def unwritable(error: Exception) -> Unwritable:
    remedy = "free space on its disk" if is_disk_full(error) else "check its disk"
    return Unwritable(
        "K131", f"the knowledge base cannot store changes: {error}", f"{remedy}; changes are then accepted again"
    )


def not_synced(error: Exception) -> Unwritable:
    return Unwritable(
        "K132",
        f"the change was made, but may not survive a power cut: {error}",
        "repeat it when the broker accepts changes again",
    )


def not_opened(directory: Path, error: Exception) -> KnowledgeError:
    """Returns the error for a store that cannot be opened, with a remedy that fits the reason."""
    if is_disk_full(error):
        remedy = "free space on its disk"
    elif is_damage(error) or isinstance(error, FileNotFoundError):
        remedy = f"the files are damaged: {_RESTORE}"
    elif any(word in str(error) for word in _LOCKED):
        remedy = "stop the process that uses it"
    else:
        remedy = "give the broker permission to read and write this directory"
    return KnowledgeError("K107", f"the knowledge base in {str(directory)!r} cannot be opened: {error}", remedy)


def _sync(path: Path, sync: Callable[[int], None]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
