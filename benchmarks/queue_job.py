"""One job over a durable queue: producers put all messages in, consumers take and delete all of them, concurrently.

Every contender runs in the same way, in one process with asyncio. Each producer waits for the acknowledgement of a
batch before it sends the next. Each consumer takes a batch, reads its bodies, deletes it and waits for the
confirmation. Contenders differ in their `Opening`: how the queue is opened, and how producers and consumers use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Protocol, TypeAlias

from benchmarks.job import show_progress, wait_for_go
from benchmarks.processes import RUN_S, Failed, Line, Worker, cpu_s

BATCH: Final = 100
PRODUCERS: Final = 8
CONSUMERS: Final = 4
BODY_BYTES: Final = 1024
# How long a request for messages is held. A run loses this time at its end, after the last message was counted.
WAIT_S: Final = 0.2
# Messages before the clock starts, because opening connections and filling caches and files is not measured.
WARM_UP: Final = 2_000
PROBE: Final = 5_000
COUNT_MAX: Final = 1_000_000

# The start of a body, which does not compress. A number of eight bytes at the end makes each body unique.
_FILLING: Final = bytes((7 * i * i + i // 3) % 256 for i in range(BODY_BYTES - 8))


Put: TypeAlias = Callable[[list[bytes]], Awaitable[object]]


class Consumer(Protocol):
    async def take(self) -> list[bytes]:
        """Returns up to a batch of bodies, or none if none arrived within `WAIT_S`."""

    async def delete(self) -> int:
        """Deletes the messages taken last, and returns how many were deleted."""


@dataclass(frozen=True)
class Ends:
    """The two ends of a queue. A `Put` returns when its messages are acknowledged."""

    producers: Sequence[Put]
    consumers: Sequence[Consumer]


Opening: TypeAlias = Callable[..., AbstractAsyncContextManager[Ends]]


@dataclass(frozen=True)
class Contender:
    """The queue of a system, which `opening(*options)` opens in another process. `server_pid` is None if the system has
    no server."""

    name: str
    opening: Opening
    options: tuple[Any, ...]
    server_pid: int | None = None


@dataclass(frozen=True)
class Carried:
    """The messages that came through. `numbers` is the sum of the bodies' numbers, which reveals lost and duplicate
    messages."""

    deleted: int
    numbers: int
    last_s: float


@dataclass(frozen=True)
class Measured:
    """The result of a run. CPU time is in microseconds per message."""

    count: int
    carried: Carried
    rate: float
    client_us: float
    server_us: float

    @property
    def is_complete(self) -> bool:
        return self.carried.deleted == self.count and self.carried.numbers == sum(range(self.count))


def run_job(contender: Contender, count: int) -> Measured:
    with Worker(carry, contender.opening, contender.options, count) as worker:
        worker.wait_ready()
        client_s, server_s, began_s = cpu_s(worker.pid), _server_s(contender), time.monotonic()
        worker.go()
        carried: Carried = worker.result()
        client_us = (cpu_s(worker.pid) - client_s) * 1e6 / count
        server_us = (_server_s(contender) - server_s) * 1e6 / count
    return Measured(count, carried, carried.deleted / (carried.last_s - began_s), client_us, server_us)


def run_rounds(
    contenders: Sequence[Contender], rounds: int, run_s: float, missing: dict[str, str]
) -> dict[str, list[Measured]]:
    """Runs every contender once per round. A contender that fails is dropped, and `missing` gets the reason."""
    counts: dict[str, int] = {}
    runs: dict[str, list[Measured]] = {}
    for number in range(rounds + 1):
        for contender in contenders:
            name = contender.name
            if name in missing:
                continue
            try:
                measured = run_job(contender, counts.get(name, PROBE))
            except Failed as error:
                missing[name] = last_line(error)
                runs.pop(name, None)
                show_progress(f"not measured: {name}: {last_line(error)}")
                continue
            if number == 0:
                counts[name] = _fitting_count(measured.rate, run_s)
            else:
                runs.setdefault(name, []).append(measured)
            show_progress(f"round {number}  {name}: {measured.rate:,.0f}/s")
    return runs


def middle(runs: Mapping[str, Sequence[Measured]], name: str, figure: Callable[[Measured], float]) -> float:
    """Returns the median of a contender's runs, or 0 if it was not measured."""
    return median(figure(run) for run in runs[name]) if name in runs else 0.0


def last_line(error: Exception) -> str:
    """Returns the last line of a traceback, which names the error."""
    lines = (line.strip(" |+-") for line in reversed(str(error).splitlines()))
    return next(filter(None, lines), repr(error))


def make_bodies(first: int, count: int) -> list[bytes]:
    return [_FILLING + number.to_bytes(8, "big") for number in range(first, first + count)]


def carry(line: Line, opening: Opening, options: tuple[Any, ...], count: int) -> Carried:
    """Puts, takes and deletes `count` messages, in the client's process."""

    async def main() -> Carried:
        async with opening(*options) as ends:
            await _carry(ends, WARM_UP)
            wait_for_go(line)
            return await _carry(ends, count)

    return asyncio.run(main())


async def _carry(ends: Ends, count: int) -> Carried:
    batches = iter([(first, min(BATCH, count - first)) for first in range(0, count, BATCH)])
    deleted, numbers, last_s = 0, 0, time.monotonic()

    async def produce(put: Put) -> None:
        for first, size in batches:
            await put(make_bodies(first, size))

    async def consume(consumer: Consumer) -> None:
        nonlocal deleted, numbers, last_s
        while deleted < count:
            bodies = await consumer.take()
            numbers += sum(int.from_bytes(body[-8:], "big") for body in bodies)
            if bodies:
                gone = await consumer.delete()  # a local, because other consumers add to the total while this waits
                deleted += gone
                last_s = time.monotonic()

    with suppress(TimeoutError):
        async with asyncio.timeout(RUN_S), asyncio.TaskGroup() as tasks:
            for put in ends.producers:
                tasks.create_task(produce(put))
            for consumer in ends.consumers:
                tasks.create_task(consume(consumer))
    return Carried(deleted, numbers, last_s)


def _fitting_count(rate: float, run_s: float) -> int:
    count = min(max(int(rate * run_s), PROBE), COUNT_MAX)
    return count - count % BATCH


def _server_s(contender: Contender) -> float:
    return 0.0 if contender.server_pid is None else cpu_s(contender.server_pid)
