"""The cost of waiting: consumers that wait for messages, and messages that wait for consumers.

Idle: the CPU time of a broker that holds requests of many consumers on an empty queue, compared with no consumers.
Backlog: the memory of a broker whose queue is full of messages, and how soon it is ready after kill -9.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.job import QUICK, Effort, show_progress, wait_for_go
from benchmarks.over_tidegate import broker_on, tidegate_broker
from benchmarks.processes import Failed, Line, Worker, anonymous_bytes, cpu_s, resident_bytes
from benchmarks.queue_job import BODY_BYTES, last_line, make_bodies
from benchmarks.tables import ratio, write_table
from tidegate.client import connect
from tidegate.queues.logical_queues import LogicalQueues
from tidegate.queues.stores.lmdb_store import LmdbStore

_QUEUE: Final = "bench"
CONSUMERS: Final = 100
_HELD_S: Final = 60.0
_SETTLE_S: Final = 2.0
_ROUNDS_MAX: Final = 3

_FILL_BATCH: Final = 1000
_FILL_AT_ONCE: Final = 4
_FILL_S: Final = 900.0

_IDLE_HEAD: Final = ("broker", "seconds", "CPU % of a core", "resident MB")
_BACKLOG_HEAD: Final = (
    "broker", "messages", "resident MB", "without mapped files MB", "bytes a message", "ready after kill -9 s",
    "ready / empty",
)  # fmt: skip


def idle(effort: Effort) -> str:
    """Measures Tidegate's broker with and without waiting consumers."""
    seconds, rounds = (3.0, 1) if effort is QUICK else (10.0, min(effort.rounds, _ROUNDS_MAX))
    found: dict[str, list[tuple[float, float]]] = {}
    notes = [
        f"each consumer has a connection of its own and one request held for {_HELD_S:g} s; medians of {rounds} rounds"
    ]
    for number in range(rounds):
        for name, consumers in (("no consumers", 0), (f"{CONSUMERS} consumers, requests held", CONSUMERS)):
            show_progress(f"idle, round {number + 1}  {name}")
            try:
                found.setdefault(name, []).append(_idle_percent(consumers, seconds))
            except Failed as error:
                notes.append(f"not measured: {name}: {last_line(error)}")
    rows = [
        [name, f"{seconds:g}", f"{median(cpu for cpu, _ in runs):.2f}", f"{median(mb for _, mb in runs):.1f}"]
        for name, runs in found.items()
        if runs
    ]
    return write_table("Queues: consumers that wait", _IDLE_HEAD, rows, notes)


def _idle_percent(consumers: int, seconds: float) -> tuple[float, float]:
    """Returns the CPU use as a percentage of a core, and the resident MB."""
    with tidegate_broker() as broker:
        if not consumers:
            time.sleep(_SETTLE_S)
            return _cpu_percent(broker.pid, seconds), resident_bytes(broker.pid) / 1e6
        with Worker(_hold, broker.native, consumers) as holder:
            parked = holder.wait_ready()
            if parked != consumers:
                raise Failed(f"{parked} of {consumers} requests are held")
            percent = _cpu_percent(broker.pid, seconds)
            resident = resident_bytes(broker.pid)
            holder.kill()
            return percent, resident / 1e6


def _cpu_percent(pid: int, seconds: float) -> float:
    cpu_before_s, began_s = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_s(pid) - cpu_before_s) / (time.monotonic() - began_s)


def _hold(line: Line, address: str, consumers: int) -> None:
    asyncio.run(_hold_requests(line, address, consumers))


async def _hold_requests(line: Line, address: str, consumers: int) -> None:
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        brokers = [await stack.enter_async_context(connect(address)) for _ in range(consumers)]
        await brokers[0].queue(_QUEUE).create()
        for broker in brokers:
            tasks.create_task(broker.queue(_QUEUE).take(max=100, wait_s=_HELD_S))
        await asyncio.sleep(_SETTLE_S)
        line.ready((await brokers[0].queue(_QUEUE).stats())["parked"])


@dataclass(frozen=True)
class Backlog:
    """The memory with waiting messages, and the seconds from kill -9 to ready."""

    resident: int
    anonymous: int
    ready_s: float
    messages: int


def backlog(effort: Effort) -> str:
    """Measures the broker with an empty and with a full queue, killed and restarted."""
    count, rounds = (50_000, 1) if effort is QUICK else (1_000_000, min(effort.rounds, _ROUNDS_MAX))
    found: dict[int, list[Backlog]] = {0: [], count: []}
    notes = [
        f"{BODY_BYTES} bytes a message, durability os, put in by one client in lists of {_FILL_BATCH}",
        f"medians of {rounds} rounds; memory when all messages are acknowledged",
        "ready: from kill -9 to the new process's word that it listens, Python's own start included",
    ]
    for number in range(rounds):
        for messages, runs in found.items():
            show_progress(f"backlog, round {number + 1}  {messages:,} messages")
            try:
                runs.append(_kill_with(messages))
            except Failed as error:
                notes.append(f"not measured: {messages:,} messages: {last_line(error)}")
    if not all(found.values()):
        return write_table("Queues: messages that wait", _BACKLOG_HEAD, [], notes)
    empty = found[0]
    rows = [_backlog_row(messages, runs, empty) for messages, runs in found.items()]
    return write_table("Queues: messages that wait", _BACKLOG_HEAD, rows, notes)


def _backlog_row(messages: int, runs: list[Backlog], empty: list[Backlog]) -> list[str]:
    resident, anonymous, ready_s = (
        median(getattr(run, name) for run in runs) for name in ("resident", "anonymous", "ready_s")
    )
    is_complete = all(run.messages == messages for run in runs)
    each = (anonymous - median(run.anonymous for run in empty)) / messages if messages else 0.0
    return [
        f"Tidegate, {'a backlog' if messages else 'empty'}",
        f"{messages:,}{'' if is_complete else ' WRONG'}",
        f"{resident / 1e6:.1f}",
        f"{anonymous / 1e6:.1f}",
        f"{each:.1f}" if messages else "-",
        f"{ready_s:.2f}",
        ratio(ready_s, median(run.ready_s for run in empty)),
    ]


def _kill_with(messages: int) -> Backlog:
    with TemporaryDirectory(prefix="tidegate-bench-") as data:
        with broker_on(data) as broker:
            with Worker(_fill, broker.native, messages) as filler:
                filler.wait_ready()
                filler.go()
                filler.result(_FILL_S)
            resident, anonymous = resident_bytes(broker.pid), anonymous_bytes(broker.pid)
            killed_s = time.monotonic()
            os.kill(broker.pid, signal.SIGKILL)
        with broker_on(data):
            ready_s = time.monotonic() - killed_s
        return Backlog(resident, anonymous, ready_s, asyncio.run(_count(Path(data))))


def _fill(line: Line, address: str, messages: int) -> None:
    wait_for_go(line)
    asyncio.run(_put(address, messages))


async def _put(address: str, messages: int) -> None:
    starts = iter(range(0, messages, _FILL_BATCH))
    async with connect(address) as broker:
        queue = broker.queue(_QUEUE)
        await queue.create(durability="os")

        async def put_some() -> None:
            for start in starts:
                await queue.put(make_bodies(start, min(_FILL_BATCH, messages - start)))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_FILL_AT_ONCE):
                tasks.create_task(put_some())


async def _count(data: Path) -> int:
    """Returns the number of messages in the queue, from its counters on disk."""
    queues = LogicalQueues(LmdbStore(data))
    await queues.open()
    try:
        return (await queues.statistics(_QUEUE)).messages
    finally:
        await queues.close()
