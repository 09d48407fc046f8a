"""The logical queues of a broker, by name: the interface for listeners, the queue point and the demo.

Each queue has an enqueue and a dequeue controller over the shared store. Named durable subscriptions are queues too,
with one physical queue each, so that their subscriber receives notifications in order.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec

from tidegate.errors import Overloaded, QueueError, Refusals, TidegateError, Unavailable
from tidegate.messages import (
    VISIBILITY_S_MAX,
    Dequeue,
    Enqueued,
    Kept,
    Leased,
    Level,
    NewMessage,
    Page,
    Settle,
    Settled,
)
from tidegate.queues.costs import Costs
from tidegate.queues.definition import (
    DEAD,
    SUBSCRIPTION,
    Definition,
    QueueSettings,
    SubscriptionSettings,
    check_change,
    check_name,
    parse_settings,
)
from tidegate.queues.dequeue_controller import DequeueController
from tidegate.queues.enqueue_controller import EnqueueController
from tidegate.queues.feed import Feed
from tidegate.queues.last_read import LastRead
from tidegate.queues.pressure import Pressure
from tidegate.queues.queue_budget import QueueBudget
from tidegate.queues.records import CHECKSUM_BYTES, corrupt_among, enqueued_at
from tidegate.queues.statistics import QueuesStatistics, QueueStatistics, Rates, fill_ratio, make_statistics
from tidegate.queues.store import QueueFull, SealedPage, Store, no_such_queue
from tidegate.security.publisher_key import ForeignPublisher, is_keyed

log = logging.getLogger(__name__)

READ_MESSAGES_MAX: Final = 10_000
# Messages past their lifetime that one step removes at most, of each physical queue.
EXPIRE_STEP: Final = 1000
ALARMS_SHOWN: Final = 100
QUEUES_BYTES_MAX: Final = 512 * 1024 * 1024
ATTRIBUTE_NAMES_MAX: Final = 16_384
_SEQUENCE_MAX: Final = 1 << 62


@dataclass
class _LogicalQueue:
    definition: Definition
    enqueue_controller: EnqueueController
    dequeue_controller: DequeueController
    costs: Costs
    pressure: Pressure
    last_read: LastRead
    rates: Rates = field(default_factory=Rates)
    enqueued_before: int = -1


class LogicalQueues:
    """`on_change` is called for every definition that is created, changed or dropped (None). Its third argument is true
    if another broker or a former process made the change. A definition is in force once `until_in_force`, awaited
    afterwards, returns."""

    def __init__(
        self, store: Store, bytes_max: int = QUEUES_BYTES_MAX, attribute_names_max: int = ATTRIBUTE_NAMES_MAX
    ) -> None:
        self.refusals = Refusals()
        self.budget = QueueBudget(bytes_max, attribute_names_max)
        self._store = store
        self._queues: dict[str, _LogicalQueue] = {}
        self._is_stopping = False
        self._expired_queues = 0
        # Two concurrent definitions of one name would get two numbers in the store, and messages stored under the
        # number that loses would be lost.
        self._defining = asyncio.Lock()
        self.on_change: Callable[[str, Definition | None, bool], None] = _ignore
        self.until_in_force: Callable[[], Awaitable[None]] = _return_at_once

    @property
    def publisher_bytes(self) -> int:
        """The memory of this process that all queues use to remember publishers."""
        return self._store.cover_bytes

    async def open(self) -> None:
        for definition in await self._store.open():
            self._use(definition, is_external=True)
        self._store.watch_definitions(self._on_definition)

    async def stop(self) -> None:
        """Stops giving out messages; held requests are answered with nothing."""
        self._is_stopping = True
        for queue in self._queues.values():
            await queue.dequeue_controller.close()

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    async def close(self) -> None:
        await self.stop()
        await self._store.close()

    # Definitions.

    async def define(self, name: str, settings: Any) -> Definition:
        """Creates a queue, or changes one; `settings` is a QueueSettings or a mapping from outside."""
        return await self._define(check_name(name), settings)

    async def define_subscription(
        self, name: str, text: str, policy: str = "block", others: SubscriptionSettings | None = None
    ) -> Definition:
        """Creates or changes a named durable subscription: a filter with a queue of its own. Other settings of its
        queue keep their values if they are not given."""
        queue = SUBSCRIPTION + check_name(name)
        kept = msgspec.structs.asdict(self._queues[queue].definition.settings) if queue in self._queues else {}
        given = others.given() if others is not None else {}
        return await self._define(queue, kept | given | {"filter": text, "policy": policy, "physical_queues": 1})

    async def drop(self, name: str) -> None:
        if name.endswith(DEAD):
            raise QueueError("Q902", f"{name!r} holds the dead letters of a queue", "drop the queue itself")
        async with self._defining:
            self._get(name)
            await self._store.drop(name)
            await self._forget(name)

    def definitions(self) -> list[Definition]:
        """Returns all queues, including those of dead letters and of subscriptions."""
        return [queue.definition for queue in self._queues.values()]

    def definition(self, name: str) -> Definition:
        return self._get(name).definition

    # Messages.

    async def enqueue(
        self,
        name: str,
        messages: Sequence[NewMessage],
        *,
        make_room: bool = False,
        producer: str = "",
        number: int = 0,
    ) -> Enqueued:
        """Returns when the messages are as durable as the queue demands."""
        controller = self._get(name).enqueue_controller
        return await controller.enqueue(messages, make_room=make_room, producer=producer, number=number)

    async def enqueue_from_client(
        self, name: str, messages: Sequence[NewMessage], *, producer: str = "", number: int = 0
    ) -> Enqueued:
        """Enqueues messages from a client. A queue with a filter identifies notifications by publisher and number, so a
        client must not use up the numbers of a publisher that has a key."""
        if self.definition(name).settings.filter is not None:
            for device in {message.device for message in messages}:
                if is_keyed(device):
                    raise ForeignPublisher(
                        "A507",
                        f"device {device[-40:]!r} is a publisher with a key, whose notifications fill queue {name!r}",
                        "give the messages another device, or enqueue them into a queue without a filter",
                    )
        return await self.enqueue(name, messages, producer=producer, number=number)

    async def feed(self, name: str, feed: Feed, *, make_room: bool = False) -> None:
        """Stores notifications that the queue's filter has matched. Returns when they are as durable as the queue
        demands."""
        await self._get(name).enqueue_controller.feed(feed, make_room=make_room)

    def unstored(self, name: str, feed: Feed, full: QueueFull) -> Feed:
        """Returns the part of a feed that a full queue did not store."""
        return self._get(name).enqueue_controller.unstored(feed, full)

    def pressure(self, name: str) -> Pressure:
        """Reports how close a queue is to its bound, and whether it holds back publishers."""
        return self._get(name).pressure

    async def has(self, name: str, feed: Feed) -> bool:
        """Returns whether all messages of a feed were stored before, as far as the queue remembers."""
        return await self._get(name).enqueue_controller.has(feed)

    async def dequeue(self, wanted: Dequeue) -> list[Leased]:
        """Leases messages as they become available. Cancel it when the client disconnects. A caller that cannot pass
        the messages on settles them with `return`."""
        if self._is_stopping:
            raise Unavailable("U702", "the broker is shutting down", "connect again in a moment")
        queue = self._get(wanted.queue)
        queue.last_read.on_read(time.time(), time.monotonic())
        return await queue.dequeue_controller.dequeue(wanted)

    async def take_over(self, name: str) -> None:
        """Ends all leases of a named subscription. A new reader is its only reader and needs order, so messages that an
        earlier reader, perhaps at a dead broker, has not finished come first."""
        self._get(name).last_read.on_read(time.time(), time.monotonic())
        await self._store.queue(name).end_leases()

    async def settle(self, settle: Settle) -> Settled:
        queue, stored, receipts = self._get(settle.queue), self._store.queue(settle.queue), settle.receipts
        match settle.action:
            case "delete":
                done = await stored.delete(receipts)
            case "extend":
                seconds = _check_seconds("visibility_s", settle.visibility_s)
                done = await stored.extend(receipts, seconds)
            case "release":
                done = await stored.release(receipts, _check_seconds("delay_s", settle.delay_s))
            case "return":
                done = await queue.dequeue_controller.give_back(receipts)
            case _:
                raise QueueError(
                    "Q909",
                    f"there is no action {settle.action!r} for messages",
                    "use delete, extend, release or return",
                )
        return Settled(done, len(receipts) - done)

    async def read(self, name: str, physical: int, start: int, stop: int, messages_max: int) -> list[Kept]:
        """Returns messages with sequences from `start` to below `stop`, in order, leased or not, without taking them. A
        reply carries only the first of many: continue after the last one. An empty reply is the end."""
        page = await self._read(name, physical, start, stop, messages_max)
        return [Kept(sequence, msgspec.Raw(sealed[CHECKSUM_BYTES:])) for sequence, sealed in page.split()]

    async def read_page(self, name: str, physical: int, start: int, stop: int, messages_max: int) -> Page:
        """Reads as `read` does, but returns bytes, with little work for each message."""
        page = await self._read(name, physical, start, stop, messages_max)
        sequences, ends = array("Q", page.sequences), array("I", itertools.accumulate(page.sizes))
        if sys.byteorder == "big":
            sequences.byteswap()
            ends.byteswap()
        return Page(sequences.tobytes(), ends.tobytes(), memoryview(page.records))

    async def delete_below(self, name: str, physical: int, sequence: int) -> int:
        """Deletes the messages below a sequence. Repeating the call deletes nothing more."""
        self._check_physical(name, physical)
        if not 0 <= sequence <= _SEQUENCE_MAX:
            raise QueueError("Q908", f"the sequence {sequence} is invalid", "count from 1")
        return await self._store.queue(name).delete_below(physical, sequence)

    async def redrive(self, name: str, messages_max: int = READ_MESSAGES_MAX) -> int:
        """Moves dead letters back into their queue."""
        self._get(name + DEAD)
        return await self._store.queue(name).redrive(messages_max)

    # Levels and statistics.

    async def levels(self, name: str) -> list[Level]:
        """Returns how full the physical queues of a queue are, and which sequences they have."""
        self._get(name)
        return await self._store.queue(name).levels()

    async def statistics(self, name: str) -> QueueStatistics:
        queue = self._get(name)
        levels = await self._store.queue(name).levels()
        read_at, expires_at = await self.last_read(name)
        self._on_levels(queue, levels)
        dead = await self._store.queue(name + DEAD).levels() if not name.endswith(DEAD) else []
        return make_statistics(
            queue.definition,
            levels,
            sum(level.messages for level in dead),
            self._store.queue(name).counts(),
            queue.dequeue_controller,
            queue.costs,
            queue.rates,
            queue.pressure,
            read_at,
            expires_at,
        )

    async def last_read(self, name: str) -> tuple[float | None, float | None]:
        """Returns when a queue was last read, and when it is dropped if it stays unread; both in seconds since 1970."""
        queue = self._get(name)
        last, expires_s = queue.last_read, queue.definition.expires_s
        if not expires_s:
            return last.at or None, None
        if queue.dequeue_controller.parked:
            last.on_read(time.time(), time.monotonic())
        last.on_noted(await self._store.queue(name).last_read(), time.time())
        return last.at, last.at + expires_s

    def totals(self) -> QueuesStatistics:
        """Returns totals over all queues from this broker's last checks, without asking the store."""
        pressures = [queue.pressure for queue in self._queues.values()]
        return QueuesStatistics(
            queues=len(self._queues),
            near_their_bound=sum(pressure.is_near for pressure in pressures),
            holding_back=sum(pressure.is_holding_back for pressure in pressures),
            overflowing=sum(pressure.is_overflowing for pressure in pressures),
            expired=self._expired_queues,
        )

    def holding_back(self) -> list[str]:
        """Returns the names of full queues that hold back their publishers now."""
        return [name for name, queue in self._queues.items() if queue.pressure.is_holding_back]

    def alarms(self) -> list[dict[str, Any]]:
        """Returns the queues near their bound, the fullest first, and how they treat their publishers."""
        now_s = time.monotonic()
        pressed = [
            queue.pressure
            for queue in self._queues.values()
            if queue.pressure.is_near or queue.pressure.is_holding_back or queue.pressure.is_overflowing
        ]
        pressed.sort(key=lambda pressure: -pressure.fill_ratio)
        return [
            {
                "queue": pressure.name,
                "fill_ratio": round(pressure.fill_ratio, 4),
                "holding_back_s": round(pressure.holding_back_s(now_s), 1),
                "is_overflowing": pressure.is_overflowing,
                "notifications_refused": pressure.notifications_refused,
                "notifications_dropped": pressure.notifications_dropped,
            }
            for pressure in pressed[:ALARMS_SHOWN]
        ]

    # Upkeep.

    async def check_fill(self, name: str) -> None:
        """Measures how full a queue is, if this broker may have filled it since the last check."""
        queue = self._queues.get(name)
        if queue is None:
            return
        pressure, enqueued = queue.pressure, self._store.queue(name).counts().enqueued
        is_pressed = pressure.is_near or pressure.is_overflowing
        if enqueued != queue.enqueued_before or is_pressed:
            queue.enqueued_before = enqueued
            self._on_levels(queue, await self._store.queue(name).levels())

    def _on_levels(self, queue: _LogicalQueue, levels: list[Level]) -> None:
        settings = queue.definition.settings
        ratio = fill_ratio(settings, levels, is_divided=self._store.is_shared)
        queue.pressure.on_fill(ratio, is_ring=settings.filter is not None and settings.policy == "drop-oldest")

    async def remove_old_messages(self, name: str) -> bool:
        """Removes messages that are older than the queue's lifetime, up to a bound. Returns whether there may be
        more."""
        queue = self._queues.get(name)
        if queue is None or (lifetime_s := queue.definition.settings.lifetime_s) is None:
            return False
        return await self._store.queue(name).expire(time.time() - lifetime_s, EXPIRE_STEP) >= EXPIRE_STEP

    async def drop_if_unread(self, name: str) -> None:
        """Stores when a queue was last read, and drops a queue that has been unread for its `expires_s`."""
        queue = self._queues.get(name)
        if queue is None or not (expires_s := queue.definition.expires_s):
            return
        last, now_s = queue.last_read, time.monotonic()
        if not last.is_known:
            last.on_noted(await self._store.queue(name).last_read(), time.time())
        if queue.dequeue_controller.parked:
            last.on_read(time.time(), now_s)
        if last.must_be_noted(expires_s):
            last.noted_at = last.at
            await self._store.queue(name).note_read(last.at)
        elif last.has_expired(expires_s, time.time(), now_s):
            # Includes reads through other brokers.
            last.on_noted(await self._store.queue(name).last_read(), time.time())
            if last.has_expired(expires_s, time.time(), now_s):
                await self._drop_unread(queue)

    async def _drop_unread(self, queue: _LogicalQueue) -> None:
        name, unread_s = queue.definition.name, time.time() - queue.last_read.at
        messages = sum(level.messages for level in await self._store.queue(name).levels())
        await self.drop(name)
        self._expired_queues += 1
        log.warning(
            "queue %r was dropped with %d messages: it was not read for %.0f s, and its expires_s is %g",
            name,
            messages,
            unread_s,
            queue.definition.expires_s,
        )

    def trouble(self) -> TidegateError | None:
        """Returns why messages are refused now, for example because the disk is full; None if they are accepted."""
        return self._store.trouble()

    def activity(self) -> dict[str, dict[str, int]]:
        """Returns the counts of the dequeue controllers that have served requests, without asking the store."""
        return {
            name: asdict(queue.dequeue_controller.counts) | {"parked": queue.dequeue_controller.parked}
            for name, queue in self._queues.items()
            if queue.dequeue_controller.counts.requests
        }

    # Internals.

    async def _read(self, name: str, physical: int, start: int, stop: int, messages_max: int) -> SealedPage:
        """Reads a page of records that are sound and not too old; corrupt records are set aside."""
        self._check_physical(name, physical)
        queue = self._queues[name]
        queue.last_read.on_read(time.time(), time.monotonic())
        if not 0 <= start <= stop <= _SEQUENCE_MAX:
            raise QueueError(
                "Q908", f"the range from {start} to {stop} is invalid", "count from 1, and end after the start"
            )
        count = max(0, min(messages_max, READ_MESSAGES_MAX))
        while True:
            page = await self._store.queue(name).read(physical, start, stop, count)
            corrupt = corrupt_among(page.sizes, page.records)
            if not corrupt:
                lifetime_s = queue.definition.settings.lifetime_s
                young = page if lifetime_s is None else _enqueued_since(page, time.time() - lifetime_s)
                if young.sequences or not page.sequences:
                    return young
                # An empty page would signal the end to the reader.
                start = page.sequences[-1] + 1
                await asyncio.sleep(0)
                continue
            for index in corrupt:
                await self._store.queue(name).set_aside(physical, page.sequences[index])

    def _get(self, name: str) -> _LogicalQueue:
        queue = self._queues.get(name)
        if queue is None:
            raise no_such_queue(name)
        return queue

    def _check_physical(self, name: str, physical: int) -> None:
        count = self._get(name).definition.settings.physical_queues
        if not 0 <= physical < count:
            raise QueueError("Q908", f"{name!r} has no physical queue {physical}", f"use 0 to {count - 1}")

    async def _define(self, name: str, given: Any) -> Definition:
        settings = given if isinstance(given, QueueSettings) else parse_settings(given)
        async with self._defining:
            definition = await self._make(name, settings)
        await self.until_in_force()
        return definition

    async def _make(self, name: str, settings: QueueSettings) -> Definition:
        known = self._queues.get(name)
        if known is not None:
            if settings.durability is None:
                settings = msgspec.structs.replace(settings, durability=known.definition.settings.durability)
            check_change(known.definition, settings)
            if settings == known.definition.settings:
                return known.definition
        try:
            self.budget.check(Definition(name, settings))
        except Overloaded as error:
            raise self.refusals.note(error) from None
        definition = await self._store.define(Definition(name, settings))
        self._use(definition, is_external=False)
        self._use(definition.dead_letters(), is_external=False)
        return definition

    def _use(self, definition: Definition, *, is_external: bool) -> None:
        known = self._queues.get(definition.name)
        if known is None:
            costs = Costs()
            self._queues[definition.name] = _LogicalQueue(
                definition,
                EnqueueController(self._store, definition, costs),
                DequeueController(self._store, definition, costs),
                costs,
                Pressure(definition.name),
                LastRead(time.monotonic()),
            )
        else:
            known.definition = known.enqueue_controller.definition = definition
            known.dequeue_controller.redefine(definition)
        if definition.dead:
            self.budget.charge(definition)
        self.on_change(definition.name, definition, is_external)

    async def _forget(self, name: str) -> None:
        self.budget.give_back(name)
        for each in (name, name + DEAD):
            queue = self._queues.pop(each, None)
            if queue is not None:
                await queue.dequeue_controller.close()
                self.on_change(each, None, False)

    async def _on_definition(self, name: str, definition: Definition | None) -> None:
        """Handles a queue that a broker on this store has created, changed or dropped. This broker's own changes are
        already applied."""
        async with self._defining:
            if definition is None:
                await self._forget(name)
            elif name not in self._queues or self._queues[name].definition != definition:
                self._use(definition, is_external=True)
                self._use(definition.dead_letters(), is_external=True)


def _enqueued_since(page: SealedPage, since: float) -> SealedPage:
    """Returns the messages of a page that were enqueued at or after `since`."""
    kept = [(sequence, sealed) for sequence, sealed in page.split() if (enqueued_at(sealed) or since) >= since]
    if len(kept) == len(page.sequences):
        return page
    sealed = [each for _sequence, each in kept]
    return SealedPage([sequence for sequence, _sealed in kept], [len(each) for each in sealed], b"".join(sealed))


def _check_seconds(name: str, seconds: float) -> float:
    if not 0 <= seconds <= VISIBILITY_S_MAX:
        raise QueueError(
            "Q908", f"{name} is {seconds}, which is out of range", f"use 0 to {VISIBILITY_S_MAX:g} seconds"
        )
    return seconds


async def _return_at_once() -> None:
    pass


def _ignore(_name: str, _definition: Definition | None, _is_external: bool) -> None:
    """Default listener: does nothing."""
