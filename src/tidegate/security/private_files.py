"""Files for this user alone: data directories (0700, files 0600), and directories whose files are executed.

On a shared machine other users must not read messages and facts. A user who can write into a directory of compiled code
decides what this process runs.

What may go wrong: a directory belongs to another user. Data in it is used, with a warning, because the operator may
intend that. Code in it is not run.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
_RIGHTS_OF_OTHERS: Final = 0o077


def make_new_files_private() -> None:
    """Makes every file that this process creates from now on accessible to its user only."""
    os.umask(_RIGHTS_OF_OTHERS)


def private_directory(directory: Path) -> None:
    """Creates a directory for this user alone. If it exists, removes the rights of other users on it and everything in
    it, and logs a warning. Raises OSError if it cannot be created."""
    directory.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
    opened = [path for path in _inside(directory) if _is_open_to_others(path)]
    refused = [path for path in opened if not _close_to_others(path)]
    if refused:
        log.warning(
            "other users have access to %s, and this process cannot change that: use a directory that it owns",
            refused[0],
        )
    elif opened:
        log.warning("other users had access to %s: only this user has from now on", directory)


def reason_not_to_run(directory: Path) -> str:
    """Returns why code from an existing directory must not be run, or "" if it may.

    This user or root must own the directory and every directory above it. Nobody else may write to them. There are two
    exceptions above it: a sticky bit that protects entries, as in /tmp, and this user's own group."""
    here = directory.resolve()
    for path in (here, *here.parents):
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user"
        is_protected = path != here and status.st_mode & stat.S_ISVTX
        if status.st_mode & stat.S_IWOTH and not is_protected:
            return f"every user may write to {path}"
        is_shared = status.st_mode & stat.S_IWGRP and (path == here or status.st_gid != os.getegid())
        if is_shared and not is_protected:
            return f"a group may write to {path}"
    return ""


def _inside(directory: Path) -> Iterator[Path]:
    """Yields the directory and everything in it. Does not follow symbolic links."""
    yield directory
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = Path(parent) / name
            if not path.is_symlink():
                yield path


def _is_open_to_others(path: Path) -> bool:
    try:
        return bool(path.lstat().st_mode & _RIGHTS_OF_OTHERS)
    except FileNotFoundError:
        return False


def _close_to_others(path: Path) -> bool:
    """Removes all rights of other users. Returns False if that failed; a file that no longer exists is no failure."""
    try:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_RIGHTS_OF_OTHERS)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
