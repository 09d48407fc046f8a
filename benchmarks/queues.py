"""Durable queues: every message is put, acknowledged, taken and deleted, compared with Redis Streams and RabbitMQ.

Measured: messages of 1 KB per second, from the first put to the last deletion, and the CPU time per message of the
client's and the server's process; also the cost of consumers that wait for messages, and of messages that wait for
consumers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from statistics import median
from tempfile import NamedTemporaryFile
from typing import Final, get_args

from benchmarks import over_logical_queues, over_rabbitmq, over_redis, waiting
from benchmarks.job import Effort, show_progress
from benchmarks.over_tidegate import tidegate_broker
from benchmarks.processes import Failed
from benchmarks.queue_job import (
    BATCH,
    BODY_BYTES,
    CONSUMERS,
    PRODUCERS,
    Contender,
    Measured,
    last_line,
    middle,
    run_rounds,
)
from benchmarks.tables import ratio, write_table
from tidegate.queues.definition import Durability

# The speed of disks varies more than that of processors, so runs are longer than those without a disk.
_RUN_FACTOR: Final = 2
_SYNCS: Final = 50
_FSYNC: Final = "Tidegate, client, fsync"
_OS: Final = "Tidegate, client, os"

_HEAD: Final = (
    "contender", "messages/s", "client us", "server us", "deleted", "client, fsync / this", "client, os / this",
)  # fmt: skip
_NOTES: Final = (
    "medians of {rounds} interleaved rounds; CPU in us a message; the last columns divide Tidegate's rate by this",
    f"{BODY_BYTES} bytes a message, batches of {BATCH}, {PRODUCERS} producers and {CONSUMERS} consumers in one process",
    "the rows `store` have no server: their client is all there is",
    "a write of 4 KB with its fsync took {sync_us:.0f} us at the start, where the data lies; rows that sync live by it",
    "equal promises: `fsync`, Redis always and RabbitMQ keep what they acknowledged through a power cut",
    "equal promises: `os` and Redis everysec keep it through a crash of the server; `memory` has no peer here",
    "in the peers' favour: RabbitMQ does not confirm acknowledgements, so its consumers never wait for a deletion",
    "in the peers' favour: Redis rewrites its file in a child process, whose CPU is not counted",
    "in Tidegate's favour: its client takes lists, where aio-pika makes a task of each message: see `client us`",
)


def run(effort: Effort) -> str:
    return "\n".join([_throughput(effort), waiting.idle(effort), waiting.backlog(effort)])


def _throughput(effort: Effort) -> str:
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        contenders = [
            Contender(f"Tidegate, store, {durability}", over_logical_queues.open_store, (durability,))
            for durability in get_args(Durability)
        ]
        for name, start in _SERVERS.items():
            try:
                contenders += stack.enter_context(start())
            except (Failed, OSError) as error:
                missing[name] = last_line(error)
                show_progress(f"not measured: {name}: {last_line(error)}")
        sync_us = _sync_us()
        runs = run_rounds(contenders, effort.rounds, _RUN_FACTOR * effort.run_s, missing)
    rows = [_row(runs, name) for name in runs] + [_missing_row(name) for name in missing]
    notes = [note.format(rounds=effort.rounds, sync_us=sync_us) for note in _NOTES]
    return write_table("Queues", _HEAD, rows, [*notes, *(f"not measured: {name}: {missing[name]}" for name in missing)])


@contextmanager
def _tidegate() -> Iterator[list[Contender]]:
    with tidegate_broker() as broker:
        yield [
            Contender(name, over_logical_queues.open_client, (broker.native, durability), broker.pid)
            for name, durability in ((_FSYNC, "fsync"), (_OS, "os"), ("Tidegate, client, memory", "memory"))
        ]


@contextmanager
def _redis(append_fsync: str) -> Iterator[list[Contender]]:
    with over_redis.redis_server(append_fsync) as (pid, port):
        yield [Contender(f"Redis Streams, AOF {append_fsync}", over_redis.open_stream, (port,), pid)]


@contextmanager
def _rabbitmq() -> Iterator[list[Contender]]:
    with over_rabbitmq.rabbitmq_server() as (pid, port):
        yield [Contender("RabbitMQ, durable, aio-pika", over_rabbitmq.open_queue, (port,), pid)]


_SERVERS: Final[dict[str, Callable[[], AbstractContextManager[list[Contender]]]]] = {
    "Tidegate, client": _tidegate,
    "Redis Streams, AOF always": lambda: _redis("always"),
    "Redis Streams, AOF everysec": lambda: _redis("everysec"),
    "RabbitMQ, durable, aio-pika": _rabbitmq,
}


def _row(runs: Mapping[str, Sequence[Measured]], name: str) -> list[str]:
    rate = middle(runs, name, _rate)
    deleted, count = sum(run.carried.deleted for run in runs[name]), sum(run.count for run in runs[name])
    is_complete = all(run.is_complete for run in runs[name])
    return [
        name,
        f"{rate:,.0f}",
        f"{middle(runs, name, lambda run: run.client_us):.1f}",
        f"{middle(runs, name, lambda run: run.server_us):.1f}",
        f"{deleted:,}/{count:,}{'' if is_complete else ' WRONG'}",
        ratio(middle(runs, _FSYNC, _rate), rate),
        ratio(middle(runs, _OS, _rate), rate),
    ]


def _missing_row(name: str) -> list[str]:
    return [name, "not measured", *["-"] * (len(_HEAD) - 2)]


def _rate(measured: Measured) -> float:
    return measured.rate


def _sync_us() -> float:
    """Returns how long a small durable write takes on the disk of the temporary directories."""
    took = []
    with NamedTemporaryFile(prefix="tidegate-bench-") as file:
        for _ in range(_SYNCS):
            began_s = time.perf_counter()
            os.pwrite(file.fileno(), bytes(4096), 0)
            os.fsync(file.fileno())
            took.append(time.perf_counter() - began_s)
    return median(took) * 1e6
