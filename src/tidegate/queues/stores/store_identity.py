"""Store identity: detects an unmounted volume, or a wrong one, which would otherwise look like an empty store.

Each environment has a random identity in its database `store`, and the file `stores.json` of the data directory lists
the identities of all of them. An environment in that list is refused (C446) if it is missing, is empty or has another
identity. To start with empty queues, remove the file. Directories of former versions get both when they are opened; on
a full disk a later start does that.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Final

import msgspec

from tidegate.errors import ConfigError

log = logging.getLogger(__name__)

FILE: Final = "stores.json"
DATABASE: Final = "store"
KEY: Final = b"identity"
DATA: Final = "data.mdb"


def read_identities(directory: Path) -> dict[str, str]:
    """Returns the identities of the environments by name; an empty mapping if the directory has no such file."""
    path = directory / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            "C446",
            f"{path}, which lists the stores of this directory, cannot be read: {error}",
            "restore it; or remove it to accept the stores in the directory as they are",
        ) from error


def write_identities(directory: Path, identities: dict[str, str]) -> None:
    """Replaces the file durably. A failure is logged, and the next start tries again."""
    path, new = directory / FILE, directory / (FILE + ".new")
    try:
        with new.open("wb") as file:
            file.write(msgspec.json.encode(identities) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        # The new name is durable only after a sync of the directory.
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        new.unlink(missing_ok=True)
        log.warning("the identities of the stores cannot be written path=%s error=%s", path, error)


def make_identity() -> str:
    return secrets.token_hex(16)


def has_data(environment: Path) -> bool:
    """Returns whether an environment was ever written to. LMDB creates an empty file before it writes the first
    pages."""
    try:
        return (environment / DATA).stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_present(directory: Path, name: str, environment: Path, known: dict[str, str]) -> None:
    """Raises C446 if an environment that the directory lists is missing."""
    if name in known and not has_data(environment):
        raise ConfigError(
            "C446",
            f"{environment / DATA} is missing or empty, although {directory / FILE} lists its store {known[name]}",
            f"mount the volume or restore the file; to start with an empty store, remove {directory / FILE}",
        )


def check_same(directory: Path, name: str, environment: Path, known: dict[str, str], found: str | None) -> None:
    """Raises C446 if the environment is not the one that the directory lists."""
    if name in known and known[name] != found:
        raise ConfigError(
            "C446",
            f"{environment} holds {f'the store {found}' if found else 'a store without an identity'}, but "
            f"{directory / FILE} lists {known[name]}",
            f"mount the right volume; to use this one, remove {directory / FILE}",
        )
