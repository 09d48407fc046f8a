"""Subscribing: an async iterator of deliveries for each filter, all over one link.

Deliveries wait here until the program takes them. At a bounded number for any subscription the link stops reading, and
the broker applies the policy of the subscription. After a reconnection all subscriptions are made again. Deliveries
that a restarted broker repeats are dropped by publisher and sequence.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tidegate.client.link import Link, LinkOptions, not_open, to_exception
from tidegate.client.stream import PushedStream
from tidegate.errors import FilterError, TidegateError
from tidegate.filters import Filter
from tidegate.frames import (
    Delivered,
    ErrorBody,
    Gap,
    Kind,
    Rebind,
    Subscribe,
    Unsubscribe,
    Welcome,
    decode_body,
    encode_frame,
)
from tidegate.notification import PAYLOAD, Value

WAITING_MAX: Final = 10_000
PUBLISHERS_REMEMBERED_MAX: Final = 100_000


class Delivery(Delivered, gc=False):
    """A notification as a subscription receives it, decoded in one step with its frame.

    `missed` counts the deliveries dropped just before it, because this program was slow and its policy is drop-oldest.
    `reconnected` is true for the first delivery after a reconnection: the subscription has missed what other clients
    published to the broker meanwhile."""

    publisher: str = ""
    missed: int = 0
    reconnected: bool = False

    @property
    def payload(self) -> bytes | None:
        return self.notification.get(PAYLOAD)


_decode_deliver: Final = msgspec.msgpack.Decoder(tuple[str, list[Delivery]]).decode


@dataclass(frozen=True)
class WantedFilter:
    """A filter with the text and the context that it was parsed from. Without a text, it has no context."""

    filter: Filter
    text: str = ""
    context: Mapping[str, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, wanted: str | Filter, context: Mapping[str, Value]) -> WantedFilter:
        if isinstance(wanted, Filter):
            return cls(wanted)
        return cls(Filter.parse(wanted, context), wanted, context)

    def rebound(self, values: Mapping[str, Value]) -> WantedFilter:
        if not self.text:
            raise FilterError(
                "F125", "the filter was not given as a text", "subscribe with a text that contains $names"
            )
        context = {**self.context, **values}
        return WantedFilter(Filter.parse(self.text, context), self.text, context)


@dataclass(frozen=True)
class SubscriptionStatistics:
    received: int
    missed: int
    doubled: int
    waiting: int


class Subscription(PushedStream[Delivery]):
    """`async for delivery in subscription`. `async with` waits until the subscription is live."""

    def __init__(self, subscriber: Subscriber, number: int, wanted: WantedFilter, policy: str) -> None:
        super().__init__(WAITING_MAX)
        self.policy = policy
        self._wanted = wanted
        self._subscriber = subscriber
        self._number = number
        self._ready: asyncio.Future[None] | None = None
        self._rebinding: deque[asyncio.Future[None]] = deque()
        self._last: OrderedDict[str, int] = OrderedDict()
        self._missed_before_next = 0
        self._has_reconnected = False
        self._received = 0
        self._missed = 0
        self._doubled = 0

    async def take(self) -> list[Delivery]:
        """Waits for deliveries and returns all of them, at least one. Raises StopAsyncIteration if closed."""
        await self._wait_for_some()
        deliveries = list(self._waiting)
        self._waiting.clear()
        self._on_taken()
        return deliveries

    @property
    def filter(self) -> Filter:
        """The filter as the broker has it, with the values of the context."""
        return self._wanted.filter

    async def context(self, **values: Value) -> None:
        """Replaces values for $name in the filter, for example when the subscriber has moved. Once this returns, all
        later notifications are matched by the new values. No notification is lost between the old filter and the new
        one."""
        self._wanted = self._wanted.rebound(values)
        await self._start()
        rebound = asyncio.get_running_loop().create_future()
        self._rebinding.append(rebound)
        self._subscriber.rebind(Rebind(self._number, self.filter.text))
        await asyncio.shield(rebound)

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(self._received, self._missed, self._doubled, len(self._waiting))

    async def _enter(self) -> None:
        await self._start()

    async def _start(self) -> None:
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            await self._subscriber.begin(self._number, self)
        await asyncio.shield(self._ready)

    def _on_taken(self) -> None:
        self._subscriber.on_taken(self)

    def _on_closed(self) -> None:
        self._fail_waiting(not_open())
        self._subscriber.ended(self._number)

    # The subscriber calls these.

    def request(self) -> Subscribe:
        return Subscribe(self._number, self.filter.text, self.policy)

    def on_ready(self) -> None:
        """Completes the start and all pending changes of context: SUBSCRIBE always carries the newest filter."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        while self._rebinding:
            self.on_rebound()

    def on_rebound(self) -> None:
        if self._rebinding:
            self._rebinding.popleft().set_result(None)

    def on_reconnected(self) -> None:
        """Marks the next delivery as `reconnected` if the subscription was live before."""
        self._has_reconnected |= self._ready is not None and self._ready.done()

    def on_gap(self, missed: int) -> None:
        self._missed_before_next += missed
        self._missed += missed

    def on_deliveries(self, publisher: str, deliveries: list[Delivery]) -> None:
        """Takes in deliveries of one publisher, in its order, and drops those already received."""
        last = self._last.get(publisher, 0)
        fresh = deliveries
        if deliveries[0].sequence <= last:
            fresh = [delivery for delivery in deliveries if delivery.sequence > last]
            self._doubled += len(deliveries) - len(fresh)
            if not fresh:
                return
        remember(self._last, publisher, fresh[-1].sequence)
        self._received += len(fresh)
        fresh[0].missed, fresh[0].reconnected = self._missed_before_next, self._has_reconnected
        self._missed_before_next, self._has_reconnected = 0, False
        self._add(fresh)

    def on_failed(self, error: TidegateError) -> None:
        self._fail(error)
        self._fail_waiting(error)

    def _fail_waiting(self, error: TidegateError) -> None:
        """Fails the calls that wait for the broker to confirm this subscription or its new filter."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        while self._rebinding:
            self._rebinding.popleft().set_exception(error)


class Subscriber:
    """All subscriptions of a connection, and the link that they share."""

    def __init__(self, options: LinkOptions, tasks: asyncio.TaskGroup) -> None:
        self._link = Link(options, "", self)
        self._tasks = tasks
        self._opening = asyncio.Lock()
        self._is_up = False
        self._next_number = 1
        self._subscriptions: dict[int, Subscription] = {}
        self._behind: set[int] = set()
        self._status: asyncio.Future[dict[str, Any]] | None = None

    def subscribe(self, wanted: WantedFilter, policy: str) -> Subscription:
        number = self._next_number
        self._next_number += 1
        return Subscription(self, number, wanted, policy)

    def rebind(self, rebind: Rebind) -> None:
        """Sends a new filter. While the link is down nothing is sent: a reconnection sends the newest filter."""
        self._link.write(encode_frame(Kind.REBIND, rebind))

    async def begin(self, number: int, subscription: Subscription) -> None:
        await self._wait_until_up()
        self._subscriptions[number] = subscription
        self._link.write(encode_frame(Kind.SUBSCRIBE, subscription.request()))

    def ended(self, number: int) -> None:
        if self._subscriptions.pop(number, None) is not None:
            self._link.write(encode_frame(Kind.UNSUBSCRIBE, Unsubscribe(number)))
            self._resume_reading(number)

    def on_taken(self, subscription: Subscription) -> None:
        """Notes that the program has taken deliveries. Resumes reading if no subscription is behind any more."""
        if self._behind and not subscription.is_behind:
            for number in [n for n in self._behind if not self._is_behind(n)]:
                self._resume_reading(number)

    async def status(self) -> dict[str, Any]:
        """Returns the broker's report on its layers and load. Concurrent calls share one request."""
        await self._wait_until_up()
        if self._status is None:
            self._status = asyncio.get_running_loop().create_future()
            self._link.write(encode_frame(Kind.STATUS))
        return await asyncio.shield(self._status)

    def close(self) -> None:
        for subscription in list(self._subscriptions.values()):
            subscription.close()
        if self._status is not None:
            self._status.set_exception(not_open())
            self._status = None
        self._link.close()

    # The link calls these.

    def on_welcome(self, welcome: Welcome) -> None:
        for subscription in self._subscriptions.values():
            subscription.on_reconnected()
            self._link.write(encode_frame(Kind.SUBSCRIBE, subscription.request()))
        if self._status is not None:
            self._link.write(encode_frame(Kind.STATUS))

    def on_frame(self, kind: int, sequence: int, body: memoryview) -> None:
        match kind:
            case Kind.DELIVER:
                self._on_deliver(*_decode_deliver(body))
            case Kind.SUBSCRIBED | Kind.REBOUND:
                if (subscription := self._subscriptions.get(sequence)) is not None:
                    (subscription.on_ready if kind == Kind.SUBSCRIBED else subscription.on_rebound)()
            case Kind.GAP:
                self._on_gap(decode_body(body, Gap))
            case Kind.ERROR:
                error: ErrorBody = decode_body(body, ErrorBody)
                if (refused := self._subscriptions.pop(error.subscription or 0, None)) is not None:
                    refused.on_failed(to_exception(error))
            case Kind.STATUS_REPLY:
                if self._status is not None:
                    self._status.set_result(decode_body(body, dict))
                    self._status = None

    def on_failed(self, error: TidegateError) -> None:
        """Fails all subscriptions after a final error of the link. The next subscription opens the link again."""
        self._is_up = False
        for subscription in self._subscriptions.values():
            subscription.on_failed(error)
        self._subscriptions.clear()
        self._behind.clear()
        if self._status is not None:
            self._status.set_exception(error)
            self._status = None

    def on_writable(self) -> None:
        """Does nothing: a subscriber writes so little that it never waits for the transport."""

    # Internals.

    async def _wait_until_up(self) -> None:
        """Waits until the link is up. The first caller opens it; concurrent callers wait for that."""
        async with self._opening:
            if not self._is_up:
                await self._link.start(self._tasks)
                self._is_up = True

    def _on_deliver(self, publisher: str, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            delivery.publisher = publisher
        for number, mine in by_subscription(deliveries).items():
            subscription = self._subscriptions.get(number)
            if subscription is not None:
                subscription.on_deliveries(publisher, mine)
                if subscription.is_behind:
                    self._behind.add(number)
                    self._link.pause_reading()

    def _on_gap(self, gap: Gap) -> None:
        for number, missed in gap.dropped.items():
            if (subscription := self._subscriptions.get(number)) is not None:
                subscription.on_gap(missed)

    def _is_behind(self, number: int) -> bool:
        subscription = self._subscriptions.get(number)
        return subscription is not None and subscription.is_behind

    def _resume_reading(self, number: int) -> None:
        self._behind.discard(number)
        if not self._behind:
            self._link.resume_reading()


def remember(last: OrderedDict[str, int], publisher: str, sequence: int) -> None:
    """Notes the last sequence of a publisher. At the bound, the earliest publisher is forgotten."""
    last[publisher] = sequence
    if len(last) > PUBLISHERS_REMEMBERED_MAX:
        last.popitem(last=False)


def by_subscription(deliveries: list[Delivery]) -> dict[int, list[Delivery]]:
    """Groups deliveries by subscription, in order. Usually all are for one, which gets the list itself."""
    addressed = {delivery.subscriptions for delivery in deliveries}
    if len(addressed) == 1 and isinstance(number := addressed.pop(), int):
        return {number: deliveries}
    mine: dict[int, list[Delivery]] = {}
    for delivery in deliveries:
        numbers = delivery.subscriptions
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            # A copy, because each subscription sets `missed` and `reconnected` on its own deliveries.
            mine.setdefault(number, []).append(copy(delivery))
    return mine
