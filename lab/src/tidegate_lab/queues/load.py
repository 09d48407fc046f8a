"""The paper's load on a real broker: devices enqueue at regular intervals, and back-ends dequeue at random times.

A back-end sends requests at the times of a Poisson process. The number of its open requests has a bound, and a request
that the broker holds counts as open. Back-ends delete the messages that they receive.

Everything is measured from outside. Latency is the time from a message's enqueue to its arrival. The CPU time of the
broker's and the store's processes comes from the kernel.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.client import connect
from tidegate.client.message import Message
from tidegate.client.queue import Queue
from tidegate_lab.processor_time import cpu_s

QUEUE: Final = "evaluation"
BODY: Final = "x" * 1000
TICK_S: Final = 0.01


@dataclass(frozen=True)
class Load:
    """The load of a run. `request_rate` is the paper's lambda: requests per second of each back-end."""

    messages_s: float
    request_rate: float
    back_ends: int = 10
    open_requests_max: int = 30
    request_messages_max: int = 50
    physical_queues: int = 4


@dataclass(frozen=True)
class Times:
    """The durations of the warm-up and of the measurement after it."""

    warm_up_s: float
    measured_s: float


@dataclass(frozen=True)
class Measured:
    """The result of a run. `missing` counts acknowledged messages that had not arrived 6 s after the last enqueue."""

    throughput: float
    hit_rate: float
    messages_a_hit: float
    tries_s: float
    latency_p50_s: float
    latency_p99_s: float
    broker_us_a_message: float
    store_us_a_message: float
    broker_load: float
    enqueued: int
    missing: int


@dataclass
class _Counts:
    enqueued: int = 0
    arrived: int = 0
    latencies_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Snapshot:
    """All counters at one moment."""

    at_s: float
    arrived: int
    hits: int
    misses: int
    delivered: int
    cpu_s: Mapping[str, float]


async def measure(
    address: str,
    pids: Mapping[str, int],
    settings: Mapping[str, Any],
    least: int,
    load: Load,
    times: Times,
    seed: int,
) -> Measured:
    """Measures one run on a new queue. `pids` names the process `broker` and, if the store has its own, `store`."""
    async with connect(address, name="devices") as devices, connect(address, name="back-ends") as back_ends:
        queue = back_ends.queue(QUEUE)
        await queue.create(physical_queues=load.physical_queues, **settings)
        try:
            return await _run(devices.queue(QUEUE), queue, pids, least, load, times, seed)
        finally:
            await queue.drop()


async def _run(
    into: Queue, queue: Queue, pids: Mapping[str, int], least: int, load: Load, times: Times, seed: int
) -> Measured:
    counts = _Counts()
    random_times = [random.Random(f"{seed} {number}") for number in range(load.back_ends)]  # noqa: S311
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(_ask(queue, counts, load, least, rng)) for rng in random_times]
        enqueuing = tasks.create_task(_enqueue(into, counts, load, times.warm_up_s + times.measured_s))
        await asyncio.sleep(times.warm_up_s)
        counts.latencies_s.clear()
        before = await _take_snapshot(queue, counts, pids)
        await asyncio.sleep(times.measured_s)
        after = await _take_snapshot(queue, counts, pids)
        latencies_s = np.array(counts.latencies_s or [float("nan")])
        await enqueuing
        await _wait_for_the_rest(counts)
        for task in asking:
            task.cancel()
    return _between(before, after, latencies_s, counts)


async def _take_snapshot(queue: Queue, counts: _Counts, pids: Mapping[str, int]) -> _Snapshot:
    cpu = {name: cpu_s(pid) for name, pid in pids.items()}
    at_s, arrived, statistics = time.perf_counter(), counts.arrived, await queue.stats()
    return _Snapshot(at_s, arrived, statistics["hits"], statistics["misses"], statistics["delivered"], cpu)


def _between(before: _Snapshot, after: _Snapshot, latencies_s: NDArray[np.float64], counts: _Counts) -> Measured:
    took_s = after.at_s - before.at_s
    arrived = after.arrived - before.arrived
    hits, misses = after.hits - before.hits, after.misses - before.misses
    used_s = {name: after.cpu_s[name] - before.cpu_s[name] for name in after.cpu_s}
    return Measured(
        throughput=arrived / took_s,
        hit_rate=hits / max(1, hits + misses),
        messages_a_hit=(after.delivered - before.delivered) / max(1, hits),
        tries_s=(hits + misses) / took_s,
        latency_p50_s=float(np.percentile(latencies_s, 50)),
        latency_p99_s=float(np.percentile(latencies_s, 99)),
        broker_us_a_message=1e6 * used_s["broker"] / max(1, arrived),
        store_us_a_message=1e6 * used_s.get("store", 0.0) / max(1, arrived),
        broker_load=used_s["broker"] / took_s,
        enqueued=counts.enqueued,
        missing=counts.enqueued - counts.arrived,
    )


async def _enqueue(queue: Queue, counts: _Counts, load: Load, seconds: float) -> None:
    """Enqueues for all devices: sends the messages that are due at each tick, and does not wait for acknowledgements
    before the next tick."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    sent = 0

    async def put(messages: int) -> None:
        done = await queue.put([BODY] * messages)
        counts.enqueued += done.accepted

    async with asyncio.TaskGroup() as tasks:
        while (now_s := loop.time()) < began_s + seconds:
            due = int((now_s - began_s) * load.messages_s)
            if due > sent:
                tasks.create_task(put(due - sent))
                sent = due
            await asyncio.sleep(TICK_S)


async def _ask(queue: Queue, counts: _Counts, load: Load, least: int, rng: random.Random) -> None:
    """Runs one back-end: sends requests at random times, as long as fewer than its bound are open."""
    is_free = asyncio.Semaphore(load.open_requests_max)

    async def request() -> None:
        try:
            messages = await queue.take(max=load.request_messages_max, min=least, wait_s=20.0)
            if messages:
                _record_arrivals(messages, counts)
                await queue.delete(messages)
        finally:
            is_free.release()

    async with asyncio.TaskGroup() as tasks:
        next_s = asyncio.get_running_loop().time()
        while True:
            next_s = max(next_s + rng.expovariate(load.request_rate), asyncio.get_running_loop().time() - 0.1)
            await asyncio.sleep(max(0.0, next_s - asyncio.get_running_loop().time()))
            await is_free.acquire()
            tasks.create_task(request())


def _record_arrivals(messages: list[Message], counts: _Counts) -> None:
    now_s = time.time()
    counts.arrived += len(messages)
    counts.latencies_s += [now_s - message.enqueued_at for message in messages]


async def _wait_for_the_rest(counts: _Counts) -> None:
    async def rest() -> None:
        while counts.arrived < counts.enqueued:
            await asyncio.sleep(TICK_S)

    try:
        async with asyncio.timeout(6.0):
            await rest()
    except TimeoutError:
        return
