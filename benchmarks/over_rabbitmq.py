"""RabbitMQ as a contender: a durable classic queue, persistent messages, publisher confirms, through aio-pika.

A producer has a batch of confirms in flight and waits for all. The server pushes a batch (the prefetch) to a consumer,
which acknowledges it with one frame. The node is isolated: it has its own name, ports, cookie, files and port mapper
(epmd), so that it neither finds nor disturbs another node on this machine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue

from benchmarks.processes import Failed, Server, find_program, free_port
from benchmarks.queue_job import BATCH, CONSUMERS, PRODUCERS, WAIT_S, Ends, Put

# The server's own script. Debian's script on the PATH first changes to another user.
_SCRIPT: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_FILLING_S: Final = 0.02


@contextmanager
def rabbitmq_server() -> Iterator[tuple[int, int]]:
    """Runs a RabbitMQ node on loopback, and yields its (pid, port)."""
    if not _SCRIPT.exists():
        raise Failed("rabbitmq-server is not installed: scripts/ensure-packages rabbitmq-server:rabbitmq-server")
    port, mapper_port, node_port = free_port(), free_port(), free_port()
    with TemporaryDirectory(prefix="rabbitmq-bench-") as folder:
        Path(folder, "plugins").write_text("[].\n")
        environment = os.environ | {
            "HOME": folder,
            "ERL_EPMD_PORT": str(mapper_port),
            "RABBITMQ_NODENAME": f"bench-{os.getpid()}-{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(node_port),
            "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
            "RABBITMQ_LOG_BASE": f"{folder}/log",
            "RABBITMQ_LOG": "error",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced",
            # With these two, the script becomes the server with the same pid, instead of supervising it.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
        }
        # Without a running port mapper, the server would start one that outlives it.
        with Server([find_program("epmd"), "-port", str(mapper_port), "-address", "127.0.0.1"]) as mapper:
            mapper.wait_listening(mapper_port)
            with Server([str(_SCRIPT)], environment) as server:
                server.wait_listening(port)
                yield server.pid, port


@asynccontextmanager
async def open_queue(port: int) -> AsyncIterator[Ends]:
    """Opens a new queue on one connection, with a channel for each producer and consumer."""
    name = f"bench-{os.getpid()}"
    async with await aio_pika.connect(f"amqp://guest:guest@127.0.0.1:{port}/") as connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True)
        producers = [await _producer(connection, name) for _ in range(PRODUCERS)]
        consumers = [await _Consumer.start(connection, name) for _ in range(CONSUMERS)]
        yield Ends(producers, consumers)


async def _producer(connection: AbstractConnection, name: str) -> Put:
    channel = await connection.channel(publisher_confirms=True)

    async def put(bodies: list[bytes]) -> None:
        await asyncio.gather(*(channel.default_exchange.publish(_persistent(body), name) for body in bodies))

    return put


def _persistent(body: bytes) -> aio_pika.Message:
    return aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)


class _Consumer:
    """A consumer. The server pushes at most a batch of unacknowledged messages, so the queue here is bounded."""

    def __init__(self) -> None:
        self._came: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self._taken: list[AbstractIncomingMessage] = []

    @classmethod
    async def start(cls, connection: AbstractConnection, name: str) -> _Consumer:
        consumer = cls()
        channel: AbstractChannel = await connection.channel()
        await channel.set_qos(prefetch_count=BATCH)
        queue: AbstractQueue = await channel.get_queue(name)
        await queue.consume(consumer._came.put)
        return consumer

    async def take(self) -> list[bytes]:
        """Returns up to a batch. Messages arrive one by one, so this waits briefly for the batch to fill."""
        self._taken = []
        await self._fill(1, WAIT_S)
        await self._fill(BATCH, _FILLING_S)
        return [message.body for message in self._taken]

    async def _fill(self, count: int, wait_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(self._taken) < count:
                    self._taken.append(await self._came.get())

    async def delete(self) -> int:
        await self._taken[-1].ack(multiple=True)
        return len(self._taken)
