"""The main job: a broker, the stations of the Madrid region publishing to it, and a subscriber that prints alerts.

The broker is a process of its own, as in real life. Time runs fast: an hour of readings passes in a fraction of a
second. At the end the counts are compared: every reading was published once, acknowledged, and delivered once to a
subscriber of everything; and the alerts are exactly the readings that the filter matches.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final

from tidegate.broker_process import broker_process
from tidegate.client import Connection, Subscription, connect
from tidegate.devices import STATIONS, readings
from tidegate.filters import Filter

ALERT: Final = Filter.parse("NO2>200;kind==traffic")
EVERYTHING: Final = Filter.parse("*")
START: Final = datetime(2026, 1, 12, tzinfo=UTC)
STEP: Final = timedelta(hours=1)
STEPS_PER_S: Final = 6


@dataclass
class Counts:
    published: int = 0
    expected_alerts: int = 0
    delivered: int = 0
    alerts: int = 0

    @property
    def agree(self) -> bool:
        return self.published == self.delivered > 0 and self.expected_alerts == self.alerts


async def run_demo(seed: int, seconds: float, *, is_quiet: bool) -> int:
    """0 when the counts agree, 1 when they do not."""
    counts = Counts()
    async with (
        broker_process() as process,
        connect(process.address, name="demo") as broker,
        broker.subscribe(ALERT) as alerts,
        broker.subscribe(EVERYTHING) as everything,
        asyncio.TaskGroup() as tasks,
    ):
        print(f"broker at {process.address}; {len(STATIONS)} stations, seed {seed}; alerts where {ALERT}", flush=True)
        tasks.create_task(_print_alerts(alerts, counts, is_quiet=is_quiet))
        tasks.create_task(_count(everything, counts))
        await _publish(broker, seed, seconds, counts)
        await _wait_until_delivered(counts)
        alerts.close()
        everything.close()
    return _conclude(counts)


async def _publish(broker: Connection, seed: int, seconds: float, counts: Counts) -> None:
    """A step of readings, all stations at once, every 1/STEPS_PER_S seconds."""
    loop = asyncio.get_running_loop()
    stream = readings(seed, START, STEP)
    started_s = loop.time()
    for step in range(max(1, round(seconds * STEPS_PER_S))):
        await asyncio.sleep(max(0.0, started_s + step / STEPS_PER_S - loop.time()))
        batch = list(islice(stream, len(STATIONS)))
        await broker.publish(batch)
        counts.published += len(batch)
        counts.expected_alerts += sum(ALERT.matches(reading) for reading in batch)


async def _print_alerts(alerts: Subscription, counts: Counts, *, is_quiet: bool) -> None:
    async for delivery in alerts:
        counts.alerts += 1
        if not is_quiet:
            print(write_alert(delivery.notification), flush=True)


def write_alert(reading: dict[str, Any]) -> str:
    return f"{reading['time']}  NO2 {reading['NO2']:5.0f} µg/m³  {reading['station']}  {reading['name']}"


async def _count(everything: Subscription, counts: Counts) -> None:
    with contextlib.suppress(StopAsyncIteration):
        while True:
            counts.delivered += len(await everything.take())


async def _wait_until_delivered(counts: Counts) -> None:
    """Deliveries follow acknowledgements closely; a second without any means that some are lost."""
    last = -1
    while not counts.agree and last != counts.delivered + counts.alerts:
        last = counts.delivered + counts.alerts
        await asyncio.sleep(1.0)


def _conclude(counts: Counts) -> int:
    hours = counts.published / len(STATIONS) * STEP / timedelta(hours=1)
    print(
        f"{hours:.0f} hours of readings: {counts.published} published and acknowledged, {counts.delivered} delivered; "
        f"{counts.alerts} alerts, {counts.expected_alerts} expected: "
        + ("all counts agree" if counts.agree else "COUNTS DISAGREE"),
        flush=True,
    )
    return 0 if counts.agree else 1
