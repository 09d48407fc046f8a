"""The logical queues of a broker, by name: what listeners, the queue point and the demo call.

Each queue has an enqueue and a dequeue controller over the one store. Named durable subscriptions are queues too, of
one physical queue, so that their subscriber gets notifications in order.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec

from tidegate.errors import QueueError, Unavailable
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
    check_change,
    check_name,
    parse_settings,
)
from tidegate.queues.dequeue_controller import DequeueController
from tidegate.queues.enqueue_controller import EnqueueController
from tidegate.queues.records import CHECKSUM_BYTES, corrupt_among
from tidegate.queues.statistics import QueueStatistics, Rates, make_statistics
from tidegate.queues.store import SealedPage, Store, no_such_queue

READ_MESSAGES_MAX: Final = 10_000
_SEQUENCE_MAX: Final = 1 << 62


@dataclass
class _LogicalQueue:
    definition: Definition
    enqueue_controller: EnqueueController
    dequeue_controller: DequeueController
    costs: Costs
    rates: Rates = field(default_factory=Rates)


class LogicalQueues:
    """`on_change` is told of every definition that is made, changed or dropped (None), and whether that was only heard
    of, as of another broker or a former process. A definition is made when `until_in_force` returns after that."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queues: dict[str, _LogicalQueue] = {}
        self._is_stopping = False
        # Two who make one queue at a time would give it two numbers in the store, and its messages to the lost one.
        self._defining = asyncio.Lock()
        self.on_change: Callable[[str, Definition | None, bool], None] = _ignore
        self.until_in_force: Callable[[], Awaitable[None]] = _at_once

    async def open(self) -> None:
        for definition in await self._store.open():
            self._use(definition, is_heard=True)
        self._store.watch_definitions(self._on_definition)

    async def stop(self) -> None:
        """No more messages are given out; requests that are held are answered with nothing."""
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
        """Makes a queue, or changes one; `settings` is a QueueSettings or a mapping from outside."""
        return await self._define(check_name(name), settings)

    async def define_subscription(self, name: str, text: str, policy: str = "block") -> Definition:
        """A named durable subscription: a filter with a queue of its own. The same again changes nothing."""
        settings = {"filter": text, "policy": policy, "physical_queues": 1}
        return await self._define(SUBSCRIPTION + check_name(name), settings)

    async def drop(self, name: str) -> None:
        if name.endswith(DEAD):
            raise QueueError("Q902", f"{name!r} holds the dead letters of a queue", "drop that queue")
        async with self._defining:
            self._get(name)
            await self._store.drop(name)
            await self._forget(name)

    def definitions(self) -> list[Definition]:
        """All queues, those of dead letters and of subscriptions too."""
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

    async def has(self, name: str, messages: Sequence[NewMessage]) -> bool:
        """Whether all of them were enqueued before, as far as the queue remembers."""
        return await self._get(name).enqueue_controller.has(messages)

    async def dequeue(self, wanted: Dequeue) -> list[Leased]:
        """Leases messages, when there are some; cancel it when the client goes away. Whoever cannot pass the messages
        on settles them with `return`."""
        if self._is_stopping:
            raise Unavailable("U702", "the broker is shutting down", "connect again in a moment")
        return await self._get(wanted.queue).dequeue_controller.dequeue(wanted)

    async def take_over(self, name: str) -> None:
        """Whoever begins to read a named subscription is its only reader, and wants order: what another one has not
        finished with, perhaps at a broker that has died, comes first."""
        self._get(name)
        await self._store.end_leases(name)

    async def settle(self, settle: Settle) -> Settled:
        queue, receipts = self._get(settle.queue), settle.receipts
        match settle.action:
            case "delete":
                done = await self._store.delete(settle.queue, receipts)
            case "extend":
                seconds = _check_seconds("visibility_s", settle.visibility_s)
                done = await self._store.extend(settle.queue, receipts, seconds)
            case "release":
                done = await self._store.release(settle.queue, receipts, _check_seconds("delay_s", settle.delay_s))
            case "return":
                done = await queue.dequeue_controller.give_back(receipts)
            case _:
                raise QueueError(
                    "Q909", f"{settle.action!r} cannot be done to messages", "use delete, extend, release or return"
                )
        return Settled(done, len(receipts) - done)

    async def read(self, name: str, physical: int, start: int, stop: int, messages_max: int) -> list[Kept]:
        """Messages with sequences from `start` to below `stop`, in order, leased or not; nothing is taken. Of more
        than a reply carries these are the first: read on behind the last; none is the end."""
        page = await self._read(name, physical, start, stop, messages_max)
        return [Kept(sequence, msgspec.Raw(sealed[CHECKSUM_BYTES:])) for sequence, sealed in page.split()]

    async def read_page(self, name: str, physical: int, start: int, stop: int, messages_max: int) -> Page:
        """The same as bytes, with little work for each message."""
        page = await self._read(name, physical, start, stop, messages_max)
        sequences, ends = array("Q", page.sequences), array("I", itertools.accumulate(page.sizes))
        if sys.byteorder == "big":
            sequences.byteswap()
            ends.byteswap()
        return Page(sequences.tobytes(), ends.tobytes(), memoryview(page.records))

    async def delete_below(self, name: str, physical: int, sequence: int) -> int:
        """Deletes what lies below a sequence; again, it deletes nothing."""
        self._check_physical(name, physical)
        if not 0 <= sequence <= _SEQUENCE_MAX:
            raise QueueError("Q908", f"{sequence} is no sequence", "count from 1")
        return await self._store.delete_below(name, physical, sequence)

    async def redrive(self, name: str, messages_max: int = READ_MESSAGES_MAX) -> int:
        """Moves dead letters back into their queue."""
        self._get(name + DEAD)
        return await self._store.redrive(name, messages_max)

    # Looking.

    async def levels(self, name: str) -> list[Level]:
        """How full its physical queues are, and which sequences they have."""
        self._get(name)
        return await self._store.levels(name)

    async def statistics(self, name: str) -> QueueStatistics:
        queue = self._get(name)
        levels = await self._store.levels(name)
        dead = await self._store.levels(name + DEAD) if not name.endswith(DEAD) else []
        return make_statistics(
            queue.definition,
            levels,
            sum(level.messages for level in dead),
            self._store.counts(name),
            queue.dequeue_controller,
            queue.costs,
            queue.rates,
        )

    def activity(self) -> dict[str, dict[str, int]]:
        """What the dequeue controllers of queues that were asked for messages have done, without asking the store."""
        return {
            name: asdict(queue.dequeue_controller.counts) | {"parked": queue.dequeue_controller.parked}
            for name, queue in self._queues.items()
            if queue.dequeue_controller.counts.requests
        }

    # Inside.

    async def _read(self, name: str, physical: int, start: int, stop: int, messages_max: int) -> SealedPage:
        """Records that are sound, as many as a page holds; corrupt ones are set aside."""
        self._check_physical(name, physical)
        if not 0 <= start <= stop <= _SEQUENCE_MAX:
            raise QueueError("Q908", f"from {start} to {stop} is no range", "count from 1, and end behind the start")
        count = max(0, min(messages_max, READ_MESSAGES_MAX))
        while True:
            page = await self._store.read(name, physical, start, stop, count)
            corrupt = corrupt_among(page.sizes, page.records)
            if not corrupt:
                return page
            for index in corrupt:
                await self._store.set_aside(name, physical, page.sequences[index])

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
        definition = await self._store.define(Definition(name, settings))
        self._use(definition, is_heard=False)
        self._use(definition.dead_letters(), is_heard=False)
        return definition

    def _use(self, definition: Definition, *, is_heard: bool) -> None:
        known = self._queues.get(definition.name)
        if known is None:
            costs = Costs()
            self._queues[definition.name] = _LogicalQueue(
                definition,
                EnqueueController(self._store, definition, costs),
                DequeueController(self._store, definition, costs),
                costs,
            )
        else:
            known.definition = known.enqueue_controller.definition = definition
            known.dequeue_controller.redefine(definition)
        self.on_change(definition.name, definition, is_heard)

    async def _forget(self, name: str) -> None:
        for each in (name, name + DEAD):
            queue = self._queues.pop(each, None)
            if queue is not None:
                await queue.dequeue_controller.close()
                self.on_change(each, None, False)

    async def _on_definition(self, name: str, definition: Definition | None) -> None:
        """Another broker on this store has made, changed or dropped a queue; or this one, and then it is done."""
        async with self._defining:
            if definition is None:
                await self._forget(name)
            elif name not in self._queues or self._queues[name].definition != definition:
                self._use(definition, is_heard=True)
                self._use(definition.dead_letters(), is_heard=True)


def _check_seconds(name: str, seconds: float) -> float:
    if not 0 <= seconds <= VISIBILITY_S_MAX:
        raise QueueError("Q908", f"{name} is {seconds}", f"use 0 to {VISIBILITY_S_MAX:g} seconds")
    return seconds


async def _at_once() -> None:
    pass


def _ignore(_name: str, _definition: Definition | None, _is_heard: bool) -> None:
    """Nobody asks."""
