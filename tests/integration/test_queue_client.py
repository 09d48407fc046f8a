"""Queues as a program uses them: no acknowledged message is lost, none is put twice, and a message belongs to its
consumer while the consumer works on it, whatever happens to links and brokers meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from bad_network import CuttingProxy
from broker_checks import run
from broker_process import BrokerProcess
from http_client import wait_until
from random_world import make_random

from tidegate import (
    ConflictingQueue,
    Connection,
    Delivery,
    DurableSubscription,
    FilterError,
    Message,
    NewMessage,
    NoSuchQueue,
    Overloaded,
    Queue,
    QueueError,
    Unavailable,
    connect,
    connect_sync,
)
from tidegate.messages import Enqueued, Settled

NOWHERE = "tidegate://127.0.0.1:1"


def unique(prefix: str = "q") -> str:
    return f"{prefix}-{secrets.token_hex(6)}"


@asynccontextmanager
async def a_queue(broker: BrokerProcess, **settings: Any) -> AsyncIterator[Queue]:
    async with connect(broker.native) as connection:
        queue = connection.queue(unique())
        await queue.create(**{"physical_queues": 1, "durability": "os", **settings})
        yield queue


def bodies(messages: list[Message]) -> list[Any]:
    return [message.body for message in messages]


async def wait_for(queue: Queue, **expected: int) -> None:
    """Waits until the queue's statistics have these values."""
    while True:
        statistics = await queue.stats()
        if all(statistics[name] == value for name, value in expected.items()):
            return
        await asyncio.sleep(0.02)


@pytest.fixture
def mortal() -> Iterator[BrokerProcess]:
    """Runs a broker for one test, which may kill it."""
    with BrokerProcess() as process:
        yield process


class TestAQueue:
    def test_is_made_changed_described_and_dropped(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection:
                queue = connection.queue(unique())
                assert (await queue.create(physical_queues=2))["method"] == "wakeup"
                assert (await queue.create(physical_queues=2, method="rds"))["method"] == "rds"
                assert (await queue.describe())["method"] == "rds"
                assert queue.name in [each["name"] for each in await connection.queues()]
                with pytest.raises(ConflictingQueue, match="Q904"):
                    await queue.create(physical_queues=3)
                with pytest.raises(QueueError, match="Q903"):
                    await queue.create(colour="blue")
                await queue.drop()
                with pytest.raises(NoSuchQueue, match="Q901"):
                    await queue.describe()

        run(scenario())

    def test_gives_what_was_put(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                put = await queue.put({"NO2": 212}, group="g", device="d", sequence=5, headers={"kind": "alert"})
                assert put == Enqueued(1, 0, "os")
                (message,) = await queue.take()
                assert (message.body, message.group, message.headers) == ({"NO2": 212}, "g", {"kind": "alert"})
                assert (message.device, message.device_sequence) == ("d", 5)
                assert (message.delivery, message.queue, message.sequence) == (1, 0, 1)
                assert msgspec.msgpack.decode(message.raw) == {"NO2": 212}
                assert await queue.extend(message, 60) == Settled(1, 0)
                assert await queue.release([message], delay_s=0.05) == Settled(1, 0)
                (again,) = await queue.take()
                assert again.delivery == 2
                assert await queue.delete(message) == Settled(0, 1)
                assert await queue.delete(again) == Settled(1, 0)
                assert await queue.take(wait_s=0) == []

        run(scenario())

    @pytest.mark.parametrize("body", [None, 1, "text", b"bytes", [[1], 2], {"a": {"b": [1.5, True, None]}}, ""])
    def test_carries_any_body(self, broker: BrokerProcess, body: Any) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                await queue.put([body])
                assert bodies(await queue.take()) == [body]

        run(scenario())

    def test_splits_what_is_larger_than_a_frame(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                assert (await queue.put([bytes(200_000)] * 30)).accepted == 30
                assert (await queue.put(list(range(25_000)))).accepted == 25_000
                assert (await queue.put([])).accepted == 0
                await wait_for(queue, messages=25_030)

        run(scenario())

    def test_keeps_what_is_named_once(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker, physical_queues=4) as queue:
                assert await queue.put([1, 2, 3], device="d", sequence=1) == Enqueued(3, 0, "os")
                assert await queue.put([3, 4], device="d", sequence=3) == Enqueued(2, 1, "os")
                messages = [NewMessage(msgspec.Raw(b"\x05"), device="d", sequence=4), NewMessage(msgspec.Raw(b"\x06"))]
                assert await queue.put_messages(messages) == Enqueued(2, 1, "os")
                await wait_for(queue, messages=5)

        run(scenario())

    def test_keeps_a_numbered_batch_once_in_whatever_order_it_comes(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker, physical_queues=4, deduplication_s=0) as queue:
                messages = [
                    NewMessage(msgspec.Raw(bytes([n])), f"group-{n % 9}" if n % 3 else "", "d", n + 1)
                    for n in range(60)
                ]
                encoded = [msgspec.Raw(msgspec.msgpack.encode(message)) for message in messages]
                for number in (1, 2, 1 << 20, 2 << 20):
                    assert await queue.put_batch(messages, producer="p", number=number) == Enqueued(60, 0, "os")
                    assert (await queue.put_batch(encoded[::-1], producer="p", number=number)).duplicates == 60
                assert (await queue.put_batch(messages, producer="other", number=1)).duplicates == 0
                assert (await queue.put_batch(messages, producer="p", number=1)).duplicates == 60
                await wait_for(queue, messages=300)
                kept = [message for number in range(4) for message in await queue.read(number, 1, 1 << 40)]
                assert Counter(message.body for message in kept) == dict.fromkeys(range(60), 5)
                assert len({message.queue for message in kept if not message.group}) > 1, "they are spread"
                for group in {message.group for message in kept} - {""}:
                    mine = [message for message in kept if message.group == group]
                    assert len({message.queue for message in mine}) == 1
                    assert bodies(mine) == 5 * sorted({message.body for message in mine})

        run(scenario())

    def test_is_read_and_deleted_by_ranges(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                await queue.put(list(range(100)))
                assert bodies(await queue.read(0, 11, 21)) == list(range(10, 20))
                assert bodies(await queue.read(0, 1, 1000, max=7)) == list(range(7))
                await queue.put([bytes(200_000)] * 50)
                assert len(await queue.read(0, 1, 1000)) == 150
                assert await queue.delete_below(0, 51) == 50
                (level,) = await queue.levels()
                assert (level.first, level.next, level.messages) == (51, 151, 100)
                assert await queue.delete_below(0, level.next) == 100
                assert await queue.delete_below(0, level.next) == 0
                await wait_for(queue, messages=0, bytes=0)

        run(scenario(), timeout_s=20)

    def test_drives_dead_letters_back(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker, max_deliveries=1) as queue:
                await queue.put("poison")
                await queue.release(await queue.take())
                assert await queue.take(wait_s=0) == []
                await wait_for(queue, dead_letters=1)
                assert await queue.redrive() == 1
                assert bodies(await queue.take()) == ["poison"]

        run(scenario())


class TestErrors:
    @pytest.mark.parametrize(
        ("bodies", "options", "code"),
        [
            (object(), {}, "Q911"),
            (2**70, {}, "Q911"),
            (bytes(300_000), {}, "Q905"),
            ([1, bytes(2_000_000)], {}, "Q905"),
            (1, {"device": "d"}, "Q905"),
            (1, {"sequence": 1}, "Q905"),
            (1, {"group": "g" * 300}, "Q905"),
            (1, {"headers": {"k": "v" * 2000}}, "Q905"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_of_a_put_leave_the_queue_as_it_was(
        self, broker: BrokerProcess, bodies: Any, options: dict[str, Any], code: str
    ) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                with pytest.raises(QueueError, match=code):
                    await queue.put(bodies, **options)
                assert (await queue.put(1)).accepted == 1
                await wait_for(queue, messages=1)

        run(scenario())

    @pytest.mark.parametrize(
        ("count", "producer", "number", "code"),
        [
            (1, "", 1, "Q915"),
            (1, "p", 0, "Q915"),
            (1, "p", 2**53 + 1, "Q915"),
            (1, "p" * 300, 1, "Q915"),
            (10_001, "p", 1, "Q916"),
            (6, "p", 1, "Q916"),
        ],
    )
    def test_of_a_numbered_batch_leave_the_queue_as_it_was(
        self, broker: BrokerProcess, count: int, producer: str, number: int, code: str
    ) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                body = msgspec.Raw(msgspec.msgpack.encode(bytes(200_000 if count == 6 else 1)))
                with pytest.raises(QueueError, match=code):
                    await queue.put_batch([NewMessage(body)] * count, producer=producer, number=number)
                await wait_for(queue, messages=0)

        run(scenario())

    def test_of_a_queue_that_is_full_say_when_to_come_back(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker, messages_max=2) as queue:
                await queue.put([1, 2])
                with pytest.raises(Overloaded) as caught:
                    await queue.put(3)
                assert caught.value.retry_after_s == 2.0

        run(scenario())

    def test_of_a_broker_that_is_not_there(self) -> None:
        async def scenario() -> None:
            async with connect(NOWHERE, connect_timeout_s=0.2) as connection:
                with pytest.raises(Unavailable, match="U701"):
                    await connection.queue("q").put(1)
                with pytest.raises(Unavailable, match="U701"):
                    await anext(aiter(connection.queue("q")))
                async with connection.queue("q").batches():
                    pass

        run(scenario())

    def test_of_a_connection_that_is_not_open(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            with pytest.raises(Unavailable, match="U706"):
                connect(broker.native).queue("q")
            async with a_queue(broker) as queue:
                loop = aiter(queue.messages())
                await queue.put(1)
                await anext(loop)
            with pytest.raises(Unavailable, match="U706"):
                await queue.put(1)
            with pytest.raises(Unavailable, match="U706"):
                await anext(loop)

        run(scenario())

    def test_of_a_loop_over_no_queue(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection:
                async for _message in connection.queue(unique()):
                    pass

        with pytest.raises(NoSuchQueue):
            run(scenario())


class TestALoop:
    def test_deletes_a_message_when_the_next_is_asked_for(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                await queue.put([1, 2, 3])
                seen = []
                async with queue.messages() as messages:
                    async for message in messages:
                        seen.append(message.body)
                        await wait_for(queue, messages=4 - len(seen))
                        if len(seen) == 3:
                            break
                assert seen == [1, 2, 3]
                await wait_for(queue, messages=0, leased=0)

        run(scenario())

    def test_that_is_left_gives_back_what_it_has_not_handed_out(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                await queue.put([1, 2, 3, 4])
                async with queue.messages() as messages:
                    assert (await anext(messages)).body == 1
                    assert (await anext(messages)).body == 2
                await wait_for(queue, messages=2, leased=0)
                left = await queue.take()
                assert [(message.body, message.delivery) for message in left] == [(3, 1), (4, 1)]

        run(scenario())

    def test_that_has_ended_hands_out_nothing_of_what_it_gave_back(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                await queue.put([1, 2, 3])
                async with queue.messages() as messages:
                    assert (await anext(messages)).body == 1
                with pytest.raises(Unavailable, match="U706"):
                    await anext(messages)
                assert bodies(await queue.take()) == [2, 3]

        run(scenario())

    def test_whose_body_raises_releases_its_message(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                await queue.put([1, 2, 3])
                with contextlib.suppress(ZeroDivisionError):
                    async with queue.messages() as messages:
                        async for message in messages:
                            1 / (message.body - 2)
                await wait_for(queue, messages=2, leased=0)
                assert [(m.body, m.delivery) for m in await queue.take()] == [(2, 2), (3, 1)]

        run(scenario())

    def test_that_is_bare_and_raises_gives_everything_back_too(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                await queue.put([1, 2, 3])
                with contextlib.suppress(ZeroDivisionError):
                    async for message in queue:
                        1 / (message.body - 2)
                await wait_for(queue, messages=2, leased=0)

        run(scenario())

    def test_that_is_bare_gives_back_before_its_connection_ends(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                await queue.put([1, 2, 3])
                async with connect(broker.native) as connection:
                    async for _message in connection.queue(queue.name):
                        break
                statistics = await queue.stats()
                assert (statistics["messages"], statistics["leased"]) == (3, 0)

        run(scenario())

    @pytest.mark.parametrize("is_batch", [False, True])
    def test_keeps_its_messages_while_the_work_takes_longer_than_the_lease(
        self, broker: BrokerProcess, is_batch: bool
    ) -> None:
        """This includes messages that it has not passed to the program yet."""

        async def scenario() -> None:
            async with a_queue(broker) as queue:
                await queue.put([1, 2, 3])
                async with queue.batches(visibility_s=0.3) if is_batch else queue.messages(visibility_s=0.3) as loop:
                    await anext(loop)
                    assert await queue.take(wait_s=1.2) == []
                assert (await queue.stats())["expired"] == 0

        run(scenario())

    def test_over_batches(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker, linger_s=5) as queue:
                await queue.put(list(range(25)))
                seen: list[Any] = []
                async for batch in queue.batches(max=10, min=5):
                    seen += bodies(batch)
                    assert len(batch) in (10, 5)
                    if len(seen) == 25:
                        break
                assert seen == list(range(25))
                await wait_for(queue, messages=5, leased=0)  # a plain loop cannot know that its last batch is done

        run(scenario())

    @pytest.mark.parametrize("method", ["wakeup", "rds", "pms", "conventional"])
    def test_waits_for_messages_whatever_the_method(self, broker: BrokerProcess, method: str) -> None:
        async def scenario() -> None:
            settings = {"method": method, "sleep_s": 0.05, "monitor_period_s": 0.05}
            async with a_queue(broker, **settings) as queue, asyncio.TaskGroup() as tasks:

                async def put_later() -> None:
                    for n in range(3):
                        await asyncio.sleep(0.1)
                        await queue.put(n)

                tasks.create_task(put_later())
                async with queue.messages() as messages:
                    assert [(await anext(messages)).body for _ in range(3)] == [0, 1, 2]

        run(scenario())

    def test_whose_wait_is_cancelled_leaves_nothing_leased(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with a_queue(broker) as queue:
                for n in range(30):
                    putting = asyncio.create_task(queue.put(n))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.0005 * n):
                            await queue.delete(await queue.take())
                    await putting
                left = []
                while messages := await queue.take(wait_s=0.1):
                    left += messages
                statistics = await queue.stats()
                assert len(left) + statistics["deleted"] == 30
                assert statistics["parked"] == 0

        run(scenario())

    def test_of_several_consumers_shares_the_work(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            done: Counter[int] = Counter()

            async def work(connection: Connection, name: str) -> None:
                async with connection.queue(name).messages(max=10) as messages:
                    async for message in messages:
                        done[message.body] += 1
                        if len(done) == 2000:
                            return

            async with a_queue(broker, physical_queues=4) as queue, connect(broker.native) as other:
                workers = [asyncio.create_task(work(other, queue.name)) for _ in range(4)]
                await queue.put(list(range(2000)))
                await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
                for worker in workers:
                    worker.cancel()
                await asyncio.wait(workers)
                assert set(done.values()) == {1}

        run(scenario())


class TestABadNetwork:
    def test_costs_nothing_and_doubles_nothing(self, broker: BrokerProcess) -> None:
        """Links are cut anywhere, before or after answers. Each message is put once, and consumed."""

        async def scenario() -> None:
            async with (
                a_queue(broker, physical_queues=4, max_deliveries=0) as queue,
                CuttingProxy(broker.native, make_random(), bytes_max=30_000, cuts_max=30) as proxy,
                connect(proxy.address) as producer,
                connect(proxy.address) as consumer,
            ):
                done: Counter[int] = Counter()

                async def consume() -> None:
                    async with consumer.queue(queue.name).batches(visibility_s=1.0) as batches:
                        async for batch in batches:
                            done.update(bodies(batch))
                            if len(done) == 4000:
                                return

                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(consume())
                    for n in range(0, 4000, 20):
                        await producer.queue(queue.name).put(list(range(n, n + 20)))
                assert proxy.cuts > 0
                assert sorted(done) == list(range(4000))
                statistics = await queue.stats()
                assert statistics["enqueued"] == 4000

        run(scenario(), timeout_s=40)


class TestABrokerThatIsKilled:
    def test_loses_nothing_that_was_acknowledged(self, mortal: BrokerProcess) -> None:
        async def scenario() -> None:
            put = 0
            last = -1
            seen: Counter[int] = Counter()
            places: set[tuple[int, int]] = set()
            is_over = asyncio.Event()

            async def produce(connection: Connection) -> None:
                nonlocal put
                while not is_over.is_set():
                    await connection.queue("q").put(list(range(put, put + 10)))
                    put += 10

            async def consume(connection: Connection) -> None:
                async with connection.queue("q").messages(wait_s=1.0) as messages:
                    async for message in messages:
                        seen[message.body] += 1
                        places.add((message.queue, message.sequence))
                        if len(seen) == last + 1:
                            return

            async with connect(mortal.native) as producer, connect(mortal.native) as consumer:
                await producer.queue("q").create(max_deliveries=0)
                async with asyncio.TaskGroup() as tasks:
                    producing = tasks.create_task(produce(producer))
                    tasks.create_task(consume(consumer))
                    for _ in range(2):
                        before = len(seen)
                        while len(seen) < before + 200:
                            await asyncio.sleep(0.01)
                        await asyncio.to_thread(mortal.kill)
                        await asyncio.to_thread(mortal.start)
                    is_over.set()
                    await producing
                    last = put
                    await producer.queue("q").put(last)
                assert sorted(seen) == list(range(last + 1))
                assert len(places) == len(seen), "some were put twice"
                # Redelivered are messages in hand when the broker died: one batch, and one whose deletion was pending.
                assert sum(count - 1 for count in seen.values()) <= 2 * 2 * 100

        run(scenario(), timeout_s=40)

    def test_tidily_is_no_error_for_those_who_wait(self, mortal: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(mortal.native) as connection:
                queue = connection.queue("q")
                await queue.create()
                async with queue.messages() as messages:
                    waiting = asyncio.create_task(messages.__anext__())
                    await asyncio.sleep(0.1)
                    assert await asyncio.to_thread(mortal.terminate) == 0
                    await asyncio.to_thread(mortal.start)
                    await queue.put("after")
                    assert (await waiting).body == "after"

        run(scenario(), timeout_s=20)

    def test_does_not_hold_those_who_leave(self, mortal: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(mortal.native) as connection:
                await connection.queue("q").create()
                await connection.queue("q").put([1, 2])
                async with connection.queue("q").messages() as messages:
                    await anext(messages)
                    await asyncio.to_thread(mortal.kill)
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run(scenario())


async def take_numbers(subscription: DurableSubscription, count: int) -> list[int]:
    return [(await anext(subscription)).notification["n"] for _ in range(count)]


class TestADurableSubscription:
    def test_goes_on_where_the_last_reader_ended(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            name = unique("s")
            async with connect(broker.native, name="sensor") as publisher:
                async with connect(broker.native) as reader, reader.subscribe("n>=0", name=name) as subscription:
                    await publisher.publish([{"n": n} for n in range(10)])
                    delivery = await anext(subscription)
                    assert (delivery.notification, delivery.sequence) == ({"n": 0}, 1)
                    assert delivery.publisher.startswith("sensor-")
                    assert await take_numbers(subscription, 4) == [1, 2, 3, 4]
                await publisher.publish([{"n": 10}, {"m": 1}])
                async with connect(broker.native) as reader, reader.subscribe(name=name) as subscription:
                    assert await take_numbers(subscription, 6) == [5, 6, 7, 8, 9, 10]
                    assert subscription.statistics().received == 6
                    [listed] = [each for each in await reader.subscriptions() if each["name"] == name]
                    assert listed.items() >= {"name": name, "filter": "n>=0", "policy": "block"}.items()
                    await reader.unsubscribe(name)
                    assert name not in [each["name"] for each in await reader.subscriptions()]

        run(scenario())

    def test_gives_again_what_its_reader_failed_with(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            name = unique("s")
            async with connect(broker.native) as connection:
                with contextlib.suppress(ZeroDivisionError):
                    async with connection.subscribe("n>=0", name=name) as subscription:
                        await connection.publish([{"n": n} for n in range(3)])
                        assert await take_numbers(subscription, 2) == [0, 1]
                        raise ZeroDivisionError
                async with connection.subscribe(name=name) as subscription:
                    assert await take_numbers(subscription, 2) == [1, 2]

        run(scenario())

    def test_that_is_not_there_and_has_no_filter(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection:
                with pytest.raises(NoSuchQueue):
                    await anext(aiter(connection.subscribe(name=unique("s"))))
                with pytest.raises(NoSuchQueue):
                    await connection.unsubscribe(unique("s"))
                with pytest.raises(FilterError):
                    connection.subscribe("n >", name="s")
                with pytest.raises(QueueError, match="Q903"):
                    await anext(aiter(connection.subscribe("n", name="s", policy="disconnect")))

        run(scenario())

    def test_ends_when_it_is_closed(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with (
                connect(broker.native) as connection,
                connection.subscribe("n", name=unique("s")) as subscription,
            ):
                asyncio.get_running_loop().call_later(0.1, subscription.close)
                assert [delivery async for delivery in subscription] == []

        run(scenario())

    def test_that_has_ended_hands_out_nothing_of_what_it_gave_back(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            name = unique("s")
            async with connect(broker.native) as connection:
                async with connection.subscribe("n>=0", name=name) as first:
                    await connection.publish([{"n": n} for n in range(3)])
                    assert await take_numbers(first, 1) == [0]
                assert [delivery async for delivery in first] == []
                async with connection.subscribe(name=name) as second:
                    assert await take_numbers(second, 2) == [1, 2]

        run(scenario())

    def test_is_in_order_and_complete_over_cut_links(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with (
                CuttingProxy(broker.native, make_random(), bytes_max=30_000, cuts_max=20) as proxy,
                connect(broker.native) as publisher,
                connect(proxy.address) as reader,
                reader.subscribe("n>=0", name=unique("s")) as subscription,
                asyncio.TaskGroup() as tasks,
            ):

                async def publish() -> None:
                    for n in range(0, 6000, 20):
                        await publisher.publish([{"n": n + at} for at in range(20)])

                tasks.create_task(publish())
                seen: list[Delivery] = []
                async for delivery in subscription:
                    seen.append(delivery)
                    if len(seen) == 6000:
                        break
                assert [delivery.notification["n"] for delivery in seen] == list(range(6000))
                assert proxy.cuts > 0

        run(scenario(), timeout_s=40)

    def test_survives_a_broker_that_is_killed(self, mortal: BrokerProcess) -> None:
        async def scenario() -> None:
            seen: list[int] = []
            async with (
                connect(mortal.native) as publisher,
                connect(mortal.native) as reader,
                reader.subscribe("n>=0", name="s") as subscription,
                asyncio.TaskGroup() as tasks,
            ):
                is_over = asyncio.Event()
                published = 0

                async def publish() -> None:
                    nonlocal published
                    while not is_over.is_set():
                        await publisher.publish([{"n": published + at} for at in range(10)])
                        published += 10

                async def read() -> None:
                    async for delivery in subscription:
                        seen.append(delivery.notification["n"])  # noqa: PERF401 - others look at it meanwhile

                publishing = tasks.create_task(publish())
                reading = tasks.create_task(read())
                for _ in range(2):
                    before = len(seen)
                    while len(seen) < before + 100:
                        await asyncio.sleep(0.01)
                    await asyncio.to_thread(mortal.kill)
                    await asyncio.to_thread(mortal.start)
                is_over.set()
                await publishing
                while len(seen) < published:
                    await asyncio.sleep(0.01)
                reading.cancel()
            assert seen == list(range(published))

        run(scenario(), timeout_s=40)


class TestTheSynchronousClient:
    def test_does_it_all(self, broker: BrokerProcess) -> None:
        with connect_sync(broker.native) as connection:
            queue = connection.queue(unique())
            queue.create(physical_queues=1, durability="os")
            assert queue.name in [each["name"] for each in connection.queues()]
            assert queue.describe()["durability"] == "os"
            assert queue.put([1, 2, 3]).accepted == 3
            four = [NewMessage(msgspec.Raw(b"\x04"))]
            assert [queue.put_batch(four, producer="p", number=1).duplicates for _ in range(2)] == [0, 1]
            first, second, *others = queue.take(max=4)
            assert queue.delete(first).done == 1
            assert queue.extend(second).done == 1
            assert queue.release([second, *others]).done == 3
            assert bodies(queue.read(0, 1, 100)) == [2, 3, 4]
            assert queue.delete_below(0, 3) == 1
            assert queue.levels()[0].messages == 2
            assert queue.redrive() == 0
            for message in queue:
                if message.body == 4:
                    break
            del message
            # The loop deletes while it continues. At its end it resends a deletion that is not committed yet.
            wait_until(lambda: queue.stats()["messages"] == 1)
            queue.drop()

    def test_puts_into_a_queue_that_gets_what_it_publishes(self, broker: BrokerProcess) -> None:
        """Puts and publishes are numbered separately, and the queue must not confuse them."""
        with connect_sync(broker.native) as connection:
            queue = connection.queue(unique())
            queue.create(physical_queues=1, filter="both")
            connection.publish([{"both": n} for n in range(3)])
            assert queue.put([10, 11, 12]).duplicates == 0
            assert queue.levels()[0].messages == 6

    def test_has_durable_subscriptions(self, broker: BrokerProcess) -> None:
        name = unique("s")
        with connect_sync(broker.native) as connection:
            with connection.subscribe("n", name=name) as subscription:
                connection.publish([{"n": 1}, {"n": 2}])
                assert [next(iter(subscription)).notification for _ in range(1)] == [{"n": 1}]
            connection.unsubscribe(name)
            assert name not in [each["name"] for each in connection.subscriptions()]
