"""The promises hold in every interleaving of the layers that a seed can produce.

TIDEGATE_TEST_SEEDS=20000 tries more seeds. To repeat a failure, use the seed in the name of the test.
"""

from __future__ import annotations

import os

import pytest
from seeds import in_tiers
from simulated_world import World

from tidegate.layers.connection_point import Bounds
from tidegate.layers.outbox import Policy

SEEDS = int(os.environ.get("TIDEGATE_TEST_SEEDS", "150"))
TINY_OUTBOXES = Bounds(outbox_notifications_max=5, outbox_bytes_max=400)


@pytest.mark.parametrize("seed", in_tiers(50, SEEDS))
def test_every_acknowledged_publish_arrives_once_and_in_order(seed: int) -> None:
    World(seed).run()


@pytest.mark.parametrize("seed", in_tiers(50, SEEDS))
def test_slow_subscribers_lose_what_they_are_told_or_hold_their_publishers(seed: int) -> None:
    World(seed, bounds=TINY_OUTBOXES, policies=(Policy.DROP_OLDEST, Policy.BLOCK)).run()


@pytest.mark.parametrize("seed", in_tiers(25, SEEDS // 3))
def test_subscribers_that_are_disconnected_hold_up_nobody(seed: int) -> None:
    World(seed, bounds=TINY_OUTBOXES, policies=(Policy.DISCONNECT, Policy.BLOCK)).run()


def test_a_blocking_subscriber_is_disconnected_after_its_time() -> None:
    world = World(1, bounds=TINY_OUTBOXES, policies=(Policy.BLOCK,))
    world.add_publisher("publisher-0")
    while not world.subscribers:
        world.subscribe()
    subscriber = world.subscribers[0]
    while any(world.channels.values()):
        world.carry_one()
    for _ in range(100):
        world.publish()
        while any(world.channels.values()):
            world.carry_one()
    point, publisher = subscriber.point, world.publishers[0]
    assert point.statistics().blocked_outboxes == 1
    assert publisher.acknowledged < publisher.sent
    world.send(point.name, point.on_tick(point.bounds.block_s - 0.1))
    assert not subscriber.was_disconnected
    world.send(point.name, point.on_tick(point.bounds.block_s))
    assert subscriber.was_disconnected
    world.come_to_rest()
    assert publisher.acknowledged == publisher.sent
