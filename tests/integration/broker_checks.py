"""Checks of a broker besides notifications: its health, its counters, and waiting for a condition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from broker_process import BrokerProcess

from tidegate import Connection, Delivery, Subscription, connect, connect_sync

WAIT_S = 30
T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T], timeout_s: float = WAIT_S) -> T:
    """Runs an async scenario, and raises TimeoutError if it hangs."""

    async def bounded() -> T:
        async with asyncio.timeout(timeout_s):
            return await scenario

    return asyncio.run(bounded())


def assert_healthy(broker: BrokerProcess) -> None:
    """Checks that the broker serves a new client."""
    assert broker.is_up()
    connected = connect_sync(broker.native, connect_timeout_s=WAIT_S)
    with connected as connection, connection.subscribe("health") as subscription:
        connection.publish({"health": 1})
        assert [d.notification for d in subscription.take(WAIT_S)] == [{"health": 1}]


async def load(connection: Connection) -> dict[str, Any]:
    """Returns the counters of the Connection Point."""
    counts: dict[str, Any] = (await connection.status())["load"]["connection_point"]
    return counts


async def wait_load(connection: Connection, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Waits until the counters satisfy the condition, and returns them."""
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
    """Returns exactly `count` deliveries."""
    taken: list[Delivery] = []
    while len(taken) < count:
        taken += await subscription.take()
    assert len(taken) == count, (len(taken), count)
    return taken


async def take_until(subscription: Subscription, is_last: Callable[[Delivery], bool]) -> list[Delivery]:
    """Returns all deliveries before the one for which `is_last` is true."""
    taken: list[Delivery] = []
    async for delivery in subscription:
        if is_last(delivery):
            return taken
        taken.append(delivery)
    raise AssertionError("the subscription ended before the last delivery")


def assert_in_order(deliveries: list[Delivery]) -> None:
    """Checks that each publisher's sequences increase, so that none is a duplicate or out of order."""
    last: dict[str, int] = {}
    for delivery in deliveries:
        assert delivery.sequence > last.get(delivery.publisher, 0), delivery
        last[delivery.publisher] = delivery.sequence
