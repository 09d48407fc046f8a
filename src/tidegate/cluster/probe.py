"""Probe: publishes notifications through a broker and subscribes to them many times over, so that every Matcher holds
some of its subscriptions. It detects what a change of the layers loses, duplicates, reorders or delays.

What may go wrong here: the broker itself ends. Then the probe's subscriptions start again elsewhere, and notifications
that were published meanwhile count as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from tidegate.client import Connection, Subscription
from tidegate.errors import TidegateError

SUBSCRIPTIONS: Final = 16
PERIOD_S: Final = 0.01
# How long the last notifications may take to arrive before they count as lost.
ARRIVE_S: Final = 10.0


@dataclass(frozen=True)
class Findings:
    """`delays_s` has one delay per notification, from the call that published it to its last subscription; `sent_s` has
    the time of that call. The counts are of deliveries: one per notification and subscription is correct."""

    sent_s: list[float]
    delays_s: list[float]
    lost: int
    doubled: int
    disordered: int


@contextlib.asynccontextmanager
async def open_probe(
    make_connection: Callable[[], Connection], on_refused: Callable[[TidegateError], None]
) -> AsyncIterator[Probe | None]:
    """Opens a connection and a probe on it. If this process cannot be a client of the broker, for example because it
    has no certificate, calls `on_refused` and yields None."""
    async with contextlib.AsyncExitStack() as stack:
        probe = None
        try:
            probe = Probe(await stack.enter_async_context(make_connection()))
            await stack.enter_async_context(probe)
        except TidegateError as error:
            probe = None
            on_refused(error)
        yield probe


class Probe:
    """Use it in `async with`; the connection must be open. A hundred times a second it publishes `at_once`
    notifications. `attributes(number)` returns extra attributes for each, beside those of the probe itself."""

    def __init__(
        self, connection: Connection, at_once: int = 1, attributes: Callable[[int], dict[str, Any]] | None = None
    ) -> None:
        self._connection = connection
        self._at_once = at_once
        self._attributes = attributes or (lambda _n: {})
        self._token = secrets.token_hex(8)
        self._stack = contextlib.AsyncExitStack()
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._sent_s: list[float] = []
        self._arrived_s: list[dict[int, float]] = []
        self._doubled = 0
        self._disordered = 0
        self._stopping = asyncio.Event()
        self._has_arrived = asyncio.Event()

    async def __aenter__(self) -> Self:
        for _ in range(SUBSCRIPTIONS):
            subscription = self._connection.subscribe(f"tidegate_probe=={self._token}")
            self._subscriptions.append(await self._stack.enter_async_context(subscription))
        self._arrived_s = [{} for _ in self._subscriptions]
        # Not in a TaskGroup: a probe that fails must not cancel the change that it watches.
        self._tasks = [
            asyncio.create_task(self._read(subscription, arrived_s))
            for subscription, arrived_s in zip(self._subscriptions, self._arrived_s, strict=True)
        ]
        self._tasks.append(asyncio.create_task(self._publish()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def finish(self) -> Findings:
        """Stops publishing, waits for the notifications in flight, and returns the findings."""
        self._stopping.set()
        await self._tasks[-1]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARRIVE_S):
                await self._connection.flush()
                while min(map(len, self._arrived_s)) < len(self._sent_s):
                    self._has_arrived.clear()
                    await self._has_arrived.wait()
        return self.findings()

    def findings(self) -> Findings:
        """Returns the findings so far. Notifications in flight count as lost."""
        doubled = sum(subscription.statistics().doubled for subscription in self._subscriptions)
        sent, delays_s = [], []
        for n, sent_s in enumerate(self._sent_s):
            if all(n in arrived_s for arrived_s in self._arrived_s):
                sent.append(sent_s)
                delays_s.append(max(arrived_s[n] for arrived_s in self._arrived_s) - sent_s)
        lost = sum(len(self._sent_s) - len(arrived_s) for arrived_s in self._arrived_s)
        return Findings(sent, delays_s, lost, self._doubled + doubled, self._disordered)

    async def _publish(self) -> None:
        next_s = time.monotonic()
        while not self._stopping.is_set():
            for _ in range(self._at_once):
                n = len(self._sent_s)
                self._sent_s.append(time.monotonic())
                await self._connection.publish_soon(self._attributes(n) | {"tidegate_probe": self._token, "n": n})
            next_s = max(next_s + PERIOD_S, time.monotonic() - PERIOD_S)
            await asyncio.sleep(next_s - time.monotonic())

    async def _read(self, subscription: Subscription, arrived_s: dict[int, float]) -> None:
        highest = -1
        async for delivery in subscription:
            n = delivery.notification["n"]
            if n in arrived_s:
                self._doubled += 1
                continue
            self._disordered += n < highest
            highest = max(highest, n)
            arrived_s[n] = time.monotonic()
            self._has_arrived.set()
