"""Layers in real processes with a real ZooKeeper: they are scaled, replaced and killed while notifications flow, and
every acknowledged notification arrives once and in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from http_client import open_client
from layer_processes import SETTLE_S, Cluster

from tidegate import connect, connect_sync

pytestmark = pytest.mark.timeout(240)
FLOW_S = 200
WORKING = ("access-point-1", "matcher-1", "exit-point-1", "connection-point-1")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


@contextmanager
def flowing(*addresses: str) -> Iterator[None]:
    """Publishes at the first broker to a subscriber at each broker, while the block runs. Then checks that every
    notification has arrived everywhere, once and in order."""
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


@pytest.mark.parametrize("switch", ["epoch", pytest.param("buffered", marks=pytest.mark.cluster)])
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


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["access-point", "matcher", "exit-point"])
def test_a_killed_slice_costs_nothing_that_was_acknowledged(cluster: Cluster, kind: str) -> None:
    brokers = [cluster.add_broker() for _ in range(2)]
    with flowing(*(broker.native for broker in brokers)):
        cluster.add(kind)
        victim = f"{kind}-1"
        cluster.kill(victim)
        cluster.settle(1, 1, 1, without=frozenset({victim}))


@pytest.mark.crash
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


@pytest.mark.crash
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


@pytest.mark.crash
def test_a_named_subscription_outlives_the_process_of_its_broker(cluster: Cluster) -> None:
    """Its broker accepts notifications again only when the layers know its queues."""
    cluster.add("access-point")
    cluster.command("scale", "access-points=2", "--no-probe")
    broker = cluster.add_broker()

    async def publish(first: int) -> None:
        async with connect(broker.native) as publisher:
            await publisher.publish([{"n": first + place} for place in range(100)])

    async def scenario() -> list[int]:
        async with connect(broker.native) as reader, reader.subscribe("n>=0", name="kept"):
            pass
        await publish(0)
        for round_number in range(1, 4):
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            await publish(100 * round_number)
        async with connect(broker.native) as reader, reader.subscribe(name="kept") as subscription:
            return [(await anext(subscription)).notification["n"] for _ in range(400)]

    assert asyncio.run(scenario()) == list(range(400))


def test_layers_shows_who_serves_and_who_waits(cluster: Cluster) -> None:
    spare = cluster.add("matcher")
    shown = cluster.command("layers")
    assert sorted(shown["slices"]) == ["access-point-1", "exit-point-1", "matcher-1"]
    assert (shown["spares"], shown["phase"], shown["connection_points"]) == ([spare], None, {})


def test_layers_and_brokers_show_what_the_slices_do(cluster: Cluster) -> None:
    broker = cluster.add_broker()
    with connect_sync(broker.native) as client, flowing(broker.native):
        client.subscribe("other")
        load = wait_until_working(lambda: loads_of(cluster.command("layers")))
        with open_client(broker) as http:
            wait_until_working(lambda: http.get("/v1/layers").json()["slices"])
    assert all(load[name]["busy_share"] > 0 for name in WORKING)
    assert load["matcher-1"]["subscriptions"] == 2


def loads_of(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: each["load"] for name, each in (shown["slices"] | shown["connection_points"]).items()}


def wait_until_working(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Waits until all slices report work. They report twice per second, about the last half second."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        loads = look()
        if all((loads.get(name) or {}).get("notifications_per_s") for name in WORKING):
            return loads
        assert time.monotonic() < deadline_s, loads
        time.sleep(0.1)


@pytest.mark.cluster
def test_scaling_tells_what_moved_and_what_its_probe_saw(cluster: Cluster) -> None:
    broker = cluster.add_broker()
    cluster.add("matcher")
    with connect_sync(broker.native) as client:
        for number in range(40):
            client.subscribe(f"number=={number}")
        told = cluster.command("scale", "matchers=2")
        assert 0 < told["moved"] < 56  # sixteen belong to the probe
        assert told["moved_share"] == round(told["moved"] / 56, 3)
        assert told["probes"] > 50
        assert told["longest_delay_ms"] > 0
        assert (told["lost"], told["doubled"], told["disordered"]) == (0, 0, 0)
        cluster.add("matcher")
        quiet = cluster.command("replace", "matcher-1", "--no-probe")
    assert "probes" not in quiet
    assert "matcher-1" not in quiet["slices"]


@pytest.mark.crash
def test_layers_go_on_while_zookeeper_is_away(cluster: Cluster) -> None:
    broker = cluster.add_broker()
    cluster.add("matcher")
    with flowing(broker.native):
        cluster.zookeeper.kill()
        with connect_sync(broker.native) as client:
            for number in range(5):
                client.publish({"other": number})
                time.sleep(0.3)
        cluster.zookeeper.start()
        cluster.command("scale", "matchers=2", "--no-probe")


@pytest.mark.cluster
def test_autoscaling_adds_matchers_under_load(cluster: Cluster) -> None:
    broker = cluster.add_broker()
    cluster.add("matcher")
    flags = ["--p99-ms", "1000", "--busy", "0.01", "--grow-after", "1", "--every", "0.5"]
    flags += ["--max-matchers", "2", "--max-access-points", "1", "--max-exit-points", "1"]
    autoscaling = subprocess.Popen(
        [sys.executable, "-m", "tidegate", "autoscale", *flags, "--coordinator", cluster.zookeeper.address],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with flowing(broker.native):
            assert autoscaling.stdout is not None
            decided = json.loads(autoscaling.stdout.readline())
            assert decided["wanted"]["matchers"] == 2
            assert "Matchers 1 → 2" in decided["why"]
            cluster.settle(1, 2, 1)
    finally:
        autoscaling.send_signal(signal.SIGINT)
        autoscaling.communicate(timeout=30)
    assert autoscaling.returncode == 130


def test_wrong_wishes_are_refused_with_the_cure(cluster: Cluster) -> None:
    for arguments, message in (
        (("scale", "matcher=2"), "P342"),
        (("scale", "matchers=0"), "P342"),
        (("replace", "matcher-9"), "P341"),
        (("scale", "matchers=3", "--timeout", "1", "--no-probe"), "U732"),
        (("autoscale", "--p99-ms", "0"), "C413"),
        (("autoscale", "--p99-ms", "5", "--every", "0"), "P343"),
    ):
        with pytest.raises(AssertionError, match=message):
            cluster.command(*arguments)
