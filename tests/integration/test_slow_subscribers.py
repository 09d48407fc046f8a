"""A slow subscriber is treated by its policy, and does not affect others unless its policy is `block`.

The broker keeps 1000 notifications per subscriber here. A client's program falls behind when it has 10 000 waiting and
the sockets are full. So the notifications carry a payload: the remaining 5000 are more than the 36 MB that sockets on
loopback grow to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from broker_checks import load, run, take, take_until, wait_load
from broker_process import BrokerProcess
from raw_client import RawClient, publish

from tidegate import Connection, Delivery, Overloaded, Subscription, connect
from tidegate.frames import ErrorBody, Gap, Kind, decode_body, decode_deliver

FLOOD = 16_000
PAYLOAD = bytes(10_000)
LAST = {"last": True}


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess("--outbox-notifications-max", "1000") as process:
        yield process


@pytest.fixture(scope="module")
def impatient() -> Iterator[BrokerProcess]:
    with BrokerProcess("--outbox-notifications-max", "1000", "--block-s", "1") as process:
        yield process


def is_last(delivery: Delivery) -> bool:
    return delivery.notification == LAST


async def flood(connection: Connection, count: int = FLOOD) -> None:
    """Publishes 0, 1, 2 …, and returns when all are acknowledged."""
    for start in range(0, count, 500):
        await connection.publish([{"n": n, "$payload": PAYLOAD} for n in range(start, min(start + 500, count))])
    await connection.publish(LAST)


async def flood_and_read(connection: Connection, quick: Subscription) -> list[int]:
    """Does the same with a subscriber that keeps up, because it reads each list before the next is published."""
    numbers: list[int] = []
    for start in range(0, FLOOD, 500):
        await connection.publish([{"n": n, "$payload": PAYLOAD} for n in range(start, start + 500)])
        numbers += [delivery.notification["n"] for delivery in await take(quick, 500)]
    await connection.publish(LAST)
    await take(quick, 1)
    return numbers


async def read_numbers(subscription: Subscription) -> list[int]:
    return [delivery.notification["n"] for delivery in await take_until(subscription, is_last)]


class TestDropOldest:
    def test_counts_what_it_drops_and_keeps_the_order(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with (
                connect(broker.native) as publisher,
                connect(broker.native) as slow,
                connect(broker.native) as quick,
                slow.subscribe("*") as unread,
                quick.subscribe("*") as read,
            ):
                before = await load(publisher)
                assert await flood_and_read(publisher, read) == list(range(FLOOD))
                deliveries = await take_until(unread, is_last)
                numbers = [delivery.notification["n"] for delivery in deliveries]
                assert numbers == sorted(set(numbers))
                statistics = unread.statistics()
                assert statistics.missed > 0
                assert statistics.received + statistics.missed == FLOOD + 1
                assert_missed_are_told_in_place(deliveries)
                dropped = (await load(publisher))["dropped"] - before["dropped"]
                assert dropped == statistics.missed

        run(scenario())

    def test_is_told_by_subscription_before_what_comes_after(self, broker: BrokerProcess) -> None:
        count = 4000
        with RawClient(broker.native_port, receive_bytes=65_536) as slow, RawClient(broker.native_port) as publisher:
            slow.hello()
            slow.subscribe(1, "n")
            slow.subscribe(2, "n<1000")
            publisher.hello("flooder")
            for n in range(0, count, 100):
                publisher.send(publish(n + 1, *({"n": m, "$payload": PAYLOAD} for m in range(n, n + 100))))
                publisher.wait_acknowledged(n + 100)
            publisher.send(publish(count + 1, {"n": 0, "last": 1}))
            publisher.wait_acknowledged(count + 1)
            received, missed = read_to_the_last(slow, count + 1)
            assert missed[1] > 0
            assert received[1] + missed[1] == count + 1
            assert received[2] + missed[2] == 1000 + 1


def assert_missed_are_told_in_place(deliveries: list[Delivery]) -> None:
    """Checks that `missed` is the number of missing notifications just before the delivery."""
    last = -1
    for delivery in deliveries:
        n = delivery.notification["n"]
        assert delivery.missed == n - last - 1, delivery.sequence
        last = n


def read_to_the_last(client: RawClient, last_sequence: int) -> tuple[dict[int, int], dict[int, int]]:
    """Returns how many notifications a raw client received and missed, by subscription."""
    received, missed = {1: 0, 2: 0}, {1: 0, 2: 0}
    while True:
        frame = client.receive()
        assert frame is not None
        if frame.kind == Kind.GAP:
            for number, count in decode_body(frame.body, Gap).dropped.items():
                missed[number] += count
        elif frame.kind == Kind.DELIVER:
            for delivered in decode_deliver(frame.body)[1]:
                numbers = delivered.subscriptions
                for number in [numbers] if isinstance(numbers, int) else numbers:
                    received[number] += 1
                if delivered.sequence == last_sequence:
                    return received, missed


class TestDisconnect:
    def test_raises_from_the_iterator_and_only_there(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with (
                connect(broker.native) as publisher,
                connect(broker.native) as slow,
                connect(broker.native) as quick,
                slow.subscribe("*", policy="disconnect") as unread,
                quick.subscribe("*") as read,
            ):
                before = await load(publisher)
                assert await flood_and_read(publisher, read) == list(range(FLOOD))
                assert (await load(publisher))["disconnected"] == before["disconnected"] + 1
                with pytest.raises(Overloaded, match=r"L603.*read faster"):
                    await take_until(unread, is_last)
                assert unread.statistics().missed == 0
                async with slow.subscribe("again") as again:
                    await publisher.publish({"again": 1})
                    assert (await anext(again)).notification == {"again": 1}

        run(scenario())

    def test_tells_even_one_who_comes_back_late(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            with RawClient(broker.native_port, receive_bytes=65_536) as slow:
                slow.hello()
                slow.subscribe(1, "*", "disconnect")
                async with connect(broker.native) as publisher:
                    before = await load(publisher)
                    await flood(publisher, 5000)
                    assert (await load(publisher))["disconnected"] == before["disconnected"] + 1
                    await asyncio.sleep(1.5)
                error: ErrorBody = decode_body(slow.skip_to(Kind.ERROR).body, ErrorBody)
                assert error.code == "L603"
                assert slow.receive() is None

        run(scenario())


class TestBlock:
    def test_slows_the_publisher_until_reading_goes_on_and_loses_nothing(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with (
                connect(broker.native) as publisher,
                connect(broker.native) as slow,
                slow.subscribe("*", policy="block") as unread,
                asyncio.TaskGroup() as tasks,
            ):
                publishing = tasks.create_task(flood(publisher))
                counts = await wait_load(publisher, lambda counts: counts["blocked_outboxes"] == 1)
                assert counts["bytes_under_way"] > 0
                assert not publishing.done()
                assert await read_numbers(unread) == list(range(FLOOD))
                await publishing
                counts = await load(publisher)
                assert (counts["blocked_outboxes"], counts["bytes_under_way"]) == (0, 0)

        run(scenario())

    def test_does_not_slow_publishers_that_it_gets_nothing_from(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            with RawClient(broker.native_port, receive_bytes=65_536) as slow:
                slow.hello()
                slow.subscribe(1, "n", "block")
                async with connect(broker.native) as publisher, connect(broker.native) as other:
                    publishing = asyncio.create_task(flood(publisher))
                    await wait_load(other, lambda counts: counts["blocked_outboxes"] == 1)
                    await other.publish([{"m": m} for m in range(1000)])
                    assert not publishing.done()
                    slow.socket.close()  # the broker does not wait for a client that has left
                    await publishing

        run(scenario())

    def test_for_too_long_ends_the_subscriber_and_the_publisher_goes_on(self, impatient: BrokerProcess) -> None:
        async def scenario() -> None:
            async with (
                connect(impatient.native) as publisher,
                connect(impatient.native) as slow,
                connect(impatient.native) as quick,
                slow.subscribe("*", policy="block") as unread,
                quick.subscribe("*") as read,
            ):
                assert await flood_and_read(publisher, read) == list(range(FLOOD))
                assert (await load(publisher))["disconnected"] == 1
                with pytest.raises(Overloaded, match="L603"):
                    await take_until(unread, is_last)

        run(scenario())


def test_a_program_that_publishes_from_its_own_loop_does_not_wait_for_itself(broker: BrokerProcess) -> None:
    """When it is far behind, it no longer reads deliveries, but still reads acknowledgements."""

    async def scenario() -> None:
        async with (
            connect(broker.native) as feeder,
            connect(broker.native) as connection,
            connection.subscribe("n") as subscription,
        ):
            await flood(feeder, 12_000)
            await connection.publish({"n": -1})
            answered = 0
            async for delivery in subscription:
                if delivery.notification["n"] == -1:
                    break
                if delivery.notification["n"] % 10 == 0:
                    await connection.publish({"answer": delivery.notification["n"]})
                    answered += 1
            assert answered > 0
            assert subscription.statistics().received + subscription.statistics().missed == 12_001

    run(scenario())


def test_many_slow_subscribers_cost_a_quick_one_nothing(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        slow = [RawClient(broker.native_port, receive_bytes=65_536) for _ in range(20)]
        try:
            for client in slow:
                client.hello()
                client.subscribe(1, "*")
            async with connect(broker.native) as publisher, publisher.subscribe("*") as read:
                reading = asyncio.create_task(take(read, 4001))
                await flood(publisher, 4000)
                assert [d.notification.get("n") for d in await reading] == [*range(4000), None]
        finally:
            for client in slow:
                client.socket.close()

    run(scenario())
