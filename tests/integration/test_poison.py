"""A message that makes its consumer fail becomes a dead letter by itself, and its neighbours are processed.

The consumer is a typical program: it takes batches, and if one message fails the whole batch fails.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from broker_checks import run
from broker_process import BrokerProcess

from tidegate import connect
from tidegate.client import Connection

POISON = {3, 41}
COUNT = 60


async def work_until_nothing_is_left(broker: Connection, name: str, tried: Counter[int]) -> set[int]:
    """Processes batches until the queue is empty, and returns the processed messages. A batch with a poison message is
    released as a whole."""
    queue = broker.queue(name)
    done: set[int] = set()
    while messages := await queue.take(max=20, wait_s=0.3):
        bodies = [message.body for message in messages]
        tried.update(bodies)
        if POISON & set(bodies):
            await queue.release(messages)
        else:
            await queue.delete(messages)
            done |= set(bodies)
    return done


@pytest.mark.parametrize("max_deliveries", [2, 3, 5])
def test_poison_condemns_none_of_its_neighbours(broker: BrokerProcess, max_deliveries: int) -> None:
    async def scenario() -> None:
        name = f"poisoned-{max_deliveries}"
        async with connect(broker.native) as connection:
            queue = connection.queue(name)
            await queue.create(max_deliveries=max_deliveries, physical_queues=2)
            await queue.put(list(range(COUNT)))
            tried: Counter[int] = Counter()
            done = await work_until_nothing_is_left(connection, name, tried)
            assert done == set(range(COUNT)) - POISON
            assert all(tried[number] == max_deliveries for number in POISON)
            assert max(tried.values()) == max_deliveries
            dead = await connection.queue(f"{name}.dead").take(max=10, wait_s=5.0)
            assert {message.body for message in dead} == POISON
            assert {message.headers["dead-letter-deliveries"] for message in dead} == {str(max_deliveries)}
            assert all(float(message.headers["dead-letter-at"]) >= message.enqueued_at for message in dead)
            await connection.queue(f"{name}.dead").release(dead)
            assert await queue.redrive() == len(POISON)
            again = await queue.take(max=10, wait_s=5.0)
            assert {(message.body, message.delivery) for message in again} == {(number, 1) for number in POISON}
            assert not any(message.headers for message in again)

    run(scenario())


def test_a_consumer_that_dies_with_a_batch_condemns_nobody(broker: BrokerProcess) -> None:
    """It never settles anything, so the leases of its batches expire again and again."""

    async def scenario() -> None:
        async with connect(broker.native) as connection:
            queue = connection.queue("abandoned")
            await queue.create(max_deliveries=3, physical_queues=1)
            await queue.put(list(range(10)))
            for _ in range(2):
                assert len(await queue.take(max=10, wait_s=5.0, visibility_s=0.05)) == 10
                await asyncio.sleep(0.1)
            alone = await queue.take(max=10, wait_s=5.0, visibility_s=600.0)
            assert [(message.body, message.delivery) for message in alone] == [(0, 3)]
            assert [message.body for message in await queue.take(max=10, wait_s=5.0)] == [1]

    run(scenario())
