"""One job: a publisher process, a server and a subscriber process, from the first notification to the last.

A `Contender` is a pair of functions that publish and subscribe through one server. All contenders run in the same way,
with the same readings, and are measured by the same clocks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from benchmarks.processes import Line, Worker, cpu_s

# The notifications of the first, short run, and the maximum of any run.
PROBE: Final = 8192
COUNT_MAX: Final = 5_000_000


@dataclass(frozen=True)
class Received:
    """The number of notifications received, and when the last arrived on the monotonic clock, which processes share."""

    count: int
    last_s: float
    latencies_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Effort:
    """How much to measure: rounds, seconds per run, and the number of subscriptions in a large case."""

    rounds: int
    run_s: float
    many_subscriptions: int


QUICK: Final = Effort(rounds=1, run_s=0.5, many_subscriptions=20_000)
FULL: Final = Effort(rounds=5, run_s=1.5, many_subscriptions=100_000)


@dataclass(frozen=True)
class Contender:
    """A system that carries notifications from a publisher to a subscriber.

    `publish(line, address, count, *publish_options)` returns how many it sent, and `subscribe(line, address, count,
    *subscribe_options)` what it received. Each runs in its own process."""

    name: str
    address: str
    server_pid: int
    publish: Callable[..., int]
    subscribe: Callable[..., Received]
    publish_options: tuple[Any, ...] = ()
    subscribe_options: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Measured:
    """The result of a run. CPU time is in microseconds per notification sent."""

    sent: int
    received: Received
    rate: float
    publisher_us: float
    server_us: float
    subscriber_us: float


def run_job(contender: Contender, count: int) -> Measured:
    """Publishes `count` notifications, and waits until the subscriber has received them or times out."""
    with (
        Worker(contender.subscribe, contender.address, count, *contender.subscribe_options) as subscriber,
        Worker(contender.publish, contender.address, count, *contender.publish_options) as publisher,
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


def fitting_counts(contenders: Sequence[Contender], run_s: float) -> dict[str, int]:
    """Returns how many notifications each contender carries in about `run_s`, estimated from a short warm-up run."""
    return {each.name: min(max(int(run_job(each, PROBE).rate * run_s), PROBE), COUNT_MAX) for each in contenders}


def run_rounds(contenders: Sequence[Contender], rounds: int, counts: Mapping[str, int]) -> dict[str, list[Measured]]:
    """Runs every contender once per round, so that other load on the machine affects all of them."""
    runs: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            measured = run_job(contender, counts[contender.name])
            runs[contender.name].append(measured)
            show_progress(f"round {number + 1}  {contender.name}: {measured.rate:,.0f}/s")
    return runs


def show_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def middle(runs: Sequence[Measured], figure: Callable[[Measured], float]) -> float:
    return median(figure(run) for run in runs)


def wait_for_go(line: Line) -> None:
    """Reports that the publisher is connected and has its readings, and waits for the start."""
    line.ready()
    line.wait_go()
