"""What tests ask of a broker, besides notifications: is it well, what does it count, and has something come true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from broker_process import BrokerProcess

from tidegate import Connection, Delivery, Subscription, connect, connect_sync

WAIT_S = 10
T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T], timeout_s: float = WAIT_S) -> T:
    """Runs an async scenario; one that hangs is a TimeoutError."""

    async def bounded() -> T:
        async with asyncio.timeout(timeout_s):
            return await scenario

    return asyncio.run(bounded())


def assert_healthy(broker: BrokerProcess) -> None:
    """A newcomer is served."""
    assert broker.is_up()
    with connect_sync(broker.native) as connection, connection.subscribe("health") as subscription:
        connection.publish({"health": 1})
        assert [d.notification for d in subscription.take(WAIT_S)] == [{"health": 1}]


async def load(connection: Connection) -> dict[str, Any]:
    """What the Connection Point counts."""
    counts: dict[str, Any] = (await connection.status())["load"]["connection_point"]
    return counts


async def wait_load(connection: Connection, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The counts, once they are so."""
    while not is_reached(counts := await load(connection)):
        await asyncio.sleep(0.02)
    return counts


def broker_load(broker: BrokerProcess) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with connect(broker.native) as connection:
            return await load(connection)

    return run(ask())


def wait_until(is_reached: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_reached():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.01)


async def take(subscription: Subscription, count: int) -> list[Delivery]:
    """Exactly so many deliveries."""
    taken: list[Delivery] = []
    while len(taken) < count:
        taken += await subscription.take()
    assert len(taken) == count, (len(taken), count)
    return taken


async def take_until(subscription: Subscription, is_last: Callable[[Delivery], bool]) -> list[Delivery]:
    """All deliveries before the one that is a sign of the end."""
    taken: list[Delivery] = []
    async for delivery in subscription:
        if is_last(delivery):
            return taken
        taken.append(delivery)
    raise AssertionError("the subscription ended before the last delivery")


def assert_in_order(deliveries: list[Delivery]) -> None:
    """Each publisher's sequences rise: nothing doubled, nothing out of order."""
    last: dict[str, int] = {}
    for delivery in deliveries:
        assert delivery.sequence > last.get(delivery.publisher, 0), delivery
        last[delivery.publisher] = delivery.sequence
