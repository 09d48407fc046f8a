"""NATS as a contender: nats-server with the stock client nats-py.

There is one subject per station, and the subscriber subscribes to `air.*`. The server may buffer 1 GiB for a slow
subscriber, so that it drops nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import nats
from nats.aio.msg import Msg

from benchmarks.job import Received, wait_for_go
from benchmarks.processes import RUN_S, Line, Server, find_program, free_port
from benchmarks.workload import make_readings, rounds_of, topic

WANTED: Final = "air.*"
_UNBOUNDED: Final = 1 << 30
_CONFIGURATION: Final = f"max_pending: {_UNBOUNDED}\nwrite_deadline: '60s'\nping_interval: '1h'\nmax_subscriptions: 0\n"

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode


@contextmanager
def nats_server() -> Iterator[tuple[int, int]]:
    """Runs a nats-server on loopback, and yields its (pid, port)."""
    port = free_port()
    with TemporaryDirectory() as folder:
        file = Path(folder, "nats.conf")
        file.write_text(_CONFIGURATION)
        with Server([find_program("nats-server"), "-c", str(file), "-a", "127.0.0.1", "-p", str(port)]) as server:
            server.wait_listening(port)
            yield server.pid, port


def publish_stock(line: Line, address: str, count: int) -> int:
    """Publishes through nats-py with a call per message. nats-py batches its writes internally."""

    async def main() -> None:
        readings = make_readings(seed=1)
        client = await nats.connect(address)
        wait_for_go(line)
        for part in rounds_of(readings, 64, count):
            for reading in part:
                await client.publish(topic(reading, "."), encode(reading))
        await client.flush(timeout=int(RUN_S))
        await client.close()

    asyncio.run(main())
    return count


def subscribe_stock(line: Line, address: str, count: int) -> Received:
    """Subscribes through nats-py with a callback, its fastest way to receive, and decodes each message."""
    received, last_s = 0, time.monotonic()

    async def main() -> None:
        done = asyncio.Event()

        async def on_message(message: Msg) -> None:
            nonlocal received, last_s
            decode(message.data)
            received += 1
            if received % 64 == 0 or received >= count:
                last_s = time.monotonic()
            if received >= count:
                done.set()

        client = await nats.connect(address)
        await client.subscribe(WANTED, cb=on_message, pending_msgs_limit=_UNBOUNDED, pending_bytes_limit=_UNBOUNDED)
        await client.flush()
        line.ready()
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), RUN_S)
        await client.close()

    asyncio.run(main())
    return Received(received, last_s)
