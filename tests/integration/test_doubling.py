"""Real brokers whose publishers resend stored messages: more than a queue remembers one by one.

One broker on LMDB is killed while a publisher has read none of its acknowledgements. Two brokers of a cluster on one
Redis both feed a queue, and are stopped in turn while the other continues. In the end every number is stored once.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from broker_process import BrokerProcess
from layer_processes import Cluster
from raw_client import RawClient, publish
from redis_process import RedisProcess

from tidegate import connect

SEED = os.environ.get("TIDEGATE_TEST_SEED") or secrets.token_hex(4)
MANY = 300_000
BATCH = 2000
PAUSES = 4
PAUSE_S = 1.5


def stored_in(address: str, queue: str) -> int:
    async def look() -> int:
        async with connect(address) as broker:
            return int((await broker.queue(queue).stats())["messages"])

    return asyncio.run(look())


def send_all(port: int) -> None:
    """Publishes all numbers in order, and waits for the last acknowledgement."""
    with RawClient(port) as client:
        client.hello("p")
        for first in range(1, MANY + 1, BATCH):
            client.send(publish(first, *({"n": n} for n in range(first, first + BATCH))))
        client.socket.settimeout(120)
        client.wait_acknowledged(MANY)


@pytest.mark.timeout(240)
def test_a_publisher_that_lost_all_acknowledgements_in_a_crash_sends_again_and_is_stored_once() -> None:
    async def make(address: str) -> None:
        async with connect(address) as broker:
            await broker.queue("all").create(filter="*", physical_queues=1, durability="os")

    with BrokerProcess() as broker:
        asyncio.run(make(broker.native))
        send_all(broker.native_port)  # as if the publisher had received no acknowledgement before the crash
        assert stored_in(broker.native, "all") == MANY
        broker.kill()
        broker.start()
        send_all(broker.native_port)
        assert stored_in(broker.native, "all") == MANY


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_brokers_that_are_stopped_in_turn_store_what_both_feed_once(cluster: Cluster) -> None:
    """No broker crashes here, and queues remember almost no single messages."""
    rng = random.Random(SEED)

    async def run(redis: RedisProcess) -> None:
        brokers = [cluster.add_broker("--queue-store", redis.url) for _ in range(2)]
        async with connect(brokers[0].native) as broker:
            settings = {"deduplication_messages_max": 100, "deduplication_s": 1.0, "durability": "memory"}
            await broker.queue("all").create(filter="n", physical_queues=1, **settings)
            await broker.queue("few").create(filter="odd==1", physical_queues=2, **settings)
        await asyncio.sleep(1.0)  # until the other broker knows them
        is_over = asyncio.Event()

        async def publish_to(which: int) -> int:
            published = 0
            async with connect(brokers[which].native) as broker:
                while not is_over.is_set():
                    some = [{"p": which, "n": n, "odd": n % 2} for n in range(published, published + 200)]
                    await broker.publish(some)
                    published += len(some)
            return published

        async with asyncio.TaskGroup() as tasks:
            publishing = [tasks.create_task(publish_to(which)) for which in range(2)]
            for _ in range(PAUSES):
                await asyncio.sleep(0.5)
                paused = rng.choice(brokers)
                os.kill(paused.pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(PAUSE_S)
                finally:
                    os.kill(paused.pid, signal.SIGCONT)
            is_over.set()
            published = await asyncio.gather(*publishing)

        for queue, step in (("all", 1), ("few", 2)):
            found = await take_all(brokers[0].native, queue)
            wanted = {(which, n) for which in range(2) for n in range(step - 1, published[which], step)}
            assert found.keys() == wanted, f"lost or made up: TIDEGATE_TEST_SEED={SEED}"
            doubled = sum(count - 1 for count in found.values())
            assert doubled == 0, f"{doubled} of {len(wanted)} are there twice: TIDEGATE_TEST_SEED={SEED}"

    with RedisProcess(fsync=None) as redis:
        asyncio.run(run(redis))


async def take_all(address: str, name: str) -> Counter[tuple[int, int]]:
    """Returns everything in a queue, once nothing more arrives."""
    found: Counter[tuple[int, int]] = Counter()
    async with connect(address) as broker:
        queue = broker.queue(name)
        deadline_s = time.monotonic() + 30
        before = -1
        while before != (now := int((await queue.stats())["messages"])):
            assert time.monotonic() < deadline_s, "the queue grows although nobody publishes"
            before = now
            await asyncio.sleep(1.0)
        for physical, level in enumerate(await queue.levels()):
            start = level.first
            while kept := await queue.read(physical, start, level.next):
                for each in kept:
                    body = each.body if isinstance(each.body, dict) else msgspec.msgpack.decode(each.body)
                    found[body["p"], body["n"]] += 1
                start = kept[-1].sequence + 1
    return found
