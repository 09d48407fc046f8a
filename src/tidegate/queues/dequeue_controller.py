"""Dequeue controller: answers a back-end system's request for messages, at once or when some arrive.

It is the thin shell around a method (`queues.method`): it executes the steps that the method decides on, holds
requests, and counts hits and misses. A held request is a future and a timer: no thread, no operation of the store.

What may go wrong: the client disconnects. Then its request is cancelled. While the request is held, nothing is leased
to it. Messages of a try that completes at that very moment are given back as if they had not been delivered. A corrupt
record is set aside, and the others are delivered.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tidegate.errors import NoSuchQueue, QueueError, TidegateError
from tidegate.messages import MESSAGE_BYTES_MAX, REPLY_BYTES_MAX, VISIBILITY_S_MAX, WAIT_S_MAX, Dequeue, Leased
from tidegate.queues.conventional import Conventional
from tidegate.queues.costs import Costs, Timed
from tidegate.queues.definition import Definition
from tidegate.queues.method import DequeueMethod, Reply, Request, Try
from tidegate.queues.pms import PeriodicalMonitoring
from tidegate.queues.rds import RetryScheduling
from tidegate.queues.store import QueueStore, Store, is_alone
from tidegate.queues.wakeup import Wakeup

log = logging.getLogger(__name__)

# While requests are held, the store is checked this often for messages whose wake-up was lost.
SAFETY_CHECK_S: Final = 5.0
DEQUEUE_MESSAGES_MAX: Final = 10_000
# A reply with less room than one large message is complete: a store leases at least one message, whatever its size.
REPLY_BYTES_SPARE: Final = MESSAGE_BYTES_MAX


@dataclass
class DequeueCounts:
    """Counts since the controller's start. A hit or miss is one physical queue that was tried, as in the paper."""

    requests: int = 0
    empty_replies: int = 0
    hits: int = 0
    misses: int = 0
    delivered: int = 0
    given_back: int = 0
    monitored: int = 0


@dataclass(slots=True)
class _Held:
    """A parked request. `woken` is completed when the request is to be reconsidered, by the timer at the latest."""

    woken: asyncio.Future[None]
    timer: asyncio.TimerHandle


class DequeueController:
    """Serves one logical queue. Its only state is the requests that it holds."""

    def __init__(self, store: Store, definition: Definition, costs: Costs) -> None:
        self.definition = definition
        self.counts = DequeueCounts()
        self._store = store
        self._costs = costs
        self._loop = asyncio.get_running_loop()
        self._method = make_method(definition)
        self._held: dict[Request, _Held] = {}
        self._checking: asyncio.Task[None] | None = None
        self._is_closed = False
        self._stored.watch(self._on_ready)
        self._start_checks()

    @property
    def _stored(self) -> QueueStore:
        """The queue in the store. It may be dropped between two steps, so each step looks it up."""
        return self._store.queue(self.definition.name)

    @property
    def parked(self) -> int:
        return len(self._held)

    @property
    def sleep_s(self) -> float:
        """How long a request that misses now would sleep."""
        return self._method.sleep_s

    def redefine(self, definition: Definition) -> None:
        """Applies changed settings; held requests start again under them."""
        self.definition = definition
        self._method = make_method(definition)
        # The new method knows of no messages: the store reports those that wait.
        self._stored.watch(self._on_ready)
        self._start_checks()
        self._wake_all()

    async def close(self) -> None:
        """Answers held requests with nothing, so that their clients ask another broker."""
        self._is_closed = True
        self._wake_all()
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])

    async def dequeue(self, wanted: Dequeue) -> list[Leased]:
        """Returns up to `wanted.max` messages; none if none arrived in time. Cancel it when the client disconnects."""
        check_dequeue(wanted)
        request = Request(wanted.max, wanted.min, self._loop.time() + wanted.wait_s)
        self.counts.requests += 1
        found: list[Leased] = []
        if not wanted.wait_s and self._store.is_shared and self._method.wants_wakeups:
            await self._check_levels()  # without listening, messages from other brokers are not known
        try:
            await self._serve(request, wanted.visibility_s, found)
        except BaseException:
            # Also after a cancellation: messages that no client receives must be available again at once.
            if found:
                await self.give_back([message.receipt for message in found])
            raise
        finally:
            self._wake(self._method.on_gone(request))
        self.counts.empty_replies += not found
        return found

    async def give_back(self, receipts: list[str]) -> int:
        """Makes the messages of a reply that could not be delivered available again. The delivery does not count."""
        count = await self._stored.give_back(receipts)
        self.counts.given_back += count
        return count

    # Steps.

    async def _serve(self, request: Request, visibility_s: float, found: list[Leased]) -> None:
        method = self._method
        step = method.on_request(request, self._loop.time())
        while not self._is_closed and not isinstance(step, Reply):
            if isinstance(step, Try):
                got, waiting = await self._lease(request, step.physical, visibility_s, found)
                step = method.on_result(request, step.physical, got, waiting, self._loop.time())
            else:
                await self._park(request, step.until_s)
                now_s = self._loop.time()
                if method is self._method:
                    step = method.on_time(request, now_s)
                else:
                    # The settings have changed while the request was parked: the new method does not know it.
                    method = self._method
                    step = method.on_request(request, now_s)

    async def _lease(
        self, request: Request, physical: int, visibility_s: float, found: list[Leased]
    ) -> tuple[int, int]:
        """Adds the messages of a physical queue to `found`. Returns how many, and how many are left there. A message
        that must be alone in its reply completes the reply, or is given back and waits for the next one. A reply from
        several physical queues has one limit in bytes: the broker cuts connections with larger answers."""
        request.tries += 1
        room_bytes = REPLY_BYTES_MAX - sum(len(message.record) for message in found)
        leasing = Timed(self._stored.lease(physical, request.wants, room_bytes, visibility_s))
        granted = await leasing
        got = len(granted.leased)
        is_single = got == 1 and is_alone(granted.leased[0].delivery, self.definition.settings.max_deliveries)
        if is_single and found:
            await self._stored.give_back([granted.leased[0].receipt])
            request.max = request.got
            return 0, granted.waiting + 1
        found += granted.leased
        for sequence in granted.corrupt:
            await self._stored.set_aside(physical, sequence)
        self._count(got, leasing.seconds)
        request.got += got
        room_bytes -= sum(len(message.record) for message in granted.leased)
        if is_single or room_bytes < REPLY_BYTES_SPARE:
            request.max = request.got
        return got, granted.waiting

    def _count(self, got: int, took_s: float) -> None:
        if got:
            self.counts.hits += 1
            self.counts.delivered += got
            self._costs.hit(got, took_s)
        else:
            self.counts.misses += 1
            self._costs.missed(took_s)

    async def _park(self, request: Request, until_s: float) -> None:
        woken: asyncio.Future[None] = self._loop.create_future()
        held = self._held[request] = _Held(woken, self._loop.call_at(until_s, _complete, woken))
        if len(self._held) == 1:
            self._listen(is_on=self._method.wants_wakeups)
            self._start_checks()
        try:
            await woken
        finally:
            held.timer.cancel()
            del self._held[request]
            if not self._held:
                self._listen(is_on=False)

    def _listen(self, *, is_on: bool) -> None:
        with suppress(NoSuchQueue):  # a queue that was dropped reports nothing more
            self._stored.listen(is_on=is_on)

    # Wake-ups, and periodic reads of the levels.

    def _on_ready(self, physical: int, waiting: int) -> None:
        self._wake(self._method.on_ready(physical, waiting, self._loop.time()))

    def _wake(self, woken: list[tuple[Request, float]]) -> None:
        now_s = self._loop.time()
        for request, at_s in woken:
            held = self._held.get(request)
            if held is None:
                continue
            if at_s <= now_s:
                _complete(held.woken)
            elif at_s < held.timer.when():
                held.timer.cancel()
                held.timer = self._loop.call_at(at_s, _complete, held.woken)

    def _wake_all(self) -> None:
        for held in self._held.values():
            _complete(held.woken)

    def _start_checks(self) -> None:
        if self._check_period_s() is not None and (self._checking is None or self._checking.done()):
            # Not in a TaskGroup: a request starts the checks and does not wait for them. `close` does.
            self._checking = self._loop.create_task(self._check_repeatedly())

    def _check_period_s(self) -> float | None:
        """Returns how often the levels are read: always for PMS, and for lost wake-ups only while requests are held."""
        if self._method.monitor_period_s is not None:
            return self._method.monitor_period_s
        return SAFETY_CHECK_S if self._method.wants_wakeups and self._held else None

    async def _check_repeatedly(self) -> None:
        while (period_s := self._check_period_s()) is not None:
            await asyncio.sleep(period_s)
            try:
                await self._check_levels()
            except TidegateError as error:
                log.warning("the levels of queue %s cannot be read: %s", self.definition.name, error)

    async def _check_levels(self) -> None:
        checking = Timed(self._stored.levels())
        levels = await checking
        counts = [level.waiting for level in levels]
        if self._method.monitor_period_s is not None:
            self.counts.monitored += len(levels)
            self._costs.monitored(len(levels), checking.seconds)
            self._method.on_counts(counts, self._loop.time())
        else:
            for physical, waiting in enumerate(counts):
                self._on_ready(physical, waiting)


def make_method(definition: Definition) -> DequeueMethod:
    """Makes the method that a queue's settings name. Each controller starts its rounds at a random physical queue."""
    settings = definition.settings
    count = settings.physical_queues
    start = random.randrange(count)  # noqa: S311
    match settings.method:
        case "wakeup":
            return Wakeup(count, start, settings.linger_s)
        case "rds":
            return RetryScheduling(
                count,
                start,
                settings.sleep_s,
                is_adaptive=settings.sleep == "adaptive",
                parks_on_first_miss=settings.park_after == "first",
            )
        case "pms":
            return PeriodicalMonitoring(count, start, settings.monitor_period_s)
        case "conventional":
            return Conventional(count, start)


def check_dequeue(wanted: Dequeue) -> None:
    """Raises QueueError for limits that are out of range."""
    for name, value, low, high in (
        ("max", wanted.max, 1, DEQUEUE_MESSAGES_MAX),
        ("min", wanted.min, 1, wanted.max),
        ("wait_s", wanted.wait_s, 0, WAIT_S_MAX),
        ("visibility_s", wanted.visibility_s, 0, VISIBILITY_S_MAX),
    ):
        if not low <= value <= high:
            raise QueueError(
                "Q908", f"{name} is {value}, which is out of range", f"use a {name} from {low} to {high:g}"
            )


def _complete(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
