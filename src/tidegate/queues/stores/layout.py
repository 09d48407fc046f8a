"""How queues lie in LMDB: keys that sort as the queues are read, so that a range read is one walk of a cursor.

| database | key | value |
|---|---|---|
| queues | name | number, settings |
| messages | queue, physical queue, sequence | sealed record |
| counters | queue, physical queue | next sequence, messages, bytes, delivered below |
| deliveries | as messages | how often delivered, where that is more than once |
| identities | queue, physical queue, time, sequence | digests of what a commit brought |
| marks | queue, physical queue, digest of a producer | number of its last batch, time |
| aside | as messages | what was there in place of a record |

Numbers in keys are big-endian. A number of a queue is never used again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import lmdb

from tidegate.queues.stores.group_commit import GroupCommit

PREFIX: Final = struct.Struct(">IH")
KEY: Final = struct.Struct(">IHQ")
IDENTITY_KEY: Final = struct.Struct(">IHQQ")
IDENTITY_BYTES: Final = 16
_COUNTERS: Final = struct.Struct("<QQQQ")
_DELIVERIES: Final = struct.Struct("<I")
_MARK: Final = struct.Struct("<QQ")


class Counters(NamedTuple):
    """What must be known of a physical queue without reading its messages."""

    next: int = 1
    messages: int = 0
    size_bytes: int = 0
    delivered_below: int = 0


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
        self.aside = self.commit.open_database("aside")

    def read_counters(self, transaction: lmdb.Transaction, prefix: bytes) -> Counters:
        value = transaction.get(prefix, db=self.counters)
        return Counters() if value is None else Counters(*_COUNTERS.unpack(value))

    def add_to_counters(
        self, transaction: lmdb.Transaction, prefix: bytes, messages: int, size_bytes: int, next_: int, delivered: int
    ) -> None:
        """Differences, not values: a group that fails must not leave its traces in the ones after it."""
        now = self.read_counters(transaction, prefix)
        value = _COUNTERS.pack(
            max(now.next, next_),
            now.messages + messages,
            now.size_bytes + size_bytes,
            max(now.delivered_below, delivered),
        )
        transaction.put(prefix, value, db=self.counters)

    def write_deliveries(self, transaction: lmdb.Transaction, key: bytes, deliveries: int) -> None:
        transaction.put(key, _DELIVERIES.pack(deliveries), db=self.deliveries)

    def read_deliveries(self, transaction: lmdb.Transaction, prefix: bytes) -> dict[int, int]:
        cursor = transaction.cursor(db=self.deliveries)
        found: dict[int, int] = {}
        is_there = cursor.set_range(prefix)
        while is_there and key_of(cursor).startswith(prefix):
            found[KEY.unpack(cursor.key())[2]] = _DELIVERIES.unpack(cursor.value())[0]
            is_there = cursor.next()
        return found

    def remove(self, transaction: lmdb.Transaction, key: bytes, *, was_redelivered: bool) -> int:
        """A message and what is known of it; its size, or 0 when it was not there."""
        value = transaction.pop(key, db=self.messages)
        if was_redelivered:
            transaction.delete(key, db=self.deliveries)
        return 0 if value is None else len(value)

    def remove_all(self, transaction: lmdb.Transaction, entries: list[tuple[bytes, bool]]) -> int:
        """The same for many, with whether each was redelivered. A cursor stands behind what it has deleted, and need
        not search for a neighbour: what is leased together is mostly deleted together."""
        size_bytes = 0
        cursor = transaction.cursor(db=self.messages)
        for key, was_redelivered in entries:
            if key_of(cursor) == key or cursor.set_key(key):
                size_bytes += len(value_of(cursor))
                cursor.delete()
            if was_redelivered:
                transaction.delete(key, db=self.deliveries)
        return size_bytes

    def remove_below(self, transaction: lmdb.Transaction, prefix: bytes, below: bytes) -> tuple[int, int]:
        """Messages of a physical queue with keys below one, and what is known of them: how many, and their bytes."""
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
        """Keeps what a commit brings, and drops what is too old to matter."""
        cursor = transaction.cursor(db=self.identities)
        is_there = cursor.set_range(prefix)
        while is_there and key_of(cursor) < below:
            is_there = delete_here(cursor)
        cursor.put(key, identities)

    def read_identities(self, transaction: lmdb.Transaction, prefix: bytes, since_s: float) -> dict[bytes, float]:
        """Those that came since then, oldest first, and when they came."""
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

    def write_mark(self, transaction: lmdb.Transaction, key: bytes, number: int, now_s: float) -> None:
        transaction.put(key, _MARK.pack(number, int(1000 * now_s)), db=self.marks)

    def forget_mark(self, transaction: lmdb.Transaction, key: bytes) -> None:
        transaction.delete(key, db=self.marks)

    def read_mark(self, transaction: lmdb.Transaction, key: bytes) -> int:
        """The number of a producer's last batch; 0 when it has none here."""
        value = transaction.get(key, db=self.marks)
        return 0 if value is None else int(_MARK.unpack(value)[0])

    def read_marks(self, transaction: lmdb.Transaction, prefix: bytes) -> dict[bytes, int]:
        """Producers and the numbers of their last batches, those that came last at the end."""
        found: list[tuple[int, bytes, int]] = []
        cursor = transaction.cursor(db=self.marks)
        is_there = cursor.set_range(prefix)
        while is_there and key_of(cursor).startswith(prefix):
            number, came_ms = _MARK.unpack(value_of(cursor))
            found.append((came_ms, key_of(cursor)[len(prefix) :], number))
            is_there = cursor.next()
        return {producer: number for _came_ms, producer, number in sorted(found)}

    def clear(self, transaction: lmdb.Transaction, prefix: bytes, entries_max: int) -> bool:
        """Removes what there is of a physical queue, some entries at a time; false when more is left."""
        left = entries_max
        for database in (self.messages, self.deliveries, self.identities, self.marks, self.aside):
            cursor = transaction.cursor(db=database)
            is_there = cursor.set_range(prefix)
            while is_there and key_of(cursor).startswith(prefix):
                if not left:
                    return False
                left -= 1
                is_there = delete_here(cursor)
        transaction.delete(prefix, db=self.counters)
        return True


def delete_here(cursor: lmdb.Cursor) -> bool:
    """Deletes where the cursor stands and goes on; false when that was the last entry, which `delete` does not tell."""
    return cursor.delete() and bool(cursor.key())


def key_of(cursor: lmdb.Cursor) -> bytes:
    """Transactions here give bytes, not views."""
    return cast(bytes, cursor.key())


def value_of(cursor: lmdb.Cursor) -> bytes:
    return cast(bytes, cursor.value())


def sequence_of(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")
