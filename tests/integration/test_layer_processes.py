"""Layers in real processes, with a real ZooKeeper: they scale, are replaced, are killed while notifications flow, and
every notification that was acknowledged arrives once and in order."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from layer_processes import Cluster

from tidegate import connect, connect_sync

pytestmark = pytest.mark.timeout(240)
FLOW_S = 200


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


@contextmanager
def flowing(*addresses: str) -> Iterator[None]:
    """Notifications flow from the first broker to a subscriber at each of them, while the block runs. Then every one
    that was published has arrived everywhere, once and in order."""
    is_over, has_begun = threading.Event(), threading.Event()
    published = 0
    received: list[list[int]] = [[] for _ in addresses]

    async def publish() -> None:
        nonlocal published
        async with connect(addresses[0], name="flow") as broker:
            while not is_over.is_set():
                await broker.publish([{"flow": published + place} for place in range(50)])
                published += 50
                has_begun.set()
                await asyncio.sleep(0.005)
            await broker.publish({"flow": -1})

    async def subscribe(address: str, into: list[int], is_ready: asyncio.Event) -> None:
        async with connect(address) as broker, broker.subscribe("flow", policy="block") as subscription:
            is_ready.set()
            async for delivery in subscription:
                if delivery.notification["flow"] == -1:
                    return
                into.append(delivery.notification["flow"])

    async def flow() -> None:
        async with asyncio.timeout(FLOW_S), asyncio.TaskGroup() as tasks:
            for address, into in zip(addresses, received, strict=True):
                is_ready = asyncio.Event()
                tasks.create_task(subscribe(address, into, is_ready))
                await is_ready.wait()
            tasks.create_task(publish())

    thread = threading.Thread(target=asyncio.run, args=(flow(),))
    thread.start()
    try:
        assert has_begun.wait(FLOW_S)
        yield
    finally:
        is_over.set()
        thread.join()
    for into in received:
        assert into == list(range(published))


@pytest.mark.parametrize("switch", ["epoch", "buffered"])
def test_layers_scale_and_slices_are_replaced_while_notifications_flow(cluster: Cluster, switch: str) -> None:
    with flowing(cluster.add_broker().native):
        for kind in ("access-point", "matcher", "matcher", "exit-point"):
            cluster.add(kind)
        scaled = cluster.command("scale", "access-points=2", "matchers=3", "exit-points=2", "--switch", switch)
        assert len(scaled["slices"]) == 7
        other = cluster.add("matcher")
        replaced = cluster.command("replace", "matcher-1")
        assert other in replaced["slices"]
        assert "matcher-1" not in replaced["slices"]
        assert cluster.slices["matcher-1"].wait() == 0
        assert len(cluster.command("scale", "access-points=1", "matchers=1", "exit-points=1")["slices"]) == 3


@pytest.mark.parametrize("kind", ["access-point", "matcher", "exit-point"])
def test_a_killed_slice_costs_nothing_that_was_acknowledged(cluster: Cluster, kind: str) -> None:
    brokers = [cluster.add_broker() for _ in range(2)]
    with flowing(*(broker.native for broker in brokers)):
        cluster.add(kind)
        victim = f"{kind}-1"
        cluster.kill(victim)
        cluster.settle(1, 1, 1, without=frozenset({victim}))


def test_a_slice_that_slept_too_long_is_replaced_and_ends_when_it_wakes_up(cluster: Cluster) -> None:
    with flowing(cluster.add_broker().native):
        cluster.add("matcher")
        sleeper = cluster.slices["matcher-1"]
        os.kill(sleeper.pid, signal.SIGSTOP)
        try:
            cluster.settle(1, 1, 1, without=frozenset({"matcher-1"}))
        finally:
            os.kill(sleeper.pid, signal.SIGCONT)
        assert sleeper.wait() != 0


def test_another_coordinator_takes_over(cluster: Cluster) -> None:
    with flowing(cluster.add_broker().native):
        cluster.add_coordinator()
        cluster.add("matcher")
        cluster.coordinators[0].kill()
        cluster.command("scale", "matchers=2")


def test_a_killed_broker_holds_up_nobody(cluster: Cluster) -> None:
    one, other = cluster.add_broker(), cluster.add_broker()
    with flowing(one.native), connect_sync(other.native) as lost:
        lost.subscribe("flow")
        other.kill()
        with connect_sync(one.native) as broker:
            broker.publish({"other": 1})


def test_layers_shows_who_serves_and_who_waits(cluster: Cluster) -> None:
    spare = cluster.add("matcher")
    shown = cluster.command("layers")
    assert sorted(shown["slices"]) == ["access-point-1", "exit-point-1", "matcher-1"]
    assert (shown["spares"], shown["phase"], shown["connection_points"]) == ([spare], None, [])


def test_wrong_wishes_are_refused_with_the_cure(cluster: Cluster) -> None:
    for arguments, message in (
        (("scale", "matcher=2"), "P342"),
        (("scale", "matchers=0"), "P342"),
        (("replace", "matcher-9"), "P341"),
        (("scale", "matchers=3", "--timeout", "1"), "U732"),
    ):
        with pytest.raises(AssertionError, match=message):
            cluster.command(*arguments)
