"""Programs that a full queue refuses retry by themselves, at a moderate pace."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from broker_process import BrokerProcess

from tidegate import Message, NewMessage, Overloaded, Queue, connect
from tidegate.listeners.native_queues import REQUESTS_MAX


def test_a_put_into_a_full_queue_waits_until_there_is_room_and_is_kept_once(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with connect(broker.native) as connection:
            queue = connection.queue("paced")
            await queue.create(messages_max=4, physical_queues=1)
            await queue.put([0, 1, 2, 3])
            with pytest.raises(Overloaded, match="L608"):
                await queue.put(4)
            putting = asyncio.create_task(queue.put([4, 5], wait_s=60.0))
            await asyncio.sleep(0.3)
            assert not putting.done()
            taken = [message.body for message in await _take_and_delete(queue)]
            async with asyncio.timeout(60):
                assert (await putting).accepted == 2
                while len(taken) < 6:
                    taken += [message.body for message in await _take_and_delete(queue)]
            assert sorted(taken) == [0, 1, 2, 3, 4, 5]
            assert await queue.take(wait_s=0.0) == []

    asyncio.run(scenario())


def test_a_numbered_batch_waits_for_room_and_is_kept_once(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with connect(broker.native) as connection:
            queue = connection.queue("paced-batch")
            await queue.create(messages_max=2, physical_queues=1)
            await queue.put([0, 1])
            batch = [NewMessage(msgspec.Raw(body)) for body in (b"2", b"3")]
            putting = asyncio.create_task(queue.put_batch(batch, producer="job", number=1, wait_s=60.0))
            await asyncio.sleep(0.3)
            assert not putting.done()
            assert len(await _take_and_delete(queue)) == 2
            async with asyncio.timeout(60):
                assert (await putting).accepted == 2
            assert (await queue.put_batch(batch, producer="job", number=1)).duplicates == 2
            assert len(await _take_and_delete(queue)) == 2

    asyncio.run(scenario())


def test_a_put_gives_up_when_its_time_is_over(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with connect(broker.native) as connection:
            queue = connection.queue("paced-out")
            await queue.create(messages_max=1, physical_queues=1)
            await queue.put(0)
            async with asyncio.timeout(60):
                with pytest.raises(Overloaded, match="L608"):
                    await queue.put(1, wait_s=1.5)

    asyncio.run(scenario())


def test_a_consumer_that_is_refused_comes_back(broker: BrokerProcess) -> None:
    """The number of open requests per connection is bounded. A loop that exceeds it is told to retry."""

    async def scenario() -> None:
        async with connect(broker.native) as connection:
            queue, others = connection.queue("paced-loop"), connection.queue("paced-others")
            await queue.create()
            await others.create()
            await queue.put("message")
            waiting = [asyncio.create_task(others.take(wait_s=20.0)) for _ in range(REQUESTS_MAX)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="L610"):
                await queue.take()
            async with asyncio.timeout(60), queue.messages() as messages:
                looping = asyncio.create_task(anext(messages))
                await asyncio.sleep(0.2)
                assert not looping.done()
                for task in waiting:
                    task.cancel()
                assert (await looping).body == "message"

    asyncio.run(scenario())


async def _take_and_delete(queue: Queue) -> list[Message]:
    messages = await queue.take(wait_s=5.0)
    await queue.delete(messages)
    return messages
