"""Durable subscriptions: a filter with a queue of its own at the broker, which this program reads in order.

It is there under its name until somebody forgets it, whether or not a program reads it: what matches meanwhile waits.
One program reads it at a time. A delivery is deleted when the next one is asked for; so a program that dies gets again
what it worked on, and little else twice.

After a reconnection the broker gives again what was not deleted. What the program has had by then is dropped here: a
message at a place, of a publisher and with a sequence, that all have been passed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final, Self

from tidegate.client.consumer import Leases
from tidegate.client.link import not_open
from tidegate.client.message import Message
from tidegate.client.queue_requests import QueueRequests
from tidegate.client.subscriber import PUBLISHERS_REMEMBERED_MAX, Delivery, SubscriptionStatistics
from tidegate.filters import Filter
from tidegate.messages import Dequeue

SUBSCRIPTION: Final = "subscription."
TAKEN_MAX: Final = 1000


class DurableSubscription:
    """`async for delivery in subscription`, as for a Subscription; without a filter it resumes one that is there."""

    def __init__(self, requests: QueueRequests, name: str, subscription_filter: Filter | None, policy: str) -> None:
        self.name = name
        self.filter = subscription_filter
        self.policy = policy
        self._requests = requests
        self._leases = Leases(requests, Dequeue(SUBSCRIPTION + name, TAKEN_MAX))
        self._waiting: deque[Message] = deque()
        self._current: list[Message] = []
        self._last_place = 0
        self._last: OrderedDict[str, int] = OrderedDict()
        self._starting = asyncio.Lock()
        self._taking: asyncio.Task[list[Message]] | None = None
        self._is_started = False
        self._is_entered = False
        self._is_closed = False
        self._received = 0
        self._doubled = 0

    async def __aenter__(self) -> Self:
        self._is_entered = True
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What the program worked on is done when it leaves without an error."""
        if kind is None:
            self.done()
        await self.finish()

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self if self._is_entered else self._until_left()

    async def __anext__(self) -> Delivery:
        await self._wait_for_some()
        self._current = [self._waiting.popleft()]
        return _delivery(self._current[0])

    async def take(self) -> list[Delivery]:
        """All deliveries that wait, at least one; they are done when more are asked for."""
        await self._wait_for_some()
        self._current = list(self._waiting)
        self._waiting.clear()
        return [_delivery(message) for message in self._current]

    def done(self) -> None:
        """What the program has been given is done with, without asking for more."""
        self._leases.done(self._take_current())

    def close(self) -> None:
        """Stops reading; the subscription stays at the broker. What the program works on is delivered again."""
        if self._is_started and not self._is_closed:
            self._requests.tasks.create_task(self.finish())

    async def finish(self) -> None:
        if self._is_started and not self._is_closed:
            self._is_closed = True
            if self._taking is not None:
                self._taking.cancel()
            try:
                await self._leases.close(self._take_current())
            finally:
                self._requests.consumers.discard(self)

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(self._received, 0, self._doubled, len(self._waiting))

    async def _until_left(self) -> AsyncIterator[Delivery]:
        try:
            while True:
                yield await anext(self)
        except StopAsyncIteration:
            return
        finally:
            await self.finish()

    async def _start(self) -> None:
        async with self._starting:
            if self._is_closed:
                raise not_open()
            if self._is_started:
                return
            if self.filter is None:
                await self._requests.call("describe", SUBSCRIPTION + self.name)
            else:
                arguments = {"filter": self.filter.text, "policy": self.policy}
                await self._requests.call("subscribe", self.name, arguments)
            self._is_started = True
            self._leases.start()
            self._requests.consumers.add(self)

    async def _wait_for_some(self) -> None:
        self.done()
        if not self._is_started:
            await self._start()
        while not self._waiting:
            if self._is_closed:
                raise StopAsyncIteration
            for message in await self._take_batch():
                self._on_message(message)

    async def _take_batch(self) -> list[Message]:
        """A task of its own, which `close` ends while the program waits for it."""
        self._taking = asyncio.ensure_future(self._leases.take())
        try:
            return await self._taking
        except asyncio.CancelledError:
            if self._is_closed:
                return []
            self._taking.cancel()
            raise
        finally:
            self._taking = None

    def _on_message(self, message: Message) -> None:
        publisher, sequence = message.device, message.device_sequence
        if message.sequence <= self._last_place and sequence <= self._last.get(publisher, 0):
            self._doubled += 1
            self._leases.done([message])
            return
        self._last_place = max(self._last_place, message.sequence)
        self._last[publisher] = sequence
        if len(self._last) > PUBLISHERS_REMEMBERED_MAX:
            self._last.popitem(last=False)
        self._received += 1
        self._waiting.append(message)

    def _take_current(self) -> list[Message]:
        current, self._current = self._current, []
        return current


def _delivery(message: Message) -> Delivery:
    return Delivery(0, message.device_sequence, message.body, message.device)
