"""`tidegate queue verify`: checks the environments of a data directory, record by record, and repairs them on request.

A directory that no broker uses is locked during the check. A directory in use can be checked too: an LMDB reader holds
a state of the environment, whose pages are not overwritten until the reader ends. Only a repair needs the broker to be
stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import lmdb

from tidegate.errors import ConfigError
from tidegate.queues.definition import Durability
from tidegate.queues.stores import store_identity
from tidegate.queues.stores.inspection import TRIES_MAX, Inspection, find_corrupt, inspect
from tidegate.queues.stores.layout import PREFIX
from tidegate.queues.stores.lmdb_store import ON_DISK, environment_path, lock_directory
from tidegate.queues.stores.salvage import Salvaged, nameless_queues, salvage
from tidegate.storage.lmdb_pages import PageFile

READ_BYTES: Final = 1024 * 1024


@dataclass
class QueueFinding:
    """Messages of a logical queue. `unreachable` messages are counted, but were not found."""

    queue: str
    durability: str
    counted: int = 0
    reachable: int = 0
    corrupt: int = 0
    unreachable: int = 0


@dataclass
class Verification:
    """The findings in a directory; after a repair, `salvaged` reports what was kept."""

    directory: Path
    is_in_use: bool = False
    problems: list[str] = field(default_factory=list)
    queues: list[QueueFinding] = field(default_factory=list)
    salvaged: dict[str, Salvaged] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        return not self.problems and all(
            not queue.corrupt and not queue.unreachable and queue.counted == queue.reachable for queue in self.queues
        )


def verify(directory: Path, *, is_repair: bool, advance: Callable[[int], None]) -> Verification:
    """Checks all environments. With `is_repair`, environments that are not sound are replaced by what can be read of
    them."""
    found = Verification(directory)
    if not any(store_identity.has_data(environment_path(directory, each)) for each in ON_DISK):
        identities = store_identity.read_identities(directory)
        for durability in ON_DISK:
            store_identity.check_present(directory, durability, environment_path(directory, durability), identities)
        raise ConfigError("C449", f"{directory} holds no queues", "choose the data directory of a broker with --data")
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_directory(directory))
        except ConfigError:
            if is_repair:
                raise
            found.is_in_use = True
        _verify_locked(found, stack, is_repair=is_repair, advance=advance)
    return found


def _verify_locked(found: Verification, stack: ExitStack, *, is_repair: bool, advance: Callable[[int], None]) -> None:
    identities = store_identity.read_identities(found.directory)
    files: dict[Durability, PageFile] = {}
    inspections: dict[Durability, Inspection] = {}
    corrupt: dict[Durability, dict[bytes, list[int]]] = {}
    for durability in ON_DISK:
        path = environment_path(found.directory, durability)
        try:
            store_identity.check_present(found.directory, durability, path, identities)
        except ConfigError as error:
            found.problems.append(str(error))
        if not store_identity.has_data(path):
            continue
        _read_through(path / store_identity.DATA)
        with ExitStack() as readers:
            file, inspection = _open_and_inspect(path, readers, is_in_use=found.is_in_use)
            stack.push(readers.pop_all())
        files[durability], inspections[durability] = file, inspection
        found.problems += [f"{inspection.path}: {text}" for text in inspection.problems]
        if inspection.structure is not None:
            corrupt[durability] = find_corrupt(file, inspection.structure, advance)
    found.queues = _by_queue(inspections, corrupt)
    if is_repair:
        nameless = nameless_queues(inspections)
        for durability, inspection in inspections.items():
            are_counts_right = all(count.is_consistent for count in inspection.counts.values())
            if inspection.problems or corrupt.get(durability) or not are_counts_right:
                path = environment_path(found.directory, durability)
                identity = identities.get(durability) or inspection.identity
                names = nameless if durability == "fsync" else None
                found.salvaged[durability] = salvage(files[durability], inspection, path, identity, names, advance)


def _read_through(data: Path) -> None:
    """Raises if the disk cannot read a block of the file: in a mapped file, that would end the process by SIGBUS."""
    done = 0
    try:
        with data.open("rb", buffering=0) as file:
            while chunk := file.read(READ_BYTES):
                done += len(chunk)
    except OSError as error:
        raise ConfigError(
            "C448",
            f"{data} cannot be read after byte {done}: {error.strerror}",
            "copy what can be read to another disk, for example with ddrescue, and verify the copy",
        ) from error


def _open_and_inspect(path: Path, stack: ExitStack, *, is_in_use: bool) -> tuple[PageFile, Inspection]:
    if not is_in_use:
        file = stack.enter_context(PageFile(path / store_identity.DATA))
        return file, inspect(file)
    environment = stack.enter_context(_reader(path))
    # Commits between the two openings may overwrite the meta page of the reader's state; then another attempt is
    # needed.
    for _ in range(TRIES_MAX):
        with contextlib.ExitStack() as trying:
            transaction = trying.enter_context(environment.begin())
            file = trying.enter_context(PageFile(path / store_identity.DATA))
            inspection = inspect(file, transaction.id())
            if inspection.structure is not None:
                stack.push(trying.pop_all())
                return file, inspection
    raise ConfigError("C448", f"{path} changes too fast to be checked", "stop the broker, and check again")


@contextmanager
def _reader(path: Path) -> Iterator[lmdb.Environment]:
    try:
        environment = lmdb.open(str(path), readonly=True, max_dbs=1)
    except lmdb.Error as error:
        raise ConfigError("C448", f"{path} cannot be opened: {error}", "stop the broker, and check again") from error
    with environment:
        yield environment


def _by_queue(
    inspections: dict[Durability, Inspection], corrupt: dict[Durability, dict[bytes, list[int]]]
) -> list[QueueFinding]:
    """Returns the findings of physical queues, summed up by name. Remains of dropped queues are omitted if the
    definitions are sound."""
    registry = inspections.get("fsync")
    names = {stored.number: (name, stored) for name, stored in registry.definitions.items()} if registry else {}
    is_certain = nameless_queues(inspections) is None
    found: dict[str, QueueFinding] = {
        name: QueueFinding(name, stored.settings.durability or "fsync") for name, stored in names.values()
    }
    for durability, inspection in inspections.items():
        for prefix, count in inspection.counts.items():
            number, physical = PREFIX.unpack(prefix)
            if number not in names and is_certain:
                continue
            name, stored = names.get(number, (f"(number {number})", None))
            queue = found.setdefault(name, QueueFinding(name, durability))
            is_outside = stored is not None and physical >= stored.settings.physical_queues
            queue.counted += count.counters.messages
            queue.reachable += 0 if is_outside else count.reached
            queue.unreachable += count.reached if is_outside else count.unreachable
            queue.corrupt += len(corrupt.get(durability, {}).get(prefix, []))
    return sorted(found.values(), key=lambda queue: queue.queue)
