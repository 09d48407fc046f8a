"""One job: a publisher process, a server and a subscriber process, from the first notification to the last.

Every contender is a `Contender`: a pair of functions that publish and subscribe over one server. They are run in the
same way, with the same readings, and measured by the same clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.processes import Line, Worker, cpu_s


@dataclass(frozen=True)
class Received:
    """What a subscriber got, and when the last of it came (on the monotonic clock, which processes share)."""

    count: int
    last_s: float
    latencies_us: tuple[float, ...] = ()


# publish(line, address, count, *options) gives how many were sent; subscribe(line, address, count) what came.
Publish = Callable[..., int]
Subscribe = Callable[..., Received]


@dataclass(frozen=True)
class Contender:
    """Somebody who carries notifications from a publisher to a subscriber. `options` go to `publish`."""

    name: str
    publish: Publish
    subscribe: Subscribe
    address: str
    server_pid: int
    options: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Measured:
    """One run. CPU is in microseconds a notification that was sent."""

    sent: int
    received: Received
    rate: float
    publisher_us: float
    server_us: float
    subscriber_us: float


def run_job(contender: Contender, count: int) -> Measured:
    """Publishes `count` notifications, and waits until the subscriber has them or gives up."""
    with (
        Worker(contender.subscribe, contender.address, count) as subscriber,
        Worker(contender.publish, contender.address, count, *contender.options) as publisher,
    ):
        subscriber.wait_ready()
        publisher.wait_ready()
        pids = (publisher.pid, contender.server_pid, subscriber.pid)
        before = [cpu_s(pid) for pid in pids]
        began_s = time.monotonic()
        publisher.go()
        sent: int = publisher.result()
        received: Received = subscriber.result()
        used_us = [(cpu_s(pid) - start) * 1e6 / max(sent, 1) for pid, start in zip(pids, before, strict=True)]
    rate = received.count / (received.last_s - began_s) if received.count else 0.0
    return Measured(sent, received, rate, *used_us)


def run_rounds(
    contenders: Sequence[Contender], rounds: int, counts: dict[str, int], on_run: Callable[[str, Measured], None]
) -> dict[str, list[Measured]]:
    """Every contender once a round, so that what else the machine does falls on all of them."""
    runs: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            measured = run_job(contender, counts[contender.name])
            runs[contender.name].append(measured)
            on_run(contender.name, measured)
    return runs


def middle(runs: Sequence[Measured], figure: Callable[[Measured], float]) -> float:
    return median(figure(run) for run in runs)


def wait_for_go(line: Line) -> None:
    """A publisher is connected and has its readings."""
    line.ready()
    line.wait_go()
