"""The identity of a knowledge base: distinguishes a new, empty directory from one whose content is missing.

At its first start a knowledge base gets a random identity. It is written twice: into the knowledge base's own
directory, and into a record beside that directory, in the data directory. A directory without the recorded identity
has lost its content, like an unmounted volume, or belongs to another broker. A broker that started with it would appear
to have lost all facts.

The record names only one store and needs no other module, so that it can move into a common record of all stores.

What may go wrong, each with K107: the directory is empty, has another identity, or has its identity but no store. If
the whole data directory is missing, so is the record: this is not detected here.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Final

import msgspec

from tidegate.errors import KnowledgeError
from tidegate.knowledge.store_files import sync_directory, unwritable

IDENTITY: Final = "identity.json"  # in the directory of the knowledge base
STORE_FILE: Final = Path("triples", "CURRENT")  # exists in every store that was opened before


class Identity(msgspec.Struct, frozen=True):
    id: str


def check_identity(directory: Path) -> None:
    """Raises K107 if the content of a directory is missing or belongs to another knowledge base."""
    record = record_of(directory)
    recorded, found = _read(record), _read(directory / IDENTITY)
    has_store = (directory / STORE_FILE).exists()
    if recorded is not None and found is None and not has_store:
        raise _missing(directory, record, "is empty, but had a knowledge base")
    if recorded is not None and found is not None and recorded != found:
        raise _missing(directory, record, f"contains the knowledge base {found.id} instead of {recorded.id}")
    if found is not None and not has_store:
        raise _missing(directory, record, "has lost the files of its store")


def write_identity(directory: Path) -> None:
    """Writes the identity of a knowledge base and its record, where one of them is missing."""
    record = record_of(directory)
    recorded, found = _read(record), _read(directory / IDENTITY)
    identity = found or recorded or Identity(str(uuid.uuid4()))
    try:
        for file, known in ((directory / IDENTITY, found), (record, recorded)):
            if known != identity:
                _write(file, identity)
    except OSError as error:
        raise unwritable(error) from error


def record_of(directory: Path) -> Path:
    """Returns the file beside a directory that records its identity."""
    return directory.with_name(f"{directory.name}.identity.json")


def _read(file: Path) -> Identity | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Identity)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise KnowledgeError(
            "K107",
            f"{str(file)!r} cannot be read: {error}",
            "remove this file if the knowledge base beside it is the right one",
        ) from error


def _write(file: Path, identity: Identity) -> None:
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("wb") as written:
        written.write(msgspec.json.encode(identity))
        written.flush()
        os.fsync(written.fileno())
    unfinished.replace(file)
    sync_directory(file.parent)


def _missing(directory: Path, record: Path, what: str) -> KnowledgeError:
    return KnowledgeError(
        "K107",
        f"{str(directory)!r} {what}",
        "mount its volume, or restore a dump with: tidegate knowledge restore FILE; to start without facts, remove "
        f"{str(record)!r} and {str(directory / IDENTITY)!r}",
    )
