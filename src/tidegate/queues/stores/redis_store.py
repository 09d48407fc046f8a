"""The shared store: physical queues in Redis Streams, for several brokers and those that come and go.

Brokers keep nothing that matters: sequences, leases, delivery counts and identities are in Redis, and every decision is
one script there (`redis_scripts` has the layout). So a broker that dies takes nothing with it, and its leases end by
Redis's clock. A bound of a queue holds for each of its physical queues in equal parts, since no script may look at two.

What an acknowledgement means is what Redis was told to do with its append-only file; a queue that demands more is
refused. Definitions are one hash; a stream tells the other brokers of changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tidegate.errors import ConfigError, QueueError, TidegateError, Unavailable
from tidegate.messages import PAGE_BYTES_MAX, Level
from tidegate.queues.dead_letters import to_dead_letter
from tidegate.queues.definition import DEAD, Definition, Durability, QueueSettings, check_change
from tidegate.queues.records import decode_record, unseal
from tidegate.queues.store import (
    SUSPECT_AFTER,
    Entry,
    Grant,
    Granted,
    Numbered,
    OnReady,
    Receipt,
    SealedPage,
    StoreCounts,
    durability_rank,
    no_such_queue,
    queue_full,
)
from tidegate.queues.stores.redis_link import RedisLink
from tidegate.queues.stores.redis_listener import RECONNECT_S, Listener
from tidegate.queues.stores.redis_scripts import (
    BLOCK_MS,
    DEFINE,
    DELETE_BELOW,
    END_LEASES,
    ENQUEUE,
    HAS,
    KEYS,
    LEASE,
    LEVEL,
    REDRIVE,
    SET_ASIDE,
    SETTLE,
    STEP_MESSAGES_MAX,
)

log = logging.getLogger(__name__)

QUEUES: Final = "tidegate:queues"
CHANGES: Final = "tidegate:changes"
CHANGES_KEPT: Final = 1000
READ_MESSAGES: Final = 256
_CURES: Final = {
    "fsync": "set appendonly yes and appendfsync always in redis.conf",
    "os": "set appendonly yes in redis.conf",
}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Definition).decode


@dataclass
class _Queue:
    """A logical queue as this process knows it; `keys` and `listeners` of each physical queue."""

    definition: Definition
    keys: list[list[str]]
    listeners: list[Listener]
    counts: StoreCounts = field(default_factory=StoreCounts)
    on_ready: OnReady | None = None

    @property
    def settings(self) -> QueueSettings:
        return self.definition.settings

    @property
    def messages_max(self) -> int:
        return -(-self.settings.messages_max // len(self.keys))

    @property
    def bytes_max(self) -> int:
        return -(-self.settings.bytes_max // len(self.keys))

    def tell(self, physical: int, waiting: int) -> None:
        if self.on_ready is not None and waiting > 0:
            self.on_ready(physical, waiting)


class RedisStore:
    """Guarantees: what an enqueue has returned for is leased until it is deleted, to one consumer at a time, whichever
    broker it asks. Only for one event loop. Fails with U707 while Redis is away, and goes on when it is back."""

    is_shared = True

    def __init__(self, url: str) -> None:
        self._link = RedisLink(url)
        self._queues: dict[str, _Queue] = {}
        self._durability: Durability = "memory"
        self._last_change = b"0-0"
        self._watching: asyncio.Task[None] | None = None

    # Definitions.

    async def open(self) -> list[Definition]:
        self._durability = await self._link.open()
        # Changes from here on are told; those before are in what is read now.
        newest = await self._link.command("XREVRANGE", CHANGES, "+", "-", "COUNT", 1)
        self._last_change = newest[0][0] if newest else b"0-0"
        kept = await self._link.command("HGETALL", QUEUES)
        for name in sorted(kept):
            self._use(_parse(name.decode(), kept[name]))
        return [queue.definition for queue in self._queues.values()]

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for queue in self._queues.values():
            _stop(queue)
        await self._link.close()

    async def define(self, definition: Definition) -> Definition:
        """Compares and sets: two brokers may define the same queue at once, and differ."""
        name, settings = definition.name, definition.settings
        if settings.filter is not None and not settings.deduplication_s:
            raise QueueError(
                "Q918",
                f"queue {name!r} is bound to a filter with deduplication_s = 0",
                "brokers that share a store all feed it, and know by that what is there: give it, say, 300",
            )
        while True:
            kept = await self._link.command("HGET", QUEUES, name)
            before = _parse(name, kept) if kept is not None else None
            id_ = before.id if before is not None else definition.id
            chosen = Definition(name, self._with_durability(definition, before), id_)
            if before is not None:
                check_change(before, chosen.settings)
            if await self._link.run(DEFINE, [QUEUES], name, kept or b"", _encode(chosen)):
                break
        await self._tell_of_change(name)
        self._use(chosen)
        return chosen

    async def drop(self, name: str) -> None:
        state, dead = self._queue(name), self._queue(name + DEAD)
        await self._link.command("HDEL", QUEUES, name)
        await self._tell_of_change(name)
        self._forget(name)
        for keys, dead_keys in zip(state.keys, dead.keys, strict=True):
            await self._link.command("UNLINK", *keys, *dead_keys)

    def watch_definitions(self, changed: Callable[[str, Definition | None], Awaitable[None]]) -> None:
        self._watching = self._link.start(self._watch(changed))

    # Messages.

    async def enqueue(
        self,
        queue: str,
        batches: dict[int, list[Entry]],
        *,
        make_room: bool = False,
        numbered: Numbered | None = None,
    ) -> int:
        state = self._queue(queue)
        settings = state.settings
        limits = (
            state.messages_max,
            state.bytes_max,
            int(1e6 * settings.deduplication_s),
            settings.deduplication_messages_max,
            int(make_room),
            *(numbered or (b"", 0)),
        )
        calls = [
            (state.keys[physical], [*limits, *(part for entry in entries for part in entry)])
            for physical, entries in batches.items()
        ]
        replies = await self._link.run_each(ENQUEUE, calls)
        duplicates = 0
        refused: TidegateError | None = None
        for (physical, entries), (status, *numbers) in zip(batches.items(), replies, strict=True):
            if status:
                state.counts.refused += len(entries)
                refused = _full(state, status, numbers[0])
                continue
            repeated, dropped, waiting = numbers
            duplicates += repeated
            state.counts.enqueued += len(entries) - repeated
            state.counts.dropped += dropped
            state.tell(physical, waiting)
        state.counts.duplicates += duplicates
        if refused is not None:
            raise refused
        return duplicates

    async def has(self, queue: str, batches: dict[int, list[Entry]]) -> bool:
        state = self._queue(queue)
        calls = [
            (state.keys[physical], [int(1e6 * state.settings.deduplication_s), *(entry.identity for entry in entries)])
            for physical, entries in batches.items()
        ]
        return all(await self._link.run_each(HAS, calls))

    async def lease(self, queue: str, physical: int, messages_max: int, bytes_max: int, visibility_s: float) -> Granted:
        """What is leased to a caller who is cancelled meanwhile is given back."""
        state = self._queue(queue)
        leasing = self._link.start(self._lease(state, physical, messages_max, bytes_max, visibility_s))
        try:
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            self._link.start(self._return(queue, leasing))
            raise

    async def delete(self, queue: str, receipts: list[str]) -> int:
        done = await self._settle(queue, "delete", receipts, 0.0)
        self._queue(queue).counts.deleted += done
        return done

    async def extend(self, queue: str, receipts: list[str], visibility_s: float) -> int:
        return await self._settle(queue, "extend", receipts, visibility_s)

    async def release(self, queue: str, receipts: list[str], delay_s: float) -> int:
        return await self._settle(queue, "release", receipts, delay_s)

    async def give_back(self, queue: str, receipts: list[str]) -> int:
        return await self._settle(queue, "return", receipts, 0.0)

    async def end_leases(self, queue: str) -> int:
        state = self._queue(queue)
        count = 0
        replies = await self._link.run_each(END_LEASES, [(keys, ()) for keys in state.keys])
        for physical, (expired, waiting) in enumerate(replies):
            count += expired
            state.tell(physical, waiting)
        state.counts.expired += count
        return count

    async def read(
        self, queue: str, physical: int, start: int, stop: int, messages_max: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> SealedPage:
        """In pages: how large messages are is seen when they are there."""
        state = self._queue(queue)
        stream = state.keys[physical][0]
        sequences: list[int] = []
        records: list[bytes] = []
        while messages_max > 0 and bytes_max > 0 and stop > max(1, start):
            count = min(messages_max, READ_MESSAGES)
            page = await self._link.command("XRANGE", stream, f"{start}-0", f"({stop}-0", "COUNT", count)
            for id_, fields in page:
                sealed = self._record(queue, fields)
                bytes_max -= len(sealed)
                if bytes_max < 0 and records:
                    break
                sequences.append(int(id_.split(b"-")[0]))
                records.append(sealed)
            if len(page) < count:
                break
            messages_max -= count
            start = sequences[-1] + 1
        return SealedPage(sequences, [len(sealed) for sealed in records], b"".join(records))

    async def delete_below(self, queue: str, physical: int, sequence: int) -> int:
        """In steps; one that fails leaves the later messages where they were."""
        state = self._queue(queue)
        count = 0
        while True:
            gone: int = await self._link.run(DELETE_BELOW, state.keys[physical], sequence, STEP_MESSAGES_MAX)
            count += gone
            state.counts.deleted += gone
            if gone < STEP_MESSAGES_MAX:
                return count

    async def set_aside(self, queue: str, physical: int, sequence: int) -> None:
        state = self._queue(queue)
        state.counts.corrupt += await self._link.run(SET_ASIDE, state.keys[physical], sequence)

    async def redrive(self, queue: str, messages_max: int) -> int:
        """In steps; a full queue ends it."""
        state = self._queue(queue)
        moved = 0
        for keys, dead_keys in zip(state.keys, self._queue(queue + DEAD).keys, strict=True):
            behind = 0
            while moved < messages_max and behind >= 0:
                count_max = min(STEP_MESSAGES_MAX, messages_max - moved)
                limits = (behind, count_max, state.messages_max, state.bytes_max)
                status, *numbers = await self._link.run(REDRIVE, [*keys, *dead_keys], *limits)
                if status:
                    raise _full(state, status, numbers[0])
                moved += numbers[0]
                behind = numbers[1]
        return moved

    # Looking.

    async def levels(self, queue: str) -> list[Level]:
        state = self._queue(queue)
        levels = []
        for reply in await self._link.run_each(LEVEL, [(keys, ()) for keys in state.keys]):
            messages, size_bytes, waiting, leased, next_, expired, *head = reply
            state.counts.expired += expired
            first, oldest_at = next_, None
            if head:
                first, body = int(head[0]), unseal(head[1])
                oldest_at = decode_record(body).enqueued_at if body is not None else None
            levels.append(Level(messages, size_bytes, waiting, leased, oldest_at, first, next_))
        return levels

    def counts(self, queue: str) -> StoreCounts:
        return self._queue(queue).counts

    def watch(self, queue: str, on_ready: OnReady) -> None:
        self._queue(queue).on_ready = on_ready

    def listen(self, queue: str, *, is_on: bool) -> None:
        state = self._queues.get(queue)
        for listener in state.listeners if state is not None else ():
            if is_on:
                listener.turn_on()
            else:
                listener.turn_off()

    # Definitions, inside.

    def _queue(self, name: str) -> _Queue:
        queue = self._queues.get(name)
        if queue is None:
            raise no_such_queue(name)
        return queue

    def _with_durability(self, definition: Definition, before: Definition | None) -> QueueSettings:
        wanted = definition.settings.durability
        if wanted is None:
            kept = before.settings.durability if before is not None else self._durability
            return msgspec.structs.replace(definition.settings, durability=kept)
        if durability_rank(wanted) > durability_rank(self._durability):
            raise QueueError(
                "Q910",
                f"queue {definition.name!r} wants durability = {wanted}, and this Redis gives {self._durability}",
                f"{_CURES[wanted]}, or ask for {self._durability}",
            )
        return definition.settings

    def _use(self, definition: Definition) -> None:
        for each in (definition, definition.dead_letters()):
            known = self._queues.get(each.name)
            if known is None:
                self._queues[each.name] = self._make(each)
            else:
                known.definition = each

    def _make(self, definition: Definition) -> _Queue:
        keys = [_keys(definition.name, physical) for physical in range(definition.settings.physical_queues)]
        queue = _Queue(definition, keys, [])

        def tell_of(physical: int) -> Callable[[int, int], None]:
            def tell(waiting: int, expired: int) -> None:
                queue.counts.expired += expired
                queue.tell(physical, waiting)

            return tell

        queue.listeners = [Listener(self._link, each, tell_of(physical)) for physical, each in enumerate(keys)]
        return queue

    def _forget(self, name: str) -> None:
        for each in (name, name + DEAD):
            queue = self._queues.pop(each, None)
            if queue is not None:
                _stop(queue)

    async def _tell_of_change(self, name: str) -> None:
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
                log.warning("changes of queues are not heard of for now: %s", error)
                await asyncio.sleep(RECONNECT_S)
            except TidegateError as error:
                log.warning("a change of a queue is not followed: %s", error)

    async def _restore_definitions(self) -> None:
        """A Redis that keeps no file comes back with nothing; the brokers that were there before know of its queues."""
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
        """A queue that was dropped and made again in another shape begins anew."""
        known = self._queues.get(name)
        is_other = known is not None and (definition is None or len(known.keys) != definition.settings.physical_queues)
        if is_other:
            self._forget(name)
            await changed(name, None)
        if definition is not None:
            self._use(definition)
            await changed(name, definition)

    # Messages, inside.

    async def _lease(
        self, state: _Queue, physical: int, messages_max: int, bytes_max: int, visibility_s: float
    ) -> Granted:
        name, settings, keys = state.definition.name, state.settings, state.keys[physical]
        if state.definition.dead:
            keys = [*keys, *_keys(state.definition.dead, physical)]
        limits = (messages_max, bytes_max, _milliseconds(visibility_s), settings.max_deliveries, settings.leased_max)
        state.listeners[physical].on_lease()
        reply = await self._link.run(LEASE, keys, *limits, SUSPECT_AFTER)
        state.listeners[physical].on_lease()
        waiting, expired, redelivered, dead = reply[:4]
        state.counts.expired += expired
        state.counts.redelivered += redelivered
        state.counts.dead_lettered += dead
        grants = []
        for at in range(4, len(reply), 4):
            sequence, delivery = int(reply[at]), reply[at + 1]
            sealed = self._record(name, {b"r": reply[at + 2], b"h": reply[at + 3]})
            grants.append(Grant(sequence, delivery, f"{physical}.{sequence}.{delivery}.0", sealed))
        # As in LMDB: whoever got nothing although some wait, and asks again at once, would ask for ever.
        return Granted(grants, waiting if grants else 0)

    async def _return(self, queue: str, leasing: asyncio.Task[Granted]) -> None:
        granted = await leasing
        if granted.grants:
            await self.give_back(queue, [grant.receipt for grant in granted.grants])

    def _record(self, queue: str, fields: dict[bytes, bytes]) -> bytes:
        """The sealed record; a dead letter's history becomes its headers here, since Lua had better not rewrite it."""
        history = fields.get(b"h")
        if not history:
            return fields[b"r"]
        sequence, deliveries, at_ms = map(int, history.split())
        return to_dead_letter(fields[b"r"], queue.removesuffix(DEAD), sequence, deliveries, at_ms / 1000)

    async def _settle(self, queue: str, action: str, receipts: list[str], seconds: float) -> int:
        state = self._queue(queue)
        arguments: dict[int, list[Any]] = {}
        for text in receipts:
            receipt = Receipt.parse(text)
            if 0 <= receipt.physical < len(state.keys):
                of_one = arguments.setdefault(receipt.physical, [action, _milliseconds(seconds)])
                of_one += (receipt.sequence, receipt.delivery)
        if not arguments:
            return 0
        calls = [(state.keys[physical], of_one) for physical, of_one in arguments.items()]
        count = 0
        for physical, (done, waiting, expired) in zip(arguments, await self._link.run_each(SETTLE, calls), strict=True):
            count += done
            state.counts.expired += expired
            state.tell(physical, waiting)
        return count


def _keys(queue: str, physical: int) -> list[str]:
    """A queue and its dead letters share the hash tag."""
    kind = "dead:" if queue.endswith(DEAD) else ""
    return [f"{{{queue.removesuffix(DEAD)}:{physical}}}:{kind}{key}" for key in KEYS]


def _stop(queue: _Queue) -> None:
    for listener in queue.listeners:
        listener.stop()


def _milliseconds(seconds: float) -> int:
    return -int(-1000 * seconds // 1)


def _parse(name: str, kept: bytes) -> Definition:
    try:
        return _decode(kept)
    except msgspec.DecodeError as error:
        raise ConfigError(
            "C415", f"the settings of queue {name!r} in Redis cannot be read: {error}", "update this broker, or drop it"
        ) from error


def _full(state: _Queue, status: int, level: int) -> TidegateError:
    name = state.definition.name
    if status == 1:
        return queue_full(name, f"a physical queue has {level} of {state.messages_max} messages", "messages_max")
    return queue_full(name, f"a physical queue has {level} of {state.bytes_max} bytes", "bytes_max")
