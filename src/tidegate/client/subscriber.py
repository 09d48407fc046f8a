"""Subscribing: an async iterator of deliveries for each filter, over one link.

Deliveries wait here until the program takes them, a bounded number for each subscription; past it the link is not
read, and the broker's policy decides. After a reconnection every subscription is made again, and what a restarted
broker delivers a second time is dropped by publisher and sequence.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from tidegate.client.link import Link, LinkOptions, not_open, to_exception
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
    """A notification as it reached a subscription: decoded in one step with the frame that brought it.

    `missed` counts the deliveries that were lost just before it, because this program was slow and its policy is
    drop-oldest. `reconnected` is true for the first delivery after a reconnection: what was published meanwhile to a
    broker that was up is lost to this subscription."""

    publisher: str = ""
    missed: int = 0
    reconnected: bool = False

    @property
    def payload(self) -> bytes | None:
        return self.notification.get(PAYLOAD)


_decode_deliver: Final = msgspec.msgpack.Decoder(tuple[str, list[Delivery]]).decode


@dataclass(frozen=True)
class WantedFilter:
    """A filter, and the text and context that it was made of; without a text it names no context."""

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
            raise FilterError("F125", "the filter was not given as a text", "subscribe with a text that has $names")
        context = {**self.context, **values}
        return WantedFilter(Filter.parse(self.text, context), self.text, context)


@dataclass(frozen=True)
class SubscriptionStatistics:
    received: int
    missed: int
    doubled: int
    waiting: int


class Subscription:
    """`async for delivery in subscription`. Use it in `async with` to know that it is live before you go on."""

    def __init__(self, subscriber: Subscriber, number: int, wanted: WantedFilter, policy: str) -> None:
        self.policy = policy
        self._wanted = wanted
        self._subscriber = subscriber
        self._number = number
        self._waiting: deque[Delivery] = deque()
        self._wake = asyncio.Event()
        self._ready: asyncio.Future[None] | None = None
        self._rebinding: deque[asyncio.Future[None]] = deque()
        self._error: TidegateError | None = None
        self._is_entered = False
        self._is_closed = False
        self._last: OrderedDict[str, int] = OrderedDict()
        self._missed_before_next = 0
        self._has_reconnected = False
        self._received = 0
        self._missed = 0
        self._doubled = 0

    async def __aenter__(self) -> Self:
        self._is_entered = True
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self if self._is_entered else self._until_left()

    async def __anext__(self) -> Delivery:
        await self._wait_for_some()
        delivery = self._waiting.popleft()
        self._subscriber.took(self)
        return delivery

    async def _until_left(self) -> AsyncIterator[Delivery]:
        """Without `async with`, whoever leaves the loop leaves the subscription: nobody would take its deliveries, and
        they would fill the link that it shares with others."""
        try:
            while True:
                yield await anext(self)
        except StopAsyncIteration:
            return
        finally:
            self.close()

    async def take(self) -> list[Delivery]:
        """All deliveries that wait, at least one: for programs that work in batches. StopAsyncIteration when closed."""
        await self._wait_for_some()
        deliveries = list(self._waiting)
        self._waiting.clear()
        self._subscriber.took(self)
        return deliveries

    def close(self) -> None:
        """Ends it at the broker; iteration stops when what waits is taken."""
        if not self._is_closed:
            self._is_closed = True
            self._wake.set()
            self._fail_waiting(not_open())
            self._subscriber.ended(self._number)

    @property
    def filter(self) -> Filter:
        """As the broker has it: with the values of the context."""
        return self._wanted.filter

    async def context(self, **values: Value) -> None:
        """The subscriber is somewhere else: values that its filter names by $name are others now. When this returns,
        everything that is published is matched by the new ones; nothing falls between the old and the new."""
        self._wanted = self._wanted.rebound(values)
        await self._start()
        rebound = asyncio.get_running_loop().create_future()
        self._rebinding.append(rebound)
        self._subscriber.rebind(Rebind(self._number, self.filter.text))
        await asyncio.shield(rebound)

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(self._received, self._missed, self._doubled, len(self._waiting))

    @property
    def is_behind(self) -> bool:
        return len(self._waiting) >= WAITING_MAX

    async def _start(self) -> None:
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            await self._subscriber.begin(self._number, self)
        await asyncio.shield(self._ready)

    async def _wait_for_some(self) -> None:
        if self._waiting:
            return
        await self._start()
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()

    # The subscriber calls these.

    def request(self) -> Subscribe:
        return Subscribe(self._number, self.filter.text, self.policy)

    def on_ready(self) -> None:
        """After a reconnection with the newest filter, so that nobody waits for another any more."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        while self._rebinding:
            self.on_rebound()

    def on_rebound(self) -> None:
        if self._rebinding:
            self._rebinding.popleft().set_result(None)

    def on_reconnected(self) -> None:
        """If it was live before, what was published meanwhile is lost to it."""
        self._has_reconnected |= self._ready is not None and self._ready.done()

    def on_gap(self, missed: int) -> None:
        self._missed_before_next += missed
        self._missed += missed

    def on_deliveries(self, publisher: str, deliveries: list[Delivery]) -> None:
        """Deliveries of one publisher, in its order."""
        last = self._last.get(publisher, 0)
        fresh = deliveries
        if deliveries[0].sequence <= last:
            fresh = [delivery for delivery in deliveries if delivery.sequence > last]
            self._doubled += len(deliveries) - len(fresh)
            if not fresh:
                return
        self._last[publisher] = fresh[-1].sequence
        if len(self._last) > PUBLISHERS_REMEMBERED_MAX:
            self._last.popitem(last=False)
        self._received += len(fresh)
        fresh[0].missed, fresh[0].reconnected = self._missed_before_next, self._has_reconnected
        self._missed_before_next, self._has_reconnected = 0, False
        self._waiting.extend(fresh)
        self._wake.set()

    def on_failed(self, error: TidegateError) -> None:
        self._error = error
        self._wake.set()
        self._fail_waiting(error)

    def _fail_waiting(self, error: TidegateError) -> None:
        """Whoever waits for the broker's word on this subscription."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        while self._rebinding:
            self._rebinding.popleft().set_exception(error)


class Subscriber:
    """All subscriptions of a connection."""

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
        """While the link is down nothing is sent: the subscription is made again with its newest filter."""
        self._link.write(encode_frame(Kind.REBIND, rebind))

    async def begin(self, number: int, subscription: Subscription) -> None:
        await self._up()
        self._subscriptions[number] = subscription
        self._link.write(encode_frame(Kind.SUBSCRIBE, subscription.request()))

    def ended(self, number: int) -> None:
        if self._subscriptions.pop(number, None) is not None:
            self._link.write(encode_frame(Kind.UNSUBSCRIBE, Unsubscribe(number)))
            self._read_on(number)

    def took(self, subscription: Subscription) -> None:
        """The program has taken deliveries: read on when none of its subscriptions is behind."""
        if self._behind and not subscription.is_behind:
            for number in [n for n in self._behind if not self._is_behind(n)]:
                self._read_on(number)

    async def status(self) -> dict[str, Any]:
        """The broker's own account of its layers and load."""
        await self._up()
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
        """The link has ended for good; the next subscription begins a new one."""
        self._is_up = False
        for subscription in self._subscriptions.values():
            subscription.on_failed(error)
        self._subscriptions.clear()
        self._behind.clear()
        if self._status is not None:
            self._status.set_exception(error)
            self._status = None

    def on_writable(self) -> None:
        """A subscriber writes little; nothing waits for this."""

    # Inside.

    async def _up(self) -> None:
        """The link is opened by whoever needs it first; the others wait for that."""
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

    def _read_on(self, number: int) -> None:
        self._behind.discard(number)
        if not self._behind:
            self._link.resume_reading()


def by_subscription(deliveries: list[Delivery]) -> dict[int, list[Delivery]]:
    """Each subscription's own deliveries, in order. Most often all are for one, which then gets the list as it came."""
    addressed = {delivery.subscriptions for delivery in deliveries}
    if len(addressed) == 1 and isinstance(number := addressed.pop(), int):
        return {number: deliveries}
    mine: dict[int, list[Delivery]] = {}
    for delivery in deliveries:
        numbers = delivery.subscriptions
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            # A copy, for each subscription marks its own with what was missed before it.
            mine.setdefault(number, []).append(copy(delivery))
    return mine
