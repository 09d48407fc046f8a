"""Stores under test, on a real disk or in a real Redis: tests open, close and damage them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import lmdb
import msgspec
from redis_process import RedisProcess

from tidegate.messages import Leased, Record
from tidegate.queues.definition import Definition, parse_settings
from tidegate.queues.records import decode_record, seal, unseal
from tidegate.queues.store import Entry, Store
from tidegate.queues.stores.layout import KEY
from tidegate.queues.stores.lmdb_store import LmdbStore
from tidegate.queues.stores.redis_store import RedisStore

LONG_S = 600.0
PATIENCE_S = 60.0


class World(Protocol):
    """The place where stores keep their queues while they are closed."""

    def make(self) -> Store:
        """Returns a store that is not open yet."""

    def spoil(self, queue: str, sequence: int) -> None:
        """Overwrites a record of physical queue 0 with garbage. No store may be open."""

    def kept_aside(self, queue: str) -> list[bytes]:
        """Returns the records that were set aside from physical queue 0. No store may be open."""

    def jump(self, queue: str, seconds: float) -> None:
        """Makes the clock of physical queue 0 jump."""


@dataclass
class LmdbWorld:
    """Stores in LMDB. A store uses the monotonic clock of its process, so a jump moves the origin of that clock."""

    directory: Path
    offset_s: float = 0.0

    def make(self) -> Store:
        offset_s = self.offset_s
        return LmdbStore(self.directory, clock=lambda: time.monotonic() + offset_s)

    def jump(self, queue: str, seconds: float) -> None:
        self.offset_s += seconds

    def spoil(self, queue: str, sequence: int) -> None:
        with lmdb.open(str(self._path), max_dbs=16) as environment:
            key = KEY.pack(self._number(environment, queue), 0, sequence)
            with environment.begin(write=True, db=environment.open_db(b"messages")) as transaction:
                transaction.replace(key, b"garbage")

    def kept_aside(self, queue: str) -> list[bytes]:
        with (
            lmdb.open(str(self._path), max_dbs=16) as environment,
            environment.begin(db=environment.open_db(b"aside")) as transaction,
        ):
            return [bytes(value) for _key, value in transaction.cursor()]

    @property
    def _path(self) -> Path:
        return self.directory / "queues" / "fsync"

    def _number(self, environment: lmdb.Environment, queue: str) -> int:
        with environment.begin(db=environment.open_db(b"queues")) as transaction:
            stored = msgspec.msgpack.decode(transaction.get(queue.encode(), b"")[:-4])  # a checksum follows it
        return int(stored["number"])


@dataclass
class RedisWorld:
    process: RedisProcess

    def make(self) -> Store:
        return RedisStore(self.process.url)

    def jump(self, queue: str, seconds: float) -> None:
        """Moves the time of the last request back. Redis stores this time, so the clock appears to jump forward."""
        counters = f"{{{queue}:0}}:c"
        with self.process.client() as client:
            if client.hexists(counters, "seen"):
                client.hincrby(counters, "seen", -int(1e6 * seconds))

    def spoil(self, queue: str, sequence: int) -> None:
        """Overwrites a record by rewriting its stream, because entries of a stream cannot be changed."""
        stream = f"{{{queue}:0}}:s"
        with self.process.client() as client:
            entries = client.xrange(stream)
            client.delete(stream)
            for id_, fields in entries:
                is_it = id_ == b"%d-0" % sequence
                client.xadd(stream, fields | ({b"r": b"garbage"} if is_it else {}), id=id_)

    def kept_aside(self, queue: str) -> list[bytes]:
        with self.process.client() as client:
            return list(client.hvals(f"{{{queue}:0}}:x"))


@asynccontextmanager
async def opened(world: World) -> AsyncIterator[Store]:
    store = world.make()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def with_queue(world: World, **settings: Any) -> AsyncIterator[Store]:
    """Yields an open store with a queue `q`, by default of one physical queue."""
    async with opened(world) as store:
        await store.define(Definition("q", parse_settings({"physical_queues": 1} | settings)))
        yield store


def entry(body: Any, group: str = "", identity: bytes = b"", age_s: float = 0.0) -> Entry:
    raw = msgspec.Raw(msgspec.msgpack.encode(body))
    return Entry(seal(Record(group, time.time() - age_s, raw)), group, identity)


async def put(store: Store, *bodies: Any, group: str = "", queue: str = "q", physical: int = 0) -> None:
    await store.queue(queue).enqueue({physical: [entry(body, group) for body in bodies]})


async def take(
    store: Store, count: int = 100, visibility_s: float = LONG_S, *, queue: str = "q", physical: int = 0
) -> list[Leased]:
    return (await store.queue(queue).lease(physical, count, 1 << 30, visibility_s)).leased


def body_of(sealed: bytes) -> Any:
    return msgspec.msgpack.decode(record_of(sealed).body)


def bodies(leased: list[Leased]) -> list[Any]:
    return [msgspec.msgpack.decode(decode_record(each.record).body) for each in leased]


def receipts(leased: list[Leased]) -> list[str]:
    return [each.receipt for each in leased]


def record_of(sealed: bytes) -> Record:
    body = unseal(sealed)
    assert body is not None
    return decode_record(body)


async def eventually(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Waits until the condition holds. Background work of a store is done soon."""
    async with asyncio.timeout(PATIENCE_S):
        while not await is_so():
            await asyncio.sleep(0.005)
