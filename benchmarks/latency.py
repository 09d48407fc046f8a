"""Latency: from the call that publishes to the subscriber's code, at 5000 notifications per second, compared with NATS.

Measured: the median and the 99th percentile of each run, and their medians over interleaved rounds. Both publishers
wake up every millisecond and send the notifications that are due, with one call each and the time in it. Both clients
batch internally. The first tenth of a run is warm-up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from statistics import median, quantiles
from typing import Any, Final

import nats
from nats.aio.msg import Msg

from benchmarks import over_nats, over_tidegate
from benchmarks.job import Contender, Effort, Measured, Received, middle, run_rounds, wait_for_go
from benchmarks.processes import RUN_S, Line
from benchmarks.tables import ratio, write_table
from benchmarks.workload import WANTED, Reading, alerts, make_readings, topic
from tidegate.client import connect

RATE: Final = 5000
OTHERS: Final = 999
REFERENCE: Final = "NATS, nats-py"
_WAKE_S: Final = 0.001
_RUN_FACTOR: Final = 4
_HEAD: Final = (
    "contender", "p50 us", "p99 us", "publisher us", "broker us", "subscriber us", "received",
    f"p50 / {REFERENCE}", f"p99 / {REFERENCE}",
)  # fmt: skip
_NOTES: Final = (
    f"{RATE} notifications/s, medians of {{rounds}} interleaved rounds; CPU in us per notification",
    f"Tidegate acknowledges and compares contents with {OTHERS + 1} filters; NATS does neither, and encodes JSON",
)


def run(effort: Effort) -> str:
    with (
        over_tidegate.tidegate_broker() as broker,
        over_tidegate.subscribed(broker.native, alerts(OTHERS)),
        over_nats.nats_server() as (nats_pid, nats_port),
    ):
        contenders = [
            Contender("Tidegate, publish_soon", broker.native, broker.pid, publish_to_tidegate, subscribe_to_tidegate),
            Contender(REFERENCE, f"nats://127.0.0.1:{nats_port}", nats_pid, publish_to_nats, subscribe_to_nats),
        ]
        count = int(RATE * effort.run_s * _RUN_FACTOR)
        runs = run_rounds(contenders, effort.rounds, {contender.name: count for contender in contenders})
    rows = [_row(name, measured, runs[REFERENCE]) for name, measured in runs.items()]
    return write_table("Latency", _HEAD, rows, [note.format(rounds=effort.rounds) for note in _NOTES])


def publish_to_tidegate(line: Line, address: str, count: int) -> int:
    async def main() -> None:
        async with connect(address, name="benchmark") as broker:
            await broker.publish({"network": "hello"})
            await _paced(line, count, broker.publish_soon)

    asyncio.run(main())
    return count


def subscribe_to_tidegate(line: Line, address: str, count: int) -> Received:
    latencies_us: list[float] = []

    async def main() -> None:
        async with connect(address) as broker, broker.subscribe(WANTED) as subscription:
            line.ready()
            with suppress(TimeoutError):
                async with asyncio.timeout(RUN_S):
                    while len(latencies_us) < count:
                        deliveries = await subscription.take()
                        latencies_us.extend([_age_us(delivery.notification) for delivery in deliveries])

    asyncio.run(main())
    return Received(len(latencies_us), time.monotonic(), tuple(latencies_us))


def publish_to_nats(line: Line, address: str, count: int) -> int:
    async def main() -> None:
        client = await nats.connect(address)

        async def publish(reading: Reading) -> None:
            await client.publish(topic(reading, "."), over_nats.encode(reading))

        await _paced(line, count, publish)
        await client.flush()
        await client.close()

    asyncio.run(main())
    return count


def subscribe_to_nats(line: Line, address: str, count: int) -> Received:
    latencies_us: list[float] = []

    async def main() -> None:
        done = asyncio.Event()

        async def on_message(message: Msg) -> None:
            latencies_us.append(_age_us(over_nats.decode(message.data)))
            if len(latencies_us) >= count:
                done.set()

        client = await nats.connect(address)
        await client.subscribe(over_nats.WANTED, cb=on_message)
        await client.flush()
        line.ready()
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), RUN_S)
        await client.close()

    asyncio.run(main())
    return Received(len(latencies_us), time.monotonic(), tuple(latencies_us))


async def _paced(line: Line, count: int, publish: Callable[[Reading], Awaitable[None]]) -> None:
    """Publishes at RATE: wakes up regularly and sends the notifications that are due."""
    readings = make_readings(seed=1)
    wait_for_go(line)
    began_s = time.monotonic()
    sent = 0
    while sent < count:
        due = min(count, int((time.monotonic() - began_s) * RATE))
        for number in range(sent, due):
            await publish(readings[number % len(readings)] | {"sent_ns": time.monotonic_ns()})
        sent = max(sent, due)
        await asyncio.sleep(_WAKE_S)


def _age_us(notification: dict[str, Any]) -> float:
    return float(time.monotonic_ns() - notification["sent_ns"]) / 1000


def _percentiles(runs: Sequence[Measured]) -> tuple[float, float]:
    """Returns the median of the runs' medians, and the median of their 99th percentiles."""
    cuts = []
    for each in runs:
        latencies = each.received.latencies_us
        cuts.append(quantiles(latencies[len(latencies) // 10 :], n=100))
    return median(cut[49] for cut in cuts), median(cut[98] for cut in cuts)


def _row(name: str, runs: Sequence[Measured], reference: Sequence[Measured]) -> list[str]:
    p50, p99 = _percentiles(runs)
    reference_p50, reference_p99 = _percentiles(reference)
    return [
        name,
        f"{p50:.0f}",
        f"{p99:.0f}",
        f"{middle(runs, lambda run: run.publisher_us):.2f}",
        f"{middle(runs, lambda run: run.server_us):.2f}",
        f"{middle(runs, lambda run: run.subscriber_us):.2f}",
        f"{sum(run.received.count for run in runs):,}/{sum(run.sent for run in runs):,}",
        ratio(p50, reference_p50),
        ratio(p99, reference_p99),
    ]
