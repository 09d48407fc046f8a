"""Stores to test, really on a disk or in a Redis of their own: opened, closed and spoilt as a test wants."""

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

from tidegate.messages import Record
from tidegate.queues.definition import Definition, parse_settings
from tidegate.queues.records import decode_record, seal, unseal
from tidegate.queues.store import Entry, Grant, Store
from tidegate.queues.stores.layout import KEY
from tidegate.queues.stores.lmdb_store import LmdbStore
from tidegate.queues.stores.redis_store import RedisStore

LONG_S = 600.0
PATIENCE_S = 20.0


class World(Protocol):
    """Where stores keep their queues between one opening and the next."""

    def make(self) -> Store:
        """A store that is not open yet."""

    def spoil(self, queue: str, sequence: int) -> None:
        """Writes garbage in place of a record of physical queue 0; no store is open."""

    def kept_aside(self, queue: str) -> list[bytes]:
        """What lies beside physical queue 0; no store is open."""


@dataclass
class LmdbWorld:
    directory: Path

    def make(self) -> Store:
        return LmdbStore(self.directory)

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
            stored = msgspec.msgpack.decode(transaction.get(queue.encode(), b""))
        return int(stored["number"])


@dataclass
class RedisWorld:
    process: RedisProcess

    def make(self) -> Store:
        return RedisStore(self.process.url)

    def spoil(self, queue: str, sequence: int) -> None:
        """Entries of a stream cannot be changed: it is written anew."""
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
    """An open store with a queue `q` of one physical queue, if not told otherwise."""
    async with opened(world) as store:
        await store.define(Definition("q", parse_settings({"physical_queues": 1} | settings)))
        yield store


def entry(body: Any, group: str = "", identity: bytes = b"") -> Entry:
    raw = msgspec.Raw(msgspec.msgpack.encode(body))
    return Entry(seal(Record(group, time.time(), raw)), group, identity)


async def put(store: Store, *bodies: Any, group: str = "", queue: str = "q", physical: int = 0) -> None:
    await store.enqueue(queue, {physical: [entry(body, group) for body in bodies]})


async def take(
    store: Store, count: int = 100, visibility_s: float = LONG_S, *, queue: str = "q", physical: int = 0
) -> list[Grant]:
    return (await store.lease(queue, physical, count, 1 << 30, visibility_s)).grants


def body_of(sealed: bytes) -> Any:
    return msgspec.msgpack.decode(record_of(sealed).body)


def bodies(grants: list[Grant]) -> list[Any]:
    return [body_of(grant.sealed) for grant in grants]


def receipts(grants: list[Grant]) -> list[str]:
    return [grant.receipt for grant in grants]


def record_of(sealed: bytes) -> Record:
    body = unseal(sealed)
    assert body is not None
    return decode_record(body)


async def eventually(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Waits until it is so; what a store does in the background is soon done."""
    async with asyncio.timeout(PATIENCE_S):
        while not await is_so():
            await asyncio.sleep(0.005)
