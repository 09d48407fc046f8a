"""Persistent queries over notifications: a subscription whose deliveries and drops are counted as one sequence.

A check is a round trip on the link of the subscriptions. The link keeps order, so when the answer is read, everything
that was delivered or dropped before it has been counted. A reconnection counts as one loss, because it is unknown how
much was published meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from tidegate.client.persistent_transport import Checked, Heard, Indicated, Opened
from tidegate.client.subscriber import Delivery, Subscriber, Subscription, WantedFilter
from tidegate.errors import TidegateError
from tidegate.filters import Filter

WAITING_MAX: Final = 1000
POLICY: Final = "drop-oldest"


class FilterTransport:
    is_resumable = False

    def __init__(self, subscriber: Subscriber, wanted: Filter, tasks: asyncio.TaskGroup) -> None:
        self._subscriber = subscriber
        self._wanted = WantedFilter(wanted)
        self._tasks = tasks

    async def open(self, subscription: str, sequence: int) -> FilterLink:
        live = self._subscriber.subscribe(self._wanted, POLICY)
        try:
            await live.__aenter__()
        except BaseException:
            live.close()
            raise
        return FilterLink(self._subscriber, live, sequence, self._tasks)


class _RoundTrip(NamedTuple):
    """The numbers of notifications delivered and dropped when the broker answered a check."""

    check: int
    received: int
    missed: int


class FilterLink:
    def __init__(
        self, subscriber: Subscriber, subscription: Subscription, sequence: int, tasks: asyncio.TaskGroup
    ) -> None:
        self.opened = Opened("", sequence)
        self._subscriber = subscriber
        self._subscription = subscription
        self._tasks = tasks
        self._sequence = sequence
        self._read_deliveries = self._read_missed = 0
        self._round_trip: _RoundTrip | None = None
        self._heard: asyncio.Queue[Delivery | _RoundTrip | TidegateError] = asyncio.Queue(WAITING_MAX)
        self._taking = tasks.create_task(self._take())
        self._checking: asyncio.Task[None] | None = None

    def ask(self, check: int) -> None:
        self._stop_checking()  # the last check has timed out: its answer would be too late
        self._checking = self._tasks.create_task(self._make_round_trip(check))

    async def read(self) -> Heard:
        while True:
            # The answer to a check overtakes deliveries that still wait here: it counts once those have been read.
            # Drops that no delivery has reported yet raise its number, so that they show as a loss.
            done = self._round_trip
            if done is not None and self._read_deliveries >= done.received:
                self._round_trip = None
                return Checked(done.check, self._sequence + done.missed - self._read_missed)
            heard = await self._heard.get()
            if isinstance(heard, TidegateError):
                raise heard
            if isinstance(heard, Delivery):
                self._read_deliveries += 1
                self._read_missed += heard.missed
                self._sequence += 1 + heard.missed + heard.reconnected
                return Indicated(self._sequence, [heard.notification])
            self._round_trip = heard

    def close(self, *, is_final: bool) -> None:
        self._subscription.close()
        self._taking.cancel()
        self._stop_checking()

    def _stop_checking(self) -> None:
        if self._checking is not None:
            self._checking.cancel()

    async def _take(self) -> None:
        try:
            while True:
                for delivery in await self._subscription.take():
                    await self._heard.put(delivery)
        except TidegateError as error:
            await self._heard.put(error)
        except StopAsyncIteration:
            return

    async def _make_round_trip(self, check: int) -> None:
        try:
            await self._subscriber.status()
            counted = self._subscription.statistics()
            await self._heard.put(_RoundTrip(check, counted.received, counted.missed))
        except TidegateError as error:
            await self._heard.put(error)
