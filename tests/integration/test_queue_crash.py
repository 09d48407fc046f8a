"""A broker that is killed at random moments loses no acknowledged message, and stores none twice.

Producers and consumers are the product's own clients, which reconnect by themselves. `make soak` kills it more often. A
failure prints the seed: TIDEGATE_TEST_SEED=… repeats the moments, as far as a busy machine allows.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import pytest
from broker_process import BrokerProcess
from http_client import code_of, open_client
from seeds import SEED

from tidegate import connect
from tidegate.client import Connection
from tidegate.errors import TidegateError

KILLS = int(os.environ.get("TIDEGATE_TEST_KILLS", "6"))
PRODUCERS = 4
CONSUMERS = 3
BATCH = 20
MIB = 1024 * 1024


@dataclass
class Ledger:
    """The knowledge of producers and consumers. A body is [producer, number], and a producer's numbers increase."""

    acknowledged: set[tuple[int, int]] = field(default_factory=set)
    arrivals: Counter[tuple[int, int]] = field(default_factory=Counter)
    places: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    redelivered: int = 0
    is_over: bool = False
    producers: int = PRODUCERS


async def produce(broker: Connection, producer: int, ledger: Ledger) -> None:
    queue = broker.queue("work")
    number = 0
    while not ledger.is_over:
        bodies = [[producer, number + i] for i in range(BATCH)]
        number += BATCH
        await queue.put(bodies)
        ledger.acknowledged |= {(producer, body[1]) for body in bodies}
        await asyncio.sleep(0.02)
    ledger.producers -= 1


async def consume(broker: Connection, ledger: Ledger, rng: random.Random) -> None:
    queue = broker.queue("work")
    while ledger.producers or not ledger.arrivals.keys() >= ledger.acknowledged:
        messages = await queue.take(max=50, wait_s=0.5, visibility_s=2.0)
        for message in messages:
            producer, number = message.body
            key, place = (producer, number), (message.queue, message.sequence)
            ledger.arrivals[key] += 1
            ledger.redelivered += message.delivery > 1
            assert ledger.places.setdefault(key, place) == place, f"{key} is kept twice: {ledger.places[key]}, {place}"
        await asyncio.sleep(rng.uniform(0, 0.05))  # work, during which the broker may be killed
        await queue.delete(messages)


async def kill_now_and_then(process: BrokerProcess, rng: random.Random, ledger: Ledger) -> None:
    for _ in range(KILLS):
        await asyncio.sleep(rng.uniform(0.05, 1.2))
        process.kill()
        await asyncio.to_thread(process.start)
    await asyncio.sleep(0.5)
    ledger.is_over = True


async def soak(process: BrokerProcess, ledger: Ledger, rng: random.Random) -> None:
    async with connect(process.native, name="soak") as broker:
        await broker.queue("work").create(max_deliveries=0)
        async with asyncio.timeout(60 + 20 * KILLS), asyncio.TaskGroup() as tasks:
            for producer in range(PRODUCERS):
                tasks.create_task(produce(broker, producer, ledger))
            for _ in range(CONSUMERS):
                tasks.create_task(consume(broker, ledger, rng))
            tasks.create_task(kill_now_and_then(process, rng, ledger))


@pytest.mark.crash
@pytest.mark.timeout(90 + 20 * KILLS)
def test_nothing_acknowledged_is_lost_when_the_broker_is_killed() -> None:
    ledger = Ledger()
    with BrokerProcess() as process:
        asyncio.run(soak(process, ledger, random.Random(SEED)))
        with open_client(process) as client:
            statistics = client.get("/v1/queues/work/stats").json()
    lost = ledger.acknowledged - ledger.arrivals.keys()
    again = sum(ledger.arrivals.values()) - len(ledger.arrivals)
    print(
        f"seed {SEED}: {KILLS} kills, {len(ledger.acknowledged)} acknowledged, {len(lost)} lost, "
        f"{again} delivered again, {ledger.redelivered} of them counted as such"
    )
    assert ledger.acknowledged
    assert not lost, f"seed {SEED}"
    assert statistics["messages"] == 0


def put(client: httpx.Client, count: int, body: str = "x" * 1000) -> httpx.Response:
    return client.post("/v1/queues/work/messages", json=[{"body": [i, body]} for i in range(count)])


def drain(client: httpx.Client) -> int:
    """Takes and deletes all messages, and returns how many there were."""
    count = 0
    while messages := client.post("/v1/queues/work/dequeue", json={"max": 1000, "wait_s": 0.2}).json()["messages"]:
        count += len(messages)
        receipts = {"receipts": [message["receipt"] for message in messages]}
        assert client.post("/v1/queues/work/delete", json=receipts).json() == {"deleted": len(messages), "stale": 0}
    return count


def test_a_full_disk_refuses_what_comes_and_keeps_what_was_accepted() -> None:
    """The test limits the file size of the broker's process, which LMDB sees as a full disk."""
    with BrokerProcess() as process, open_client(process) as client:
        client.put("/v1/queues/work", json={}).raise_for_status()
        _soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (3 * MIB, hard))
        accepted = 0
        while (response := put(client, 100)).is_success:
            accepted += response.json()["accepted"]
        assert code_of(response) == (503, "U707")
        assert accepted
        assert client.get("/v1/queues/work/stats").json()["messages"] == accepted
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        accepted += put(client, 100).raise_for_status().json()["accepted"]
        assert drain(client) == accepted


def test_what_was_leased_before_a_crash_comes_again_and_old_receipts_are_stale() -> None:
    with BrokerProcess() as process, open_client(process) as client:
        client.put("/v1/queues/work", json={}).raise_for_status()
        put(client, 10).raise_for_status()
        taken = client.post("/v1/queues/work/dequeue", json={"max": 4, "visibility_s": 600}).json()["messages"]
        put(client, 1).raise_for_status()  # its commit also stores how far messages were delivered
        process.kill()
        process.start()
        receipts = {"receipts": [message["receipt"] for message in taken]}
        assert client.post("/v1/queues/work/delete", json=receipts).json() == {"deleted": 0, "stale": len(taken)}
        again = client.post("/v1/queues/work/dequeue", json={"max": 20}).json()["messages"]
        places = {(message["queue"], message["sequence"]): message["delivery"] for message in again}
        assert all(places[message["queue"], message["sequence"]] == 2 for message in taken)


def test_a_start_with_many_messages_is_quick_and_small() -> None:
    with BrokerProcess() as process, open_client(process) as client:
        client.put("/v1/queues/work", json={"durability": "os"}).raise_for_status()
        for _ in range(40):
            put(client, 1000).raise_for_status()
        process.kill()
        began_s = time.monotonic()
        process.start()
        assert client.get("/v1/queues/work/stats").json()["messages"] == 40_000
        assert time.monotonic() - began_s < 60  # a generous bound, because no message is read


def test_a_second_broker_may_not_use_the_same_data() -> None:
    with BrokerProcess() as process:
        second = BrokerProcess("--data", process.data)
        with pytest.raises(AssertionError, match="did not start"):
            second.start()
        second.__exit__(None, None, None)
        with open_client(process) as client:
            assert client.get("/readyz").is_success


def test_a_lost_connection_to_the_broker_is_an_error_that_names_the_cure() -> None:
    async def scenario() -> None:
        async with connect("tidegate://127.0.0.1:1", connect_timeout_s=0.2) as broker:
            await broker.queue("work").put("x")

    with pytest.raises(TidegateError, match="U701"):
        asyncio.run(scenario())
