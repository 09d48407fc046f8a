"""The shared store: physical queues in Redis Streams, for several brokers, which may start and stop at any time.

Brokers hold no durable state: sequences, leases, delivery counts and identities are in Redis, and every decision is one
script there (`redis_scripts` has the layout). So nothing is lost when a broker dies, and its leases end by Redis's
clock. Each physical queue has an equal part of the queue's bound, since no script may access two of them.

The durability of an acknowledgement depends on Redis's append-only file. A queue that demands more is refused.
Definitions are one hash; a stream reports changes to the other brokers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from tidegate.errors import ConfigError, QueueError, TidegateError, Unavailable
from tidegate.queues.definition import DEAD, Definition, Durability, QueueSettings, check_change
from tidegate.queues.store import durability_rank, no_such_queue
from tidegate.queues.stores.redis_link import RedisLink
from tidegate.queues.stores.redis_listener import RECONNECT_S
from tidegate.queues.stores.redis_queue import READS, RedisQueue
from tidegate.queues.stores.redis_scripts import BLOCK_MS, DEFINE

log = logging.getLogger(__name__)

QUEUES: Final = "tidegate:queues"
CHANGES: Final = "tidegate:changes"
CHANGES_KEPT: Final = 1000
CANCEL_AGAIN_S: Final = 0.2
_REMEDIES: Final = {
    "fsync": "set appendonly yes and appendfsync always in redis.conf",
    "os": "set appendonly yes in redis.conf",
}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Definition).decode


class RedisStore:
    """Guarantees: a message whose enqueue has returned stays available until it is deleted, and is leased to one
    consumer at a time, at whichever broker. For one event loop only. Fails with U707 while Redis is unavailable, and
    continues when it is back."""

    is_shared = True
    cover_bytes = 0  # the covers are in Redis

    def __init__(self, url: str, password: str = "") -> None:
        self._link = RedisLink(url, password=password)
        self._queues: dict[str, RedisQueue] = {}
        self._durability: Durability = "memory"
        self._last_change = b"0-0"
        self._watching: asyncio.Task[None] | None = None

    # Definitions.

    async def open(self) -> list[Definition]:
        self._durability = await self._link.open()
        # Changes from here on arrive through the stream; earlier ones are in the definitions that are read next.
        newest = await self._link.command("XREVRANGE", CHANGES, "+", "-", "COUNT", 1)
        self._last_change = newest[0][0] if newest else b"0-0"
        kept = await self._link.command("HGETALL", QUEUES)
        for name in sorted(kept):
            self._use(_parse(name.decode(), kept[name]))
        return [queue.definition for queue in self._queues.values()]

    async def close(self) -> None:
        # While it connects, redis-py may mistake a cancellation for its own time-out, and continue.
        while self._watching is not None and not self._watching.done():
            self._watching.cancel()
            await asyncio.wait([self._watching], timeout=CANCEL_AGAIN_S)
        for queue in self._queues.values():
            queue.stop()
        await self._link.close()

    async def define(self, definition: Definition) -> Definition:
        """Compares and sets: two brokers may define the same queue at once, with different settings."""
        name = definition.name
        while True:
            kept = await self._link.command("HGET", QUEUES, name)
            before = _parse(name, kept) if kept is not None else None
            id_ = before.id if before is not None else definition.id
            chosen = Definition(name, self._with_durability(definition, before), id_)
            if before is not None:
                check_change(before, chosen.settings)
            if await self._link.run(DEFINE, [QUEUES], name, kept or b"", _encode(chosen)):
                break
        await self._announce_change(name)
        self._use(chosen)
        return chosen

    async def drop(self, name: str) -> None:
        state, dead = self.queue(name), self.queue(name + DEAD)
        await self._link.command("HDEL", QUEUES, name)
        await self._link.command("HDEL", READS, name)
        await self._announce_change(name)
        self._forget(name)
        for keys, dead_keys in zip(state.keys, dead.keys, strict=True):
            await self._link.command("UNLINK", *keys, *dead_keys)

    def watch_definitions(self, changed: Callable[[str, Definition | None], Awaitable[None]]) -> None:
        self._watching = self._link.start(self._watch(changed))

    def queue(self, name: str) -> RedisQueue:
        queue = self._queues.get(name)
        if queue is None:
            raise no_such_queue(name)
        return queue

    def trouble(self) -> TidegateError | None:
        return None  # Redis accepts or refuses each enqueue separately

    # Internals.

    def _with_durability(self, definition: Definition, before: Definition | None) -> QueueSettings:
        wanted = definition.settings.durability
        if wanted is None:
            kept = before.settings.durability if before is not None else self._durability
            return msgspec.structs.replace(definition.settings, durability=kept)
        if durability_rank(wanted) > durability_rank(self._durability):
            raise QueueError(
                "Q910",
                f"queue {definition.name!r} wants durability = {wanted}, but this Redis offers {self._durability}",
                f"{_REMEDIES[wanted]}, or choose {self._durability}",
            )
        return definition.settings

    def _use(self, definition: Definition) -> None:
        for each in (definition, definition.dead_letters()):
            known = self._queues.get(each.name)
            if known is None:
                self._queues[each.name] = RedisQueue(self._link, each)
            else:
                known.definition = each

    def _forget(self, name: str) -> None:
        for each in (name, name + DEAD):
            queue = self._queues.pop(each, None)
            if queue is not None:
                queue.stop()

    async def _announce_change(self, name: str) -> None:
        await self._link.command("XADD", CHANGES, "MAXLEN", "~", CHANGES_KEPT, "*", "name", name)

    async def _watch(self, changed: Callable[[str, Definition | None], Awaitable[None]]) -> None:
        was_away = False
        while True:
            try:
                if was_away:
                    await self._restore_definitions()
                was_away = False
                await self._next_change(changed)
            except Unavailable as error:
                was_away = True
                log.warning("changes of queues are not received, trying again: %s", error)
                await asyncio.sleep(RECONNECT_S)
            except TidegateError as error:
                log.warning("a change of a queue cannot be applied: %s", error)

    async def _restore_definitions(self) -> None:
        """Writes the definitions again after Redis has lost them. A Redis without a file restarts empty, but the
        running brokers know its queues."""
        if await self._link.command("EXISTS", CHANGES):
            return
        for name, queue in list(self._queues.items()):
            if not name.endswith(DEAD):
                await self._link.command("HSETNX", QUEUES, name, _encode(queue.definition))

    async def _next_change(self, changed: Callable[[str, Definition | None], Awaitable[None]]) -> None:
        found = await self._link.read_blocked(CHANGES, self._last_change, BLOCK_MS)
        for id_, fields in found[0][1] if found else ():
            name = fields[b"name"].decode()
            kept = await self._link.command("HGET", QUEUES, name)
            self._last_change = id_
            await self._on_change(name, _parse(name, kept) if kept is not None else None, changed)

    async def _on_change(
        self,
        name: str,
        definition: Definition | None,
        changed: Callable[[str, Definition | None], Awaitable[None]],
    ) -> None:
        """Applies a change. A queue that was dropped and created again with another number of physical queues starts
        anew."""
        known = self._queues.get(name)
        is_other = known is not None and (definition is None or len(known.keys) != definition.settings.physical_queues)
        if is_other:
            self._forget(name)
            await changed(name, None)
        if definition is not None:
            self._use(definition)
            await changed(name, definition)


def _parse(name: str, kept: bytes) -> Definition:
    try:
        return _decode(kept)
    except msgspec.DecodeError as error:
        raise ConfigError(
            "C415",
            f"the settings of queue {name!r} in Redis cannot be read: {error}",
            "update this broker, or drop the queue",
        ) from error
