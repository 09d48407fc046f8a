"""Tidegate as a contender: its broker as users start it, its asyncio client as users call it.

The subscriber's policy is `block`, so that nothing is dropped and a publisher is no faster than its subscriber.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from benchmarks.job import Received, wait_for_go
from benchmarks.processes import RUN_S, Line, Server, Worker
from benchmarks.workload import WANTED, Reading, make_readings, rounds_of
from tidegate.client import Connection, connect

# What a publisher has in flight: like a program with some tasks, or like a loop that does not wait for each call.
NOTIFICATIONS_UNDER_WAY: Final = 4096
CALLS_UNDER_WAY_MAX: Final = 64
_SUBSCRIBING_AT_ONCE: Final = 1000


@dataclass(frozen=True)
class Broker:
    pid: int
    native: str
    http: str
    ssap: str


@contextmanager
def tidegate_broker(*flags: str) -> Iterator[Broker]:
    """Runs `tidegate serve` with its default bounds, on free ports, with a new data directory."""
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as data, broker_on(data, *flags) as broker:
        yield broker


@contextmanager
def broker_on(data: str, *flags: str) -> Iterator[Broker]:
    """Runs `tidegate serve` on an existing data directory, which is kept."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    command = [sys.executable, "-m", "tidegate", "serve", "--native-port", "0", "--http-port", "0", "--ssap-port", "-1"]
    with Server([*command, "--data", data, "--log-level", "warning", *flags], clean) as server:
        ready = json.loads(server.read_line())["ready"]
        yield Broker(server.pid, ready["native"], ready["http"], ready["ssap"])


@contextmanager
def subscribed(address: str, filters: list[str]) -> Iterator[float]:
    """Keeps subscriptions in another process, and yields the seconds that it took to make them."""
    with Worker(_keep_subscriptions, address, filters) as keeper:
        yield keeper.wait_ready()
        keeper.kill()


def publish_batches(line: Line, address: str, count: int, batch: int) -> int:
    """Publishes acknowledged lists of `batch` notifications, with several in flight. A batch of 1 is a call each."""

    async def publish_all(broker: Connection, readings: list[Reading]) -> None:
        batches = rounds_of(readings, batch, count)

        async def publish_some() -> None:
            for part in batches:
                await broker.publish(part if batch > 1 else part[0])

        async with asyncio.TaskGroup() as tasks:
            for _ in range(max(1, min(NOTIFICATIONS_UNDER_WAY // batch, CALLS_UNDER_WAY_MAX))):
                tasks.create_task(publish_some())

    return asyncio.run(_publish(line, address, count, publish_all))


def publish_soon(line: Line, address: str, count: int) -> int:
    """Publishes with a call per notification that does not wait for the acknowledgement. Waits for all at the end."""

    async def publish_all(broker: Connection, readings: list[Reading]) -> None:
        for part in rounds_of(readings, 64, count):
            for reading in part:
                await broker.publish_soon(reading)
            await asyncio.sleep(0)
        await broker.flush()

    return asyncio.run(_publish(line, address, count, publish_all))


def subscribe_by_content(line: Line, address: str, count: int) -> Received:
    """Takes deliveries, as dicts, until all have arrived."""
    return asyncio.run(_subscribe(line, address, count))


async def _publish(
    line: Line, address: str, count: int, publish_all: Callable[[Connection, list[Reading]], Awaitable[None]]
) -> int:
    readings = make_readings(seed=1)
    async with connect(address, name="benchmark") as broker:
        await broker.publish(readings[0] | {"network": "hello"})
        wait_for_go(line)
        async with asyncio.timeout(RUN_S):
            await publish_all(broker, readings)
    return count


async def _subscribe(line: Line, address: str, count: int) -> Received:
    received, last_s = 0, time.monotonic()
    async with connect(address) as broker, broker.subscribe(WANTED, policy="block") as subscription:
        line.ready()
        with suppress(TimeoutError):
            async with asyncio.timeout(RUN_S):
                while received < count:
                    received += len(await subscription.take())
                    last_s = time.monotonic()
    return Received(received, last_s)


def _keep_subscriptions(line: Line, address: str, filters: list[str]) -> None:
    asyncio.run(_keep(line, address, filters))


async def _keep(line: Line, address: str, filters: list[str]) -> None:
    async with connect(address) as broker:
        began_s = time.monotonic()
        for start in range(0, len(filters), _SUBSCRIBING_AT_ONCE):
            some = [broker.subscribe(each) for each in filters[start : start + _SUBSCRIBING_AT_ONCE]]
            await asyncio.gather(*(subscription.__aenter__() for subscription in some))
        line.ready(time.monotonic() - began_s)
        # Keeps the event loop running, and with it the pings, until the process is ended.
        await asyncio.get_running_loop().create_future()
