"""Dequeue controller: a back-end system asks for messages, and gets them, now or when there are some.

The thin shell around a method (`queues.method`): it takes the steps that the method decides on, holds requests, and
counts hits and misses. A held request is a future and a timer: no thread, no operation of the store.

What may go wrong: the client goes away. Then its request is cancelled: while it is held nothing is leased to it, and
what a try brings in that very moment is given back as if it had not been delivered. A corrupt record is set aside, and
the others are delivered.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Final

import msgspec

from tidegate.errors import QueueError, TidegateError
from tidegate.messages import REPLY_BYTES_MAX, VISIBILITY_S_MAX, WAIT_S_MAX, Dequeue, Leased
from tidegate.queues.conventional import Conventional
from tidegate.queues.costs import Costs, Timed
from tidegate.queues.definition import Definition
from tidegate.queues.method import DequeueMethod, Reply, Request, Try
from tidegate.queues.pms import PeriodicalMonitoring
from tidegate.queues.rds import RetryScheduling
from tidegate.queues.records import unseal
from tidegate.queues.store import Store, is_alone
from tidegate.queues.wakeup import Wakeup

log = logging.getLogger(__name__)

# While requests are held, the store is asked so often whether a wake-up was lost.
SAFETY_CHECK_S: Final = 5.0
DEQUEUE_MESSAGES_MAX: Final = 10_000


@dataclass
class DequeueCounts:
    """Since the controller's start. A hit or miss is one physical queue that was tried, as in the paper."""

    requests: int = 0
    empty_replies: int = 0
    hits: int = 0
    misses: int = 0
    delivered: int = 0
    given_back: int = 0
    monitored: int = 0


@dataclass(slots=True)
class _Held:
    """A parked request: `woken` is completed when it is to be asked about, by the timer at the latest."""

    woken: asyncio.Future[None]
    timer: asyncio.TimerHandle


class DequeueController:
    """Of one logical queue. Keeps nothing but the requests that it holds."""

    def __init__(self, store: Store, definition: Definition, costs: Costs) -> None:
        self.definition = definition
        self.counts = DequeueCounts()
        self._store = store
        self._costs = costs
        self._loop = asyncio.get_running_loop()
        self._method = make_method(definition)
        self._held: dict[Request, _Held] = {}
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False
        store.watch(definition.name, self._on_ready)
        self._look_soon()

    @property
    def parked(self) -> int:
        return len(self._held)

    @property
    def sleep_s(self) -> float:
        """How long a request that misses now would sleep."""
        return self._method.sleep_s

    def redefine(self, definition: Definition) -> None:
        """The queue's settings have changed; requests that are held begin anew under them."""
        self.definition = definition
        self._method = make_method(definition)
        self._look_soon()
        self._wake_all()

    async def close(self) -> None:
        """Requests that are held are answered with nothing: their clients ask elsewhere."""
        self._is_closed = True
        self._wake_all()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def dequeue(self, wanted: Dequeue) -> list[Leased]:
        """Up to `wanted.max` messages; none when none came in time. Cancel it when the client goes away."""
        check_dequeue(wanted)
        request = Request(wanted.max, wanted.min, self._loop.time() + wanted.wait_s)
        self.counts.requests += 1
        found: list[Leased] = []
        if not wanted.wait_s and self._store.is_shared and self._method.wants_wakeups:
            await self._look_once()  # nobody listens, so nothing is known of what others have brought
        try:
            await self._serve(request, wanted.visibility_s, found)
        except BaseException:
            if found:
                await self.give_back([message.receipt for message in found])
            raise
        finally:
            self._wake(self._method.on_gone(request))
        self.counts.empty_replies += not found
        return found

    async def give_back(self, receipts: list[str]) -> int:
        """A reply could not be delivered: its messages are free again, and the delivery does not count."""
        count = await self._store.give_back(self.definition.name, receipts)
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
                    method = self._method
                    step = method.on_request(request, now_s)

    async def _lease(
        self, request: Request, physical: int, visibility_s: float, found: list[Leased]
    ) -> tuple[int, int]:
        """Adds what a physical queue gives: how many, and how many are left there. A message that must be alone in its
        reply completes it, or waits for one of its own."""
        request.tries += 1
        leasing = Timed(self._store.lease(self.definition.name, physical, request.wants, REPLY_BYTES_MAX, visibility_s))
        granted = await leasing
        is_single = len(granted.grants) == 1 and is_alone(
            granted.grants[0].delivery, self.definition.settings.max_deliveries
        )
        if is_single and found:
            await self._store.give_back(self.definition.name, [granted.grants[0].receipt])
            request.max = request.got
            return 0, granted.waiting + 1
        got = 0
        for grant in granted.grants:
            body = unseal(grant.sealed)
            if body is None:
                await self._store.set_aside(self.definition.name, physical, grant.sequence)
            else:
                got += 1
                found.append(Leased(grant.receipt, grant.delivery, physical, grant.sequence, msgspec.Raw(body)))
        self._count(got, leasing.seconds)
        request.got += got
        if is_single and got:
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
            self._store.listen(self.definition.name, is_on=self._method.wants_wakeups)
            self._look_soon()
        try:
            await woken
        finally:
            held.timer.cancel()
            del self._held[request]
            if not self._held:
                self._store.listen(self.definition.name, is_on=False)

    # Wake-ups, and looking at the store now and then.

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

    def _look_soon(self) -> None:
        if self._look_period_s() is not None and (self._looking is None or self._looking.done()):
            self._looking = self._loop.create_task(self._look())

    def _look_period_s(self) -> float | None:
        """PMS counts the queues always; wake-ups are checked for losses while somebody waits for one."""
        if self._method.monitor_period_s is not None:
            return self._method.monitor_period_s
        return SAFETY_CHECK_S if self._method.wants_wakeups and self._held else None

    async def _look(self) -> None:
        while (period_s := self._look_period_s()) is not None:
            await asyncio.sleep(period_s)
            try:
                await self._look_once()
            except TidegateError as error:
                log.warning("queue %s cannot be looked at: %s", self.definition.name, error)

    async def _look_once(self) -> None:
        looking = Timed(self._store.levels(self.definition.name))
        levels = await looking
        counts = [level.waiting for level in levels]
        if self._method.monitor_period_s is not None:
            self.counts.monitored += len(levels)
            self._costs.monitored(len(levels), looking.seconds)
            self._method.on_counts(counts, self._loop.time())
        else:
            for physical, waiting in enumerate(counts):
                self._on_ready(physical, waiting)


def make_method(definition: Definition) -> DequeueMethod:
    """The method that a queue's settings name. Each controller starts its rounds at another physical queue."""
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
    """Raises QueueError for limits that make no sense."""
    for name, value, low, high in (
        ("max", wanted.max, 1, DEQUEUE_MESSAGES_MAX),
        ("min", wanted.min, 1, wanted.max),
        ("wait_s", wanted.wait_s, 0, WAIT_S_MAX),
        ("visibility_s", wanted.visibility_s, 0, VISIBILITY_S_MAX),
    ):
        if not low <= value <= high:
            raise QueueError("Q908", f"{name} is {value}", f"use a {name} from {low} to {high:g}")


def _complete(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
