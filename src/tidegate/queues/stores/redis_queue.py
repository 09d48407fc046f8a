"""A logical queue in Redis: every step that changes or reads its physical queues, each one script there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from tidegate.errors import TidegateError
from tidegate.messages import PAGE_BYTES_MAX, Level
from tidegate.queues.covers import PUBLISHERS_MAX, FormerFilter, Run
from tidegate.queues.dead_letters import to_dead_letter
from tidegate.queues.definition import DEAD, Definition, QueueSettings
from tidegate.queues.records import decode_record, unseal
from tidegate.queues.store import (
    SUSPECT_AFTER,
    Batches,
    Granted,
    Numbered,
    OnReady,
    Receipt,
    Runs,
    SealedPage,
    StoreCounts,
    queue_full,
)
from tidegate.queues.stores.redis_enqueue import ENQUEUE, HAS
from tidegate.queues.stores.redis_link import RedisLink
from tidegate.queues.stores.redis_listener import Listener
from tidegate.queues.stores.redis_scripts import (
    DELETE_BELOW,
    END_LEASES,
    EXPIRE,
    KEYS,
    LEASE,
    LEVEL,
    REDRIVE,
    SET_ASIDE,
    SETTLE,
    STEP_MESSAGES_MAX,
)

log = logging.getLogger(__name__)

READS: Final = "tidegate:reads"
READ_MESSAGES: Final = 256
# The status of an enqueue that depends on whether a former filter of its queue matches.
NEEDS_MATCHES: Final = 3


class RedisQueue:
    """A logical queue as this process knows it, with `keys` and listeners for each physical queue."""

    def __init__(self, link: RedisLink, definition: Definition) -> None:
        self.definition = definition
        self.keys = [_keys(definition.name, each) for each in range(definition.settings.physical_queues)]
        # Some scripts move messages between a physical queue and the one of its dead letters.
        self._keys_with_dead = [
            [*keys, *_keys(definition.dead, each)] if definition.dead else keys for each, keys in enumerate(self.keys)
        ]
        self._link = link
        self._counts = StoreCounts()
        self._on_ready: OnReady | None = None
        self._listeners = [Listener(link, keys, self._report_for(physical)) for physical, keys in enumerate(self.keys)]

    @property
    def settings(self) -> QueueSettings:
        return self.definition.settings

    @property
    def messages_max(self) -> int:
        return -(-self.settings.messages_max // len(self.keys))

    @property
    def bytes_max(self) -> int:
        return -(-self.settings.bytes_max // len(self.keys))

    def stop(self) -> None:
        """Stops listening, because the queue was dropped or the broker stops."""
        for listener in self._listeners:
            listener.stop()

    async def enqueue(
        self,
        batches: Batches,
        *,
        make_room: bool = False,
        numbered: Numbered | None = None,
        runs: Runs | None = None,
    ) -> int:
        settings = self.settings
        limits = (
            self.messages_max,
            self.bytes_max,
            int(1e6 * settings.deduplication_s),
            settings.deduplication_messages_max,
            int(make_room),
            *(numbered or (b"", 0)),
            PUBLISHERS_MAX,
        )
        calls = []
        for physical, entries in batches.items():
            parts = [part for entry in entries for part in entry]
            calls.append((self.keys[physical], [*limits, *_describe((runs or {}).get(physical, [])), *parts]))
        replies = await self._link.run_each(ENQUEUE, calls)
        duplicates = 0
        refused: TidegateError | FormerFilter | None = None
        full: set[int] = set()
        for (physical, entries), (status, *numbers) in zip(batches.items(), replies, strict=True):
            # This error takes precedence over a full queue, which would imply that all other entries are stored.
            if status == NEEDS_MATCHES:
                refused = FormerFilter(numbers[0].decode())
                continue
            if status:
                self._counts.refused += len(entries)
                full.add(physical)
                if not isinstance(refused, FormerFilter):
                    refused = self._full(status, numbers[0], full)
                continue
            repeated, dropped, waiting, forgotten = numbers
            self._counts.forgotten_publishers += forgotten
            duplicates += repeated
            self._counts.enqueued += len(entries) - repeated
            self._counts.dropped += dropped
            self._report_ready(physical, waiting)
        self._counts.duplicates += duplicates
        if refused is not None:
            raise refused
        return duplicates

    async def has(self, batches: Batches, runs: Runs | None = None) -> bool:
        calls = []
        for physical, entries in batches.items():
            parts: list[list[Any]] = [[entry.identity, b"", b""] for entry in entries]
            for run in (runs or {}).get(physical, ()):
                for index, place in enumerate(run.places, run.start):
                    parts[index][1:] = run.key, _digits(place)
            arguments = [int(1e6 * self.settings.deduplication_s), *(part for each in parts for part in each)]
            calls.append((self.keys[physical], arguments))
        return all(await self._link.run_each(HAS, calls))

    async def lease(self, physical: int, messages_max: int, bytes_max: int, visibility_s: float) -> Granted:
        """Leases messages. If the caller is cancelled in the meantime, they are given back."""
        leasing = self._link.start(self._lease(physical, messages_max, bytes_max, visibility_s))
        try:
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            self._link.start(self._return(leasing))
            raise

    async def delete(self, receipts: list[str]) -> int:
        done = await self._settle("delete", receipts, 0.0)
        self._counts.deleted += done
        return done

    async def extend(self, receipts: list[str], visibility_s: float) -> int:
        return await self._settle("extend", receipts, visibility_s)

    async def release(self, receipts: list[str], delay_s: float) -> int:
        return await self._settle("release", receipts, delay_s)

    async def give_back(self, receipts: list[str]) -> int:
        return await self._settle("return", receipts, 0.0)

    async def end_leases(self) -> int:
        count = 0
        replies = await self._link.run_each(END_LEASES, [(keys, ()) for keys in self.keys])
        for physical, (expired, waiting) in enumerate(replies):
            count += expired
            self._report_ready(physical, waiting)
        self._counts.expired += count
        return count

    async def read(
        self, physical: int, start: int, stop: int, messages_max: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> SealedPage:
        """Reads in pages, because the size of messages is known only after they are read."""
        stream = self.keys[physical][0]
        sequences: list[int] = []
        records: list[bytes] = []
        while messages_max > 0 and bytes_max > 0 and stop > max(1, start):
            count = min(messages_max, READ_MESSAGES)
            page = await self._link.command("XRANGE", stream, f"{start}-0", f"({stop}-0", "COUNT", count)
            for id_, fields in page:
                sealed = self._record(fields)
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

    async def delete_below(self, physical: int, sequence: int) -> int:
        """Deletes in steps; a step that fails leaves the later messages unchanged."""
        count = 0
        while True:
            gone: int = await self._link.run(DELETE_BELOW, self.keys[physical], sequence, STEP_MESSAGES_MAX)
            count += gone
            self._counts.deleted += gone
            if gone < STEP_MESSAGES_MAX:
                return count

    async def expire(self, before_s: float, messages_max: int) -> int:
        is_dead = self.settings.after_lifetime == "dead-letter"
        limits = (before_s, min(messages_max, STEP_MESSAGES_MAX), int(is_dead))
        replies = await self._link.run_each(EXPIRE, [(keys, limits) for keys in self._keys_with_dead])
        count = 0
        for physical, (gone, waiting) in enumerate(replies):
            count += gone
            self._report_ready(physical, waiting)
        self._counts.expired_messages += count
        self._counts.dead_lettered += count if is_dead else 0
        return count

    async def note_read(self, at: float) -> None:
        await self._link.command("HSET", READS, self.definition.name, repr(at))

    async def last_read(self) -> float | None:
        kept = await self._link.command("HGET", READS, self.definition.name)
        return None if kept is None else float(kept)

    async def set_aside(self, physical: int, sequence: int) -> None:
        count = await self._link.run(SET_ASIDE, self.keys[physical], sequence)
        self._counts.corrupt += count
        if count:
            log.error(
                "a corrupt record was set aside queue=%s physical=%d sequence=%d",
                self.definition.name,
                physical,
                sequence,
            )

    async def redrive(self, messages_max: int) -> int:
        """Moves dead letters in steps. Raises QueueFull if the queue has no room for a step."""
        moved = 0
        for keys in self._keys_with_dead:
            behind = 0
            while moved < messages_max and behind >= 0:
                count_max = min(STEP_MESSAGES_MAX, messages_max - moved)
                limits = (behind, count_max, self.messages_max, self.bytes_max)
                status, *numbers = await self._link.run(REDRIVE, keys, *limits)
                if status:
                    raise self._full(status, numbers[0])
                moved += numbers[0]
                behind = numbers[1]
        return moved

    async def levels(self) -> list[Level]:
        levels = []
        for reply in await self._link.run_each(LEVEL, [(keys, ()) for keys in self.keys]):
            messages, size_bytes, waiting, leased, next_, expired, publishers, *head = reply
            self._counts.expired += expired
            first, oldest_at = next_, None
            if head:
                first, body = int(head[0]), unseal(head[1])
                oldest_at = decode_record(body).enqueued_at if body is not None else None
            levels.append(Level(messages, size_bytes, waiting, leased, oldest_at, first, next_, publishers))
        return levels

    def counts(self) -> StoreCounts:
        return self._counts

    def watch(self, on_ready: OnReady) -> None:
        self._on_ready = on_ready

    def listen(self, *, is_on: bool) -> None:
        for listener in self._listeners:
            if is_on:
                listener.turn_on()
            else:
                listener.turn_off()

    async def _lease(self, physical: int, messages_max: int, bytes_max: int, visibility_s: float) -> Granted:
        settings, lifetime_s = self.settings, self.settings.lifetime_s
        limits = (
            messages_max,
            bytes_max,
            _milliseconds(visibility_s),
            settings.max_deliveries,
            settings.leased_max,
            SUSPECT_AFTER,
            # Brokers stamp records, so a broker's clock determines their age, not Redis's.
            "" if lifetime_s is None else time.time() - lifetime_s,
            int(settings.after_lifetime == "dead-letter"),
            STEP_MESSAGES_MAX,
        )
        self._listeners[physical].on_lease()
        reply = await self._link.run(LEASE, self._keys_with_dead[physical], *limits)
        self._listeners[physical].on_lease()
        waiting, expired, redelivered, dead, old = reply[:5]
        self._counts.expired += expired
        self._counts.redelivered += redelivered
        self._counts.dead_lettered += dead
        self._counts.expired_messages += old
        taken = (
            (int(reply[at]), reply[at + 1], self._record({b"r": reply[at + 2], b"h": reply[at + 3]}))
            for at in range(5, len(reply), 4)
        )
        return Granted.of(physical, "0", taken, waiting)

    async def _return(self, leasing: asyncio.Task[Granted]) -> None:
        granted = await leasing
        if granted.leased:
            await self.give_back([message.receipt for message in granted.leased])

    def _record(self, fields: dict[bytes, bytes]) -> bytes:
        """Returns the sealed record. The history of a dead letter becomes headers here, because rewriting a record in
        Lua would be fragile."""
        history = fields.get(b"h")
        if not history:
            return fields[b"r"]
        sequence, deliveries, at_ms, *why = history.split()
        return to_dead_letter(
            fields[b"r"],
            self.definition.name.removesuffix(DEAD),
            int(sequence),
            int(deliveries),
            int(at_ms) / 1000,
            is_expired=bool(why),
        )

    async def _settle(self, action: str, receipts: list[str], seconds: float) -> int:
        arguments: dict[int, list[Any]] = {}
        for text in receipts:
            receipt = Receipt.parse(text)
            if 0 <= receipt.physical < len(self.keys):
                of_one = arguments.setdefault(receipt.physical, [action, _milliseconds(seconds)])
                of_one += (receipt.sequence, receipt.delivery)
        if not arguments:
            return 0
        calls = [(self.keys[physical], of_one) for physical, of_one in arguments.items()]
        count = 0
        for physical, (done, waiting, expired) in zip(arguments, await self._link.run_each(SETTLE, calls), strict=True):
            count += done
            self._counts.expired += expired
            self._report_ready(physical, waiting)
        return count

    def _report_for(self, physical: int) -> Callable[[int, int], None]:
        def report(waiting: int, expired: int) -> None:
            self._counts.expired += expired
            self._report_ready(physical, waiting)

        return report

    def _report_ready(self, physical: int, waiting: int) -> None:
        if self._on_ready is not None and waiting > 0:
            self._on_ready(physical, waiting)

    def _full(self, status: int, level: int, physical: Iterable[int] = ()) -> TidegateError:
        if status == 1:
            what, bound = f"{level} of {self.messages_max} messages", "messages_max"
        else:
            what, bound = f"{level} of {self.bytes_max} bytes", "bytes_max"
        return queue_full(self.definition.name, f"a physical queue has {what}", bound, physical)


def _keys(queue: str, physical: int) -> list[str]:
    """Returns the keys of a physical queue. A queue and its dead letters share the hash tag."""
    kind = "dead:" if queue.endswith(DEAD) else ""
    return [f"{{{queue.removesuffix(DEAD)}:{physical}}}:{kind}{key}" for key in KEYS]


def _describe(runs: list[Run]) -> list[Any]:
    """Returns filters and runs as arguments of the enqueue script; its indexes start with 1."""
    filters: dict[str, int] = {}
    described: list[Any] = []
    for run in runs:
        count = len(run.places)
        text = b"%019d%019d%019d%019d" % (run.low, run.high, max(0, run.low - 1), run.high + 1)
        if count > 1:
            text += b"".join(map(_digits, run.places))
        filter_place = filters.setdefault(run.filter, len(filters) + 1) if run.filter else 0
        described += (run.key, run.start + 1, count, filter_place, text)
        if run.matches:
            known = b"".join(b"1" if is_match else b"0" for each in run.matches.values() for is_match in each)
            described += (b"".join(run.matches), known)
        else:
            described += (b"", b"")
    return [len(filters), *filters, len(runs), *described]


def _digits(place: int) -> bytes:
    return b"%019d" % place


def _milliseconds(seconds: float) -> int:
    return -int(-1000 * seconds // 1)
