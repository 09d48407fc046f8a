"""Layers in one process scale while clients publish and subscribe: every delivery arrives once and in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec
import pytest
from test_embedded_host import Client

from tidegate.cluster.embedded_cluster import EmbeddedCluster
from tidegate.cluster.planning import Wanted
from tidegate.cluster.scaling import Scaling
from tidegate.errors import Overloaded, Unavailable
from tidegate.filters import Filter
from tidegate.frames import HEADER_BYTES, decode_deliver
from tidegate.layers.batch import BatchReader
from tidegate.layers.connection_point import Bounds
from tidegate.layers.outbox import Policy
from tidegate.layers.session_events import SubscriptionReady

READER = BatchReader()
SUBSCRIPTIONS = 3000


def to(**counts: int) -> Callable[[Wanted], Wanted]:
    return lambda wanted: msgspec.structs.replace(wanted, **counts)


class World:
    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.host = EmbeddedCluster(Bounds(), lambda: 0.0, self.failures.append)
        self.client = Client(self.host)
        self.session = self.client.session
        self.session.attach_publisher("p")
        self.sent = 0
        self.received: dict[int, list[int]] = {}

    def subscribe(self, client_id: int) -> None:
        """Subscribes a client to the notifications with its number, modulo the number of clients."""
        self.received[client_id] = []
        self.session.subscribe(client_id, Filter.parse(f"a=={client_id}"), Policy.BLOCK)

    def publish(self, *values: int) -> None:
        batch = READER.read_array("p", self.sent + 1, msgspec.msgpack.encode([{"a": value} for value in values]))
        self.sent += len(values)
        self.session.submit([batch], self.sent)

    def read(self) -> None:
        frames: list[bytes] = []
        self.session.take(1 << 30, frames.extend)
        for frame in frames:
            for each in decode_deliver(frame[HEADER_BYTES:])[1]:
                ids = [each.subscriptions] if isinstance(each.subscriptions, int) else each.subscriptions
                for client_id in ids:
                    self.received[client_id].append(each.sequence)

    async def change(self, **counts: int) -> int:
        """How many subscriptions have moved."""
        changing = asyncio.ensure_future(Scaling(self.host.layers).change(to(**counts)))
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
        moved = await world.change(matchers=1, access_points=1, exit_points=1)
        assert SUBSCRIPTIONS / 2 < moved < 0.85 * len(world.received)
        assert sorted(world.host.slices) == [
            "access-point-1",
            "connection-point-1",
            "connection-point-2",
            "exit-point-1",
            "matcher-1",
        ]
        assert world.host.matcher.statistics().subscriptions == len(world.received)
        assert sum(isinstance(event, SubscriptionReady) for event in world.client.events) == len(world.received)
        world.session.close()
        assert world.host.matcher.statistics().subscriptions == 0
        assert world.failures == []

    asyncio.run(scenario())


def test_there_is_one_change_at_a_time() -> None:
    async def scenario() -> None:
        world = World()
        world.subscribe(1)
        scaling = Scaling(world.host.layers)
        done, refused = await asyncio.gather(
            scaling.change(to(matchers=2)), scaling.change(to(matchers=3)), return_exceptions=True
        )
        assert isinstance(refused, Overloaded)
        assert refused.code == "L660"
        assert not isinstance(done, BaseException)
        assert done.state.current.matchers == ("matcher-1", "matcher-2")

    asyncio.run(scenario())


def test_a_change_that_takes_too_long_continues() -> None:
    async def scenario() -> None:
        world = World()
        for client_id in range(1, SUBSCRIPTIONS + 1):
            world.subscribe(client_id)
        layers = world.host.layers
        shown: list[str] = []
        with pytest.raises(Unavailable, match="U732"):
            await Scaling(layers, timeout_s=0, show=shown.append).change(to(matchers=2))
        assert shown == ["epoch 2: prepare"]
        with pytest.raises(Overloaded, match="L660"):
            await Scaling(layers).change(to(matchers=3))
        while layers.state().transaction is not None:
            await layers.wait_change()
        assert layers.state().current.matchers == ("matcher-1", "matcher-2")
        assert (await Scaling(layers, show=shown.append).change(to(matchers=1))).state.current.epoch == 3
        assert shown[-1] == "epoch 3: in effect"

    asyncio.run(scenario())
