"""Durable subscriptions: a filter with its own queue at the broker, which this program reads in order.

A durable subscription exists under its name until somebody unsubscribes it, or until nobody has read it for
`expires_s`, 7 days by default. Notifications that match meanwhile wait in the queue. One program reads it at a time.

A delivery is deleted when the program asks for the next one. So a program that crashes receives again the delivery that
it was working on, and few others twice.

After a reconnection the broker delivers again what was not deleted. The client drops messages that the
program has already received: both their place in the queue and their publisher's sequence are at or below the last one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NoReturn

from tidegate.client.consumer import LeasedStream
from tidegate.client.link import not_open
from tidegate.client.message import Message
from tidegate.client.queue_requests import QueueRequests
from tidegate.client.subscriber import Delivery, SubscriptionStatistics, remember
from tidegate.filters import Filter
from tidegate.messages import Dequeue

SUBSCRIPTION: Final = "subscription."
TAKEN_MAX: Final = 1000


class DurableSubscription(LeasedStream[Delivery]):
    """`async for delivery in subscription`, as for a Subscription. Without a filter it resumes an existing one."""

    def __init__(
        self,
        requests: QueueRequests,
        name: str,
        subscription_filter: Filter | None,
        policy: str,
        expires_s: float | None = None,
    ) -> None:
        super().__init__(requests, Dequeue(SUBSCRIPTION + name, TAKEN_MAX))
        self.name = name
        self.filter = subscription_filter
        self.policy = policy
        self.expires_s = expires_s
        self._last_place = 0
        self._last: OrderedDict[str, int] = OrderedDict()
        self._received = 0
        self._doubled = 0

    async def __anext__(self) -> Delivery:
        return _delivery(await self._next_message())

    async def take(self) -> list[Delivery]:
        """Waits for deliveries and returns all of them, at least one. They are done when the program asks for more."""
        return [_delivery(message) for message in await self._next_messages()]

    def close(self) -> None:
        """Stops reading; the subscription stays at the broker. The delivery in progress is delivered again."""
        if self._is_started and not self._is_closed:
            self._requests.tasks.create_task(self.finish())

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(self._received, 0, self._doubled, len(self._waiting))

    async def _enter(self) -> None:
        if self._is_closed:
            raise not_open()
        await self._start()

    async def _begin(self) -> None:
        if self.filter is None:
            await self._requests.call("describe", SUBSCRIPTION + self.name)
        else:
            arguments = {"filter": self.filter.text, "policy": self.policy, "expires_s": self.expires_s}
            await self._requests.call("subscribe", self.name, arguments)

    def _accepted(self, messages: list[Message]) -> list[Message]:
        """Returns the messages that the program has not received before. The others are done."""
        accepted = []
        for message in messages:
            publisher, sequence = message.device, message.device_sequence
            if message.sequence <= self._last_place and sequence <= self._last.get(publisher, 0):
                self._doubled += 1
                self._leases.done([message])
                continue
            self._last_place = max(self._last_place, message.sequence)
            remember(self._last, publisher, sequence)
            accepted.append(message)
        self._received += len(accepted)
        return accepted

    def _raise_closed(self) -> NoReturn:
        raise StopAsyncIteration


def _delivery(message: Message) -> Delivery:
    return Delivery(0, message.device_sequence, message.body, message.device)
