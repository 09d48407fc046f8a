"""Layers in one process scale while clients publish and subscribe: every delivery is there, once and in order."""

from __future__ import annotations

import asyncio
import random

import msgspec
from test_embedded_host import Session

from tidegate.cluster.embedded_cluster import EmbeddedCluster
from tidegate.filters import Filter
from tidegate.frames import HEADER_BYTES, decode_deliver
from tidegate.layers.batch import BatchReader
from tidegate.layers.connection_point import Bounds
from tidegate.layers.frames import SubscriptionReady
from tidegate.layers.outbox import Policy

READER = BatchReader()
SUBSCRIPTIONS = 3000


class World:
    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.host = EmbeddedCluster(Bounds(), lambda: 0.0, self.failures.append)
        self.session = Session()
        self.number = self.host.open_session(self.session)
        self.host.connection_point.attach_publisher(self.number, "p")
        self.sent = 0
        self.received: dict[int, list[int]] = {}

    def subscribe(self, client_id: int) -> None:
        """To what has its number, modulo how many there are."""
        point = self.host.connection_point
        self.received[client_id] = []
        self.host.carry(point.subscribe(self.number, client_id, Filter.parse(f"a=={client_id}"), Policy.BLOCK))

    def publish(self, *values: int) -> None:
        batch = READER.read_array("p", self.sent + 1, msgspec.msgpack.encode([{"a": value} for value in values]))
        self.sent += len(values)
        self.host.carry(self.host.connection_point.submit("p", [batch], self.sent))

    def read(self) -> None:
        frames, outputs = self.host.connection_point.take(self.number, 1 << 30)
        self.host.carry(outputs)
        for frame in frames:
            for each in decode_deliver(frame[HEADER_BYTES:])[1]:
                ids = [each.subscriptions] if isinstance(each.subscriptions, int) else each.subscriptions
                for client_id in ids:
                    self.received[client_id].append(each.sequence)

    async def change(self, **counts: int) -> int:
        """How many subscriptions have moved."""
        changing = asyncio.ensure_future(self.host._change_layers(counts, None))
        rng, wanted = random.Random(self.sent), {number: list(kept) for number, kept in self.received.items()}
        while not changing.done():
            values = [rng.randint(1, len(self.received)) for _ in range(20)]
            for place, value in enumerate(values):
                wanted[value].append(self.sent + place + 1)
            self.publish(*values)
            self.subscribe(len(self.received) + 1)
            wanted[len(self.received)] = []
            self.read()
            await asyncio.sleep(0.002)
        assert self.received == wanted
        outcome = await changing
        assert outcome.subscriptions == len(self.received)
        return outcome.moved


def test_layers_scale_in_one_process() -> None:
    async def scenario() -> None:
        world = World()
        for client_id in range(1, SUBSCRIPTIONS + 1):
            world.subscribe(client_id)
        assert world.host.status()["epoch"] == 1
        moved = await world.change(matchers=3, access_points=2, exit_points=2)
        assert SUBSCRIPTIONS / 2 < moved < 0.85 * len(world.received)
        configuration = world.host.status()["configuration"]
        assert configuration["matchers"] == ("matcher-1", "matcher-2", "matcher-3")
        assert (len(configuration["access_points"]), len(configuration["exit_points"])) == (2, 2)
        assert world.host.statistics()["matcher"].subscriptions == len(world.received)
        await world.change(matchers=1, access_points=1, exit_points=1)
        assert sorted(world.host.slices) == [
            "access-point-1",
            "connection-point-1",
            "connection-point-2",
            "exit-point-1",
            "matcher-1",
        ]
        assert world.host.matcher.statistics().subscriptions == len(world.received)
        assert sum(isinstance(frame, SubscriptionReady) for frame in world.session.frames) == len(world.received)
        world.host.close_session(world.number)
        assert world.host.matcher.statistics().subscriptions == 0
        assert world.failures == []

    asyncio.run(scenario())
