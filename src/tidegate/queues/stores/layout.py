"""The layout of queues in LMDB: keys sort in reading order, so that a range read is one walk of a cursor.

| database | key | value |
|---|---|---|
| store | `identity` | the identity of this environment |
| queues | name | number, settings |
| messages | queue, physical queue, sequence | sealed record |
| counters | queue, physical queue | next sequence, messages, bytes, delivered below |
| deliveries | as messages | number of deliveries, if more than one |
| identities | queue, physical queue, time, sequence | digests of what a commit stored |
| covers | queue, physical queue, digests of a filter and a publisher | time, bounds of its intervals |
| covers | queue, physical queue, digest of a filter | time, text of the filter |
| runs | queue, physical queue, number | time, keys and bounds of what a commit added to covers |
| marks | queue, physical queue, digest of a producer | number of its last batch, time |
| aside | as messages | the corrupt record that was in the queue |
| reads | name of a queue | when it was last read; in the environment of the definitions only |

Numbers in keys are big-endian. The number of a queue is never reused. Values of `queues`, `counters` and `deliveries`
end with a CRC-32; that of `queues` covers the name too. Values of former versions have no checksum, and are accepted
without one. Times of identities, covers, runs and marks come from the queue's steady clock, which continues from the
newest of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, cast
from zlib import crc32

import lmdb
import msgspec

from tidegate.queues.covers import PUBLISHER_BYTES, TAG_BYTES, Bounds, Run, extend
from tidegate.queues.definition import QueueSettings
from tidegate.queues.stores import store_identity
from tidegate.queues.stores.group_commit import GroupCommit
from tidegate.storage.lmdb_cursor import delete_here, key_of, value_of

PREFIX: Final = struct.Struct(">IH")
KEY: Final = struct.Struct(">IHQ")
IDENTITY_KEY: Final = struct.Struct(">IHQQ")
IDENTITY_BYTES: Final = 16
_COUNTERS: Final = struct.Struct("<QQQQ")
_DELIVERIES: Final = struct.Struct("<I")
_MARK: Final = struct.Struct("<QQ")
_READ: Final = struct.Struct("<d")
_CHECKSUM: Final = struct.Struct("<I")
_TIME: Final = struct.Struct("<Q")
_RUN: Final = struct.Struct(f"<{TAG_BYTES + PUBLISHER_BYTES}sQQ")
# Every environment has these databases; later versions may add others.
NAMES: Final = ("queues", "messages", "counters", "deliveries", "identities", "marks", "aside")


class Counters(NamedTuple):
    """The facts about a physical queue that are needed without reading its messages."""

    next: int = 1
    messages: int = 0
    size_bytes: int = 0
    delivered_below: int = 0


class StoredDefinition(msgspec.Struct):
    """A definition as it is stored; `number` represents the name in keys."""

    number: int
    settings: QueueSettings
    id: str


@dataclass
class Databases:
    """The databases of one environment."""

    commit: GroupCommit

    def __post_init__(self) -> None:
        self.queues = self.commit.open_database("queues")
        self.messages = self.commit.open_database("messages")
        self.counters = self.commit.open_database("counters")
        self.deliveries = self.commit.open_database("deliveries")
        self.identities = self.commit.open_database("identities")
        self.marks = self.commit.open_database("marks")
        self.covers = self.commit.open_database("covers")
        self.runs = self.commit.open_database("runs")
        self.aside = self.commit.open_database("aside")
        self.reads = self.commit.open_database("reads")
        self.store = self.commit.open_database(store_identity.DATABASE)

    def identity(self) -> str | None:
        with self.commit.reading() as transaction:
            value = transaction.get(store_identity.KEY, db=self.store)
        return None if value is None else bytes(value).decode("ascii", "replace")

    def identify(self, identity: str) -> str:
        """Writes and returns the identity. Call it before the environment is used."""
        self.commit.write_now(lambda transaction: transaction.put(store_identity.KEY, identity.encode(), db=self.store))
        return identity

    def read_counters(self, transaction: lmdb.Transaction, prefix: bytes) -> Counters:
        value = transaction.get(prefix, db=self.counters)
        return Counters() if value is None else unpack_counters(bytes(value))

    def add_to_counters(
        self, transaction: lmdb.Transaction, prefix: bytes, messages: int, size_bytes: int, next_: int, delivered: int
    ) -> None:
        """Adds to the counters. It takes differences, not values, so that a failed group leaves no trace in later
        ones."""
        now = self.read_counters(transaction, prefix)
        after = Counters(
            max(now.next, next_),
            max(0, now.messages + messages),
            max(0, now.size_bytes + size_bytes),
            max(now.delivered_below, delivered),
        )
        transaction.put(prefix, pack_counters(after), db=self.counters)

    def write_deliveries(self, transaction: lmdb.Transaction, key: bytes, deliveries: int) -> None:
        transaction.put(key, pack_deliveries(deliveries), db=self.deliveries)

    def read_deliveries(self, transaction: lmdb.Transaction, prefix: bytes) -> dict[int, int]:
        cursor = transaction.cursor(db=self.deliveries)
        found: dict[int, int] = {}
        is_there = cursor.set_range(prefix)
        while is_there and key_of(cursor).startswith(prefix):
            found[KEY.unpack(cursor.key())[2]] = unpack_deliveries(value_of(cursor))
            is_there = cursor.next()
        return found

    def remove_all(self, transaction: lmdb.Transaction, entries: list[tuple[bytes, bool]]) -> tuple[int, int]:
        """Removes messages; each entry says whether it was redelivered. Returns how many existed, and their bytes.
        After a delete the cursor is at the next entry, so neighbours need no search: messages leased together are
        mostly deleted together."""
        count = size_bytes = 0
        cursor = transaction.cursor(db=self.messages)
        for key, was_redelivered in entries:
            if key_of(cursor) == key or cursor.set_key(key):
                count += 1
                size_bytes += len(value_of(cursor))
                cursor.delete()
            if was_redelivered:
                transaction.delete(key, db=self.deliveries)
        return count, size_bytes

    def remove_below(self, transaction: lmdb.Transaction, prefix: bytes, below: bytes) -> tuple[int, int]:
        """Removes messages of a physical queue with keys below one, and their delivery counts. Returns how many, and
        their bytes."""
        count = size_bytes = 0
        cursor = transaction.cursor(db=self.messages)
        is_there = cursor.set_range(prefix)
        while is_there and key_of(cursor) < below:
            count += 1
            size_bytes += len(value_of(cursor))
            is_there = delete_here(cursor)
        known = transaction.cursor(db=self.deliveries)
        is_there = known.set_range(prefix)
        while is_there and key_of(known) < below:
            is_there = delete_here(known)
        return count, size_bytes

    def write_identities(
        self, transaction: lmdb.Transaction, key: bytes, identities: bytes, prefix: bytes, below: bytes
    ) -> None:
        """Stores the identities of a commit, and deletes those that are too old."""
        cursor = transaction.cursor(db=self.identities)
        is_there = cursor.set_range(prefix)
        while is_there and key_of(cursor) < below:
            is_there = delete_here(cursor)
        cursor.put(key, identities)

    def read_identities(self, transaction: lmdb.Transaction, prefix: bytes, since_s: float) -> dict[bytes, float]:
        """Returns the identities that came since then, oldest first, and when they came."""
        found: dict[bytes, float] = {}
        cursor = transaction.cursor(db=self.identities)
        is_there = cursor.set_range(prefix)
        while is_there and key_of(cursor).startswith(prefix):
            came_s = IDENTITY_KEY.unpack(key_of(cursor))[2] / 1000
            digests = value_of(cursor)
            if came_s >= since_s:
                for start in range(0, len(digests), IDENTITY_BYTES):
                    found[digests[start : start + IDENTITY_BYTES]] = came_s
            is_there = cursor.next()
        return found

    def newest_s(self, transaction: lmdb.Transaction, prefix: bytes) -> float:
        """Returns the newest time of an identity, a mark, a cover or a run; 0 if there is none."""
        newest_ms = 0
        cursor = transaction.cursor(db=self.identities)
        if _go_to_last(cursor, prefix):
            newest_ms = IDENTITY_KEY.unpack(key_of(cursor))[2]
        for _key, value in self._walk(transaction, self.marks, prefix):
            newest_ms = max(newest_ms, _MARK.unpack(value)[1])
        for database in (self.covers, self.runs):
            for _key, value in self._walk(transaction, database, prefix):
                newest_ms = max(newest_ms, _TIME.unpack_from(value)[0])
        return newest_ms / 1000

    def log_runs(self, transaction: lmdb.Transaction, prefix: bytes, runs: bytes, time_ms: int) -> None:
        """Appends what a commit adds to covers. It adds and does not replace, so that a failed group leaves no trace in
        later ones."""
        cursor = transaction.cursor(db=self.runs)
        number = sequence_of(key_of(cursor)) + 1 if _go_to_last(cursor, prefix) else 1
        cursor.put(prefix + number.to_bytes(8, "big"), _TIME.pack(time_ms) + runs)

    def fold_runs(self, transaction: lmdb.Transaction, prefix: bytes, time_ms: int) -> None:
        """Merges the logged runs into the covers."""
        logged: dict[bytes, Bounds] = {}
        cursor = transaction.cursor(db=self.runs)
        is_there = cursor.set_range(prefix)
        while is_there and key_of(cursor).startswith(prefix):
            for key, low, high in _RUN.iter_unpack(value_of(cursor)[_TIME.size :]):
                extend(logged.setdefault(key, []), low, high)
            is_there = delete_here(cursor)
        for key, bounds in sorted(logged.items()):
            kept = cast("bytes | None", transaction.get(prefix + key, db=self.covers))
            if kept is not None:
                bounds = _joined(_bounds(kept), bounds)
            value = struct.pack(f"<Q{len(bounds)}Q", time_ms, *bounds)
            transaction.put(prefix + key, value, db=self.covers)

    def forget_cover(self, transaction: lmdb.Transaction, key: bytes) -> None:
        """Deletes a cover, or a filter. Its logged runs must be folded before."""
        transaction.delete(key, db=self.covers)

    def read_covers(self, transaction: lmdb.Transaction, prefix: bytes) -> dict[bytes, Bounds]:
        """Returns the covers of a physical queue, the ones that grew last at the end."""
        found = [
            (_TIME.unpack_from(value)[0], key, _bounds(value))
            for key, value in self._walk(transaction, self.covers, prefix)
            if len(key) > TAG_BYTES
        ]
        covers = {key: bounds for _time, key, bounds in sorted(found)}
        for _number, value in self._walk(transaction, self.runs, prefix):
            for key, low, high in _RUN.iter_unpack(value[_TIME.size :]):
                bounds = covers.pop(key, [])
                extend(bounds, low, high)
                covers[key] = bounds
        return covers

    def count_logged(self, transaction: lmdb.Transaction, prefix: bytes) -> int:
        """Counts the runs that are not folded yet."""
        return sum(len(value) // _RUN.size for _number, value in self._walk(transaction, self.runs, prefix))

    def write_filter(self, transaction: lmdb.Transaction, key: bytes, text: str, time_ms: int) -> None:
        transaction.put(key, _TIME.pack(time_ms) + text.encode(), db=self.covers)

    def read_filters(self, transaction: lmdb.Transaction, prefix: bytes) -> dict[bytes, str]:
        """Returns the filters for which the covers of a physical queue were made, by their tags, the newest at the
        end."""
        found = [
            (_TIME.unpack_from(value)[0], key, value[_TIME.size :].decode())
            for key, value in self._walk(transaction, self.covers, prefix)
            if len(key) == TAG_BYTES
        ]
        return {tag: text for _time, tag, text in sorted(found)}

    def _walk(
        self, transaction: lmdb.Transaction, database: lmdb._Database, prefix: bytes
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yields the entries of a physical queue in a database: keys without their prefix, and values."""
        cursor = transaction.cursor(db=database)
        is_there = cursor.set_range(prefix)
        while is_there and key_of(cursor).startswith(prefix):
            yield key_of(cursor)[len(prefix) :], value_of(cursor)
            is_there = cursor.next()

    def write_mark(self, transaction: lmdb.Transaction, key: bytes, number: int, now_s: float) -> None:
        transaction.put(key, _MARK.pack(number, int(1000 * now_s)), db=self.marks)

    def forget_mark(self, transaction: lmdb.Transaction, key: bytes) -> None:
        transaction.delete(key, db=self.marks)

    def read_mark(self, transaction: lmdb.Transaction, key: bytes) -> int:
        """Returns the number of a producer's last batch; 0 if it has none here."""
        value = transaction.get(key, db=self.marks)
        return 0 if value is None else int(_MARK.unpack(value)[0])

    def read_marks(self, transaction: lmdb.Transaction, prefix: bytes) -> dict[bytes, int]:
        """Returns producers and the numbers of their last batches, the most recent at the end."""
        found: list[tuple[int, bytes, int]] = []
        cursor = transaction.cursor(db=self.marks)
        is_there = cursor.set_range(prefix)
        while is_there and key_of(cursor).startswith(prefix):
            number, came_ms = _MARK.unpack(value_of(cursor))
            found.append((came_ms, key_of(cursor)[len(prefix) :], number))
            is_there = cursor.next()
        return {producer: number for _came_ms, producer, number in sorted(found)}

    def write_read(self, transaction: lmdb.Transaction, queue: str, at: float) -> None:
        transaction.put(queue.encode(), _READ.pack(at), db=self.reads)

    def last_read(self, transaction: lmdb.Transaction, queue: str) -> float | None:
        value = transaction.get(queue.encode(), db=self.reads)
        return None if value is None else float(_READ.unpack(value)[0])

    def clear(self, transaction: lmdb.Transaction, prefix: bytes, entries_max: int) -> bool:
        """Removes all entries of a physical queue, some at a time. Returns false if more are left."""
        left = entries_max
        for database in (
            self.messages,
            self.deliveries,
            self.identities,
            self.marks,
            self.covers,
            self.runs,
            self.aside,
        ):
            cursor = transaction.cursor(db=database)
            is_there = cursor.set_range(prefix)
            while is_there and key_of(cursor).startswith(prefix):
                if not left:
                    return False
                left -= 1
                is_there = delete_here(cursor)
        transaction.delete(prefix, db=self.counters)
        return True


def pack_counters(counters: Counters) -> bytes:
    return _with_checksum(_COUNTERS.pack(*counters))


def unpack_counters(value: bytes) -> Counters:
    """Unpacks counters. Raises lmdb.CorruptedError for a value that was damaged on the disk."""
    return Counters(*_COUNTERS.unpack(_without_checksum(value, _COUNTERS.size)))


def pack_deliveries(deliveries: int) -> bytes:
    return _with_checksum(_DELIVERIES.pack(deliveries))


def unpack_deliveries(value: bytes) -> int:
    """Unpacks a delivery count. Raises lmdb.CorruptedError for a value that was damaged on the disk."""
    return int(_DELIVERIES.unpack(_without_checksum(value, _DELIVERIES.size))[0])


def pack_definition(name: bytes, definition: StoredDefinition) -> bytes:
    value = msgspec.msgpack.encode(definition)
    return value + _CHECKSUM.pack(crc32(name + value))


def unpack_definition(name: bytes, value: bytes) -> StoredDefinition:
    """Unpacks a definition. Raises lmdb.CorruptedError for one that was damaged on the disk."""
    if value[-_CHECKSUM.size :] == _CHECKSUM.pack(crc32(name + value[: -_CHECKSUM.size])):
        value = value[: -_CHECKSUM.size]
    try:
        return msgspec.msgpack.decode(value, type=StoredDefinition)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise lmdb.CorruptedError(
            f"the definition of queue {name.decode('utf-8', 'replace')!r} is damaged: {error}"
        ) from error


def _with_checksum(value: bytes) -> bytes:
    return value + _CHECKSUM.pack(crc32(value))


def _without_checksum(value: bytes, size: int) -> bytes:
    body = value[:size]
    if len(body) != size or (len(value) != size and value[size:] != _CHECKSUM.pack(crc32(body))):
        raise lmdb.CorruptedError("a counter does not match its checksum")
    return body


def pack_runs(runs: list[Run]) -> bytes:
    return b"".join([_RUN.pack(run.key, run.low, run.high) for run in runs])


def _joined(bounds: Bounds, more: Bounds) -> Bounds:
    for at in range(0, len(more), 2):
        extend(bounds, more[at], more[at + 1])
    return bounds


def _go_to_last(cursor: lmdb.Cursor, prefix: bytes) -> bool:
    """Moves a cursor to the last entry of a physical queue. Returns false if there is none."""
    is_there = cursor.set_range(prefix + b"\xff" * 16)
    return (cursor.prev() if is_there else cursor.last()) and key_of(cursor).startswith(prefix)


def _bounds(value: bytes) -> Bounds:
    count = len(value) // _TIME.size - 1
    return list(struct.unpack_from(f"<{count}Q", value, _TIME.size))


def sequence_of(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")
