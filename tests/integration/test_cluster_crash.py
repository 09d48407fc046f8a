"""Processes of a cluster are killed or suspended, one after the other, while publishers and a durable subscriber use
it: every acknowledged notification arrives once and in order.

The clients know both brokers, and connect to the other when one dies. `make soak` repeats this more often. A failure
prints the seed: TIDEGATE_TEST_SEED=… repeats the choices, as far as a busy machine allows.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest
from layer_processes import Cluster
from redis_process import RedisProcess
from seeds import SEED

from tidegate import connect

KILLS = int(os.environ.get("TIDEGATE_TEST_KILLS", "6"))
PUBLISHERS = 3
OPEN_MAX = 20
BATCH = 20
LAYERS = ("access-point", "matcher", "exit-point")

pytestmark = [pytest.mark.crash, pytest.mark.cluster, pytest.mark.timeout(120 + 60 * KILLS)]


class World:
    """A cluster of 1-1-1 with a spare for each slice, two brokers, and the knowledge of its clients."""

    def __init__(self, cluster: Cluster, redis: RedisProcess) -> None:
        self.rng = random.Random(SEED)
        self.cluster = cluster
        for layer in LAYERS:  # on a busy machine a spare may be late too, and be declared dead
            cluster.add(layer)
        self.brokers = [cluster.add_broker("--queue-store", redis.url) for _ in range(2)]
        self.address = ",".join([self.brokers[0].native, self.brokers[1].native.removeprefix("tidegate://")])
        self.is_over = asyncio.Event()
        self.received: dict[int, list[int]] = {publisher: [] for publisher in range(PUBLISHERS)}
        self.count = 0

    # Clients.

    async def publish(self, publisher: int) -> int:
        """Publishes with several lists in flight, and returns how many notifications were acknowledged."""
        published = 0
        open_: set[asyncio.Task[None]] = set()
        async with connect(self.address) as broker:
            while not self.is_over.is_set():
                many = [{"publisher": publisher, "n": published + place} for place in range(BATCH)]
                open_.add(asyncio.ensure_future(broker.publish(many)))
                published += BATCH
                await asyncio.sleep(0.01)
                if len(open_) >= OPEN_MAX:
                    open_ = (await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED))[1]
            await asyncio.gather(*open_)
        return published

    async def read(self, is_ready: asyncio.Event) -> None:
        async with connect(self.address) as broker, broker.subscribe("publisher", name="kept") as subscription:
            is_ready.set()
            async for delivery in subscription:
                if delivery.notification["publisher"] == -1:
                    return
                self.received[delivery.notification["publisher"]].append(delivery.notification["n"])
                self.count += 1

    async def until_it_flows(self) -> None:
        wanted = self.count + 200
        while self.count < wanted:
            await asyncio.sleep(0.02)

    # Faults.

    async def harm(self, what: str) -> None:
        if what == "broker":
            broker = self.rng.choice(self.brokers)
            await asyncio.to_thread(broker.kill)
            await self.until_it_flows()
            await asyncio.to_thread(broker.start)
        elif what == "coordinator":
            await asyncio.to_thread(self.cluster.add_coordinator)
            await asyncio.to_thread(self.cluster.coordinators.pop(0).kill)
        else:
            await asyncio.to_thread(self.cluster.add, what)
            await asyncio.to_thread(self.lose_slice, what)

    def lose_slice(self, layer: str) -> None:
        name = getattr(self.cluster.state().current, layer.replace("-", "_") + "s")[0]
        slice_ = self.cluster.slices.pop(name)
        if self.rng.random() < 0.5:
            slice_.kill()
            self.cluster.settle(1, 1, 1, without=frozenset({name}))
        else:
            os.kill(slice_.pid, signal.SIGSTOP)
            try:
                self.cluster.settle(1, 1, 1, without=frozenset({name}))
            finally:
                os.kill(slice_.pid, signal.SIGCONT)
            assert slice_.wait() != 0

    async def run(self) -> None:
        is_ready = asyncio.Event()
        kinds = [*LAYERS, "broker", "broker", "coordinator"]
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self.read(is_ready))
            await is_ready.wait()
            publishing = [tasks.create_task(self.publish(publisher)) for publisher in range(PUBLISHERS)]
            for number in range(KILLS):
                if number % len(kinds) == 0:
                    self.rng.shuffle(kinds)
                await self.until_it_flows()
                await self.harm(kinds[number % len(kinds)])
            await self.until_it_flows()
            self.is_over.set()
            published = await asyncio.gather(*publishing)
            async with connect(self.address) as broker:
                await broker.publish({"publisher": -1})
            await reading
        for publisher, count in enumerate(published):
            assert self.received[publisher] == list(range(count)), f"TIDEGATE_TEST_SEED={SEED}"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


def test_whoever_dies_in_a_cluster_what_was_acknowledged_arrives_once_and_in_order(cluster: Cluster) -> None:
    with RedisProcess() as redis:

        async def scenario() -> None:
            await World(cluster, redis).run()

        asyncio.run(scenario())
