"""The registry of one machine: subscriptions in LMDB, in a directory that all its processes have open.

| database | key | value |
|---|---|---|
| subscriptions | id, 8 bytes big-endian | version, 8 bytes big-endian, and packed filter |
| fenced | name of a writer | empty |

LMDB lets one process write at a time, and syncs a commit before it returns; readers block no writer. A write that reads
`fenced` in its own transaction is therefore atomic with the fence, and a read that begins after a commit finds it.

What may go wrong here: the map is full (it is doubled, and the write repeated), or another process has enlarged it (the
new size is adopted); the disk is full or fails (U721); the file is damaged or truncated (C448, when it is opened); a
process is killed (its uncommitted changes are lost, LMDB frees its lock, and the next process that opens the registry
frees its reader slots).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import lmdb

from tidegate.cluster.registry.registry import fenced, ids_of, in_parts, keys_of, newest, registry_failed, share_of
from tidegate.errors import ConfigError
from tidegate.layers.control import Entry, Transaction
from tidegate.layers.frames import Change
from tidegate.layers.subscription_table import CONNECTION_POINT_SHIFT
from tidegate.queues.stores.inspection import check_shared
from tidegate.security.private_files import FILE_MODE, private_directory
from tidegate.storage.lmdb_cursor import delete_here, key_of

MAP_BYTES: Final = 1024**3
# Ids that a transaction reads, or entries that it removes. This takes some milliseconds, in which other calls of this
# process wait and old pages of the file cannot be reused.
IDS_AT_ONCE: Final = 10_000
_NUMBER: Final = struct.Struct(">Q")

T = TypeVar("T")


class LmdbRegistry:
    """Keeps the promises in `registry`, even after a power failure. A process may open a directory only once."""

    def __init__(self, directory: Path, *, map_bytes: int = MAP_BYTES) -> None:
        self._directory = directory
        self._map_bytes = map_bytes
        # One thread runs all calls in order, even if a waiting caller is cancelled, and no transaction is open while
        # the map is enlarged.
        self._thread = ThreadPoolExecutor(1, "tidegate-registry")

    async def open(self) -> None:
        await self._call(self._open)

    async def close(self) -> None:
        await self._call(self._environment.close)
        self._thread.shutdown()

    async def change(self, writer: str, changes: list[Change]) -> None:
        await self._write(partial(self._change, writer, newest(changes)))

    async def fence(self, dead: frozenset[str]) -> None:
        def write(transaction: lmdb.Transaction) -> None:
            for name in dead:
                transaction.put(name.encode(), b"", db=self._fenced)

        await self._write(write)

    def read_share(self, transaction: Transaction, matcher: str) -> AsyncIterator[list[Entry]]:
        return in_parts(self._pages(transaction, matcher))

    async def forget(self, connection_point: int) -> None:
        while await self._write(partial(self._forget_some, connection_point)) == IDS_AT_ONCE:
            pass

    async def subscriptions(self) -> int:
        def count(transaction: lmdb.Transaction) -> int:
            return int(transaction.stat(self._subscriptions)["entries"])

        return await self._read(count)

    async def _pages(self, transaction: Transaction, matcher: str) -> AsyncIterator[list[Entry]]:
        first: int | None = 0
        while first is not None:
            page, first = await self._read(partial(self._page, first, transaction, matcher))
            yield page

    # In the thread.

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (lmdb.Error, OSError) as error:
            raise registry_failed(f"{self._directory}: {error}") from error

    async def _read(self, work: Callable[[lmdb.Transaction], T]) -> T:
        return await self._call(partial(self._transact, work, write=False))

    async def _write(self, work: Callable[[lmdb.Transaction], T]) -> T:
        return await self._call(partial(self._transact, work, write=True))

    def _transact(self, work: Callable[[lmdb.Transaction], T], *, write: bool) -> T:
        while True:
            try:
                with self._environment.begin(write=write) as transaction:
                    return work(transaction)
            except lmdb.MapFullError:
                self._environment.set_mapsize(2 * self._environment.info()["map_size"])
            except lmdb.MapResizedError:
                self._environment.set_mapsize(0)  # adopts the size that the other process has set

    def _open(self) -> None:
        try:
            private_directory(self._directory)
            self._environment = lmdb.open(
                str(self._directory), map_size=self._map_bytes, max_dbs=2, readahead=False, mode=FILE_MODE
            )
            self._environment.reader_check()
            if problems := check_shared(self._environment, self._directory):
                self._environment.close()
                raise damaged(self._directory, problems)
            self._subscriptions = self._transact(partial(self._environment.open_db, b"subscriptions"), write=True)
            self._fenced = self._transact(partial(self._environment.open_db, b"fenced"), write=True)
        except (lmdb.Error, OSError) as error:
            raise ConfigError(
                "C441",
                f"the registry in {self._directory} cannot be opened: {error}",
                "use a local directory that this user may write to, and open it once per process",
            ) from error

    def _change(self, writer: str, changes: list[Change], transaction: lmdb.Transaction) -> None:
        if transaction.get(writer.encode(), db=self._fenced) is not None:
            raise fenced(writer)
        for change in changes:
            key = _NUMBER.pack(change.subscription)
            kept = transaction.get(key, db=self._subscriptions)
            if kept is not None and change.version <= _NUMBER.unpack_from(kept)[0]:
                continue
            if change.filter is not None:
                transaction.put(key, _NUMBER.pack(change.version) + change.filter, db=self._subscriptions)
            elif kept is not None:
                transaction.delete(key, db=self._subscriptions)

    def _page(
        self, first: int, wanted: Transaction, matcher: str, transaction: lmdb.Transaction
    ) -> tuple[list[Entry], int | None]:
        """Returns the entries of the share among the next ids, and the first id after them; None at the end."""
        cursor = transaction.cursor(db=self._subscriptions)
        if not cursor.set_range(_NUMBER.pack(first)):
            return [], None
        ids = ids_of(b"".join(islice(cursor.iternext(values=False), IDS_AT_ONCE)))
        mine = share_of(ids, wanted, matcher)
        entries = []
        for subscription, key in zip(mine.tolist(), keys_of(mine), strict=True):
            value = transaction.get(key, b"", db=self._subscriptions)
            entries.append(Entry(subscription, _NUMBER.unpack_from(value)[0], bytes(value[_NUMBER.size :])))
        return entries, int(ids[-1]) + 1 if len(ids) == IDS_AT_ONCE else None

    def _forget_some(self, connection_point: int, transaction: lmdb.Transaction) -> int:
        """Removes some subscriptions of a Connection Point, and returns how many. Fewer than IDS_AT_ONCE means that
        none are left."""
        end = _NUMBER.pack((connection_point + 1) << CONNECTION_POINT_SHIFT)
        cursor = transaction.cursor(db=self._subscriptions)
        is_there = cursor.set_range(_NUMBER.pack(connection_point << CONNECTION_POINT_SHIFT))
        count = 0
        while is_there and key_of(cursor) < end and count < IDS_AT_ONCE:
            count += 1
            is_there = delete_here(cursor)
        return count


def damaged(directory: Path, problems: list[str]) -> ConfigError:
    return ConfigError(
        "C448",
        f"the registry in {directory} is damaged: {problems[0]}",
        "restore it; or stop the cluster and remove the directory: clients that reconnect subscribe again",
    )
