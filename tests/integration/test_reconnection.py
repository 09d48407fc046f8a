"""Links break and brokers crash, but programs continue. Acknowledged notifications are delivered once, and losses are
marked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from itertools import pairwise

import pytest
from bad_network import CuttingProxy, Forwarder
from broker_checks import assert_in_order, run, take
from broker_process import BrokerProcess
from random_world import make_random

from tidegate import Connection, Delivery, NotAllowed, Subscription, connect, connect_sync


@pytest.fixture
def mortal() -> Iterator[BrokerProcess]:
    """Runs a broker for one test, which may kill it."""
    with BrokerProcess() as process:
        yield process


async def publish_until(connection: Connection, is_over: asyncio.Event) -> int:
    """Publishes 1, 2, 3 … in small lists, and returns how many are acknowledged at the end."""
    published = 0
    while not is_over.is_set():
        await connection.publish([{"n": published + at} for at in range(1, 11)])
        published += 10
        await asyncio.sleep(0.001)
    return published


async def collect(subscription: Subscription, deliveries: list[Delivery]) -> None:
    while True:
        deliveries += await subscription.take()


def assert_gaps_are_marked(deliveries: list[Delivery]) -> None:
    """Checks that a number is missing only where the subscription reports a reconnection."""
    assert_in_order(deliveries)
    for before, after in pairwise(deliveries):
        if after.notification["n"] != before.notification["n"] + 1:
            assert after.reconnected, (before, after)


class TestABrokerThatIsKilled:
    def test_and_comes_back_goes_on_with_everybody(self, mortal: BrokerProcess) -> None:
        async def scenario() -> None:
            deliveries: list[Delivery] = []
            is_over = asyncio.Event()

            async def crash() -> None:
                """Kills the broker, but only once the subscriber is served."""
                seen = len(deliveries)
                while len(deliveries) < seen + 100:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(mortal.kill)
                await asyncio.to_thread(mortal.start)

            async with (
                connect(mortal.native) as publisher,
                connect(mortal.native) as reader,
                reader.subscribe("n") as subscription,
                asyncio.TaskGroup() as tasks,
            ):
                publishing = tasks.create_task(publish_until(publisher, is_over))
                collecting = tasks.create_task(collect(subscription, deliveries))
                await crash()
                await crash()
                while sum(delivery.reconnected for delivery in deliveries) < 2:
                    await asyncio.sleep(0.01)
                is_over.set()
                published = await publishing
                # Everything acknowledged after the subscriber is back is delivered.
                while deliveries[-1].notification["n"] < published:
                    await asyncio.sleep(0.01)
                collecting.cancel()
            assert_gaps_are_marked(deliveries)
            assert [delivery.sequence for delivery in deliveries] == [d.notification["n"] for d in deliveries]
            assert sum(delivery.reconnected for delivery in deliveries) == 2
            statistics = publisher.statistics()
            assert statistics is not None
            assert (statistics.acknowledged, statistics.reconnections) == (published, 2)

        run(scenario(), timeout_s=25)

    def test_does_not_hold_those_who_leave(self, mortal: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(mortal.native) as connection, connection.subscribe("n"):
                await connection.publish({"n": 1})
                await asyncio.to_thread(mortal.kill)
                await connection.publish_soon({"n": 2})
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run(scenario())

    def test_does_not_hold_those_who_leave_with_nothing_under_way(self, mortal: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(mortal.native) as connection, connection.subscribe("n"):
                await connection.publish({"n": 1})
                await asyncio.to_thread(mortal.kill)
                await asyncio.sleep(0.2)  # so that the links notice

        run(scenario())

    def test_does_not_hold_a_synchronous_program_that_fails(self, mortal: BrokerProcess) -> None:
        def scenario() -> None:
            with connect_sync(mortal.native) as connection:
                connection.publish({"n": 1})
                mortal.kill()
                connection.publish_soon({"n": 2})
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            scenario()

    def test_and_wants_a_token_now_is_a_final_error(self, mortal: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(mortal.native) as connection, connection.subscribe("n") as subscription:
                await connection.publish({"n": 1})
                await take(subscription, 1)
                await asyncio.to_thread(mortal.kill)
                with strict:
                    with pytest.raises(NotAllowed, match="A501"):
                        await anext(subscription)
                    with pytest.raises(NotAllowed, match="A501"):
                        await connection.publish({"n": 2})

        strict = BrokerProcess(
            "--native-port", str(mortal.native_port), environment={"TIDEGATE_TOKEN": "a token of some length"}
        )
        with contextlib.suppress(NotAllowed):
            run(scenario())

    def test_and_leaves_a_mute_stranger_on_its_port_is_found_again(self, mortal: BrokerProcess) -> None:
        """A client abandons a connection that is accepted but never answered, and tries the next one."""

        async def scenario() -> None:
            async with (
                connect(mortal.native, connect_timeout_s=0.5) as connection,
                connection.subscribe("n") as subscription,
            ):
                await asyncio.to_thread(mortal.kill)
                with socket.create_server(("127.0.0.1", mortal.native_port)) as listener:
                    listener.settimeout(10)
                    stranger, _peer = await asyncio.to_thread(listener.accept)
                with stranger:
                    await asyncio.to_thread(mortal.start)
                    while not subscription.statistics().received:
                        await connection.publish({"n": 1})

        run(scenario())


class TestALinkThatIsCut:
    def test_of_a_publisher_costs_nothing(self, broker: BrokerProcess) -> None:
        """Links are cut anywhere, before or after acknowledgements. Everything arrives once and in order."""

        async def scenario() -> None:
            async with (
                CuttingProxy(broker.native, make_random(), bytes_max=40_000, cuts_max=15) as proxy,
                connect(broker.native) as reader,
                reader.subscribe("n") as subscription,
            ):
                async with connect(proxy.address) as publisher:
                    for n in range(0, 6000, 3):
                        await publisher.publish_soon({"n": n})
                        await publisher.publish([{"n": n + 1}, {"n": n + 2}])
                assert [d.notification["n"] for d in await take(subscription, 6000)] == list(range(6000))
                assert proxy.cuts > 0

        run(scenario())

    def test_of_a_publisher_with_much_under_way_costs_nothing(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            text = "x" * 400
            async with (
                CuttingProxy(broker.native, make_random(), bytes_max=1_000_000, cuts_max=10) as proxy,
                connect(broker.native) as reader,
                reader.subscribe("n") as subscription,
            ):
                async with connect(proxy.address) as publisher:
                    for start in range(0, 20_000, 5000):
                        await publisher.publish([{"n": start + at, "text": text} for at in range(5000)])
                assert [d.notification["n"] for d in await take(subscription, 20_000)] == list(range(20_000))
                assert proxy.cuts > 0

        run(scenario())

    def test_of_a_subscriber_is_marked_and_doubles_nothing(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            deliveries: list[Delivery] = []
            is_over = asyncio.Event()
            async with (
                CuttingProxy(broker.native, make_random(), bytes_max=30_000, cuts_max=10) as proxy,
                connect(broker.native) as publisher,
                connect(proxy.address) as reader,
                reader.subscribe("n") as subscription,
                asyncio.TaskGroup() as tasks,
            ):
                publishing = tasks.create_task(publish_until(publisher, is_over))
                collecting = tasks.create_task(collect(subscription, deliveries))
                while proxy.cuts < 10:
                    await asyncio.sleep(0.01)
                proxy.cut_all()
                seen = deliveries[-1].notification["n"] if deliveries else 0
                while not deliveries or deliveries[-1].notification["n"] < seen + 500:
                    await asyncio.sleep(0.01)
                is_over.set()
                published = await publishing
                while deliveries[-1].notification["n"] < published:
                    await asyncio.sleep(0.01)
                collecting.cancel()
            assert_gaps_are_marked(deliveries)
            assert any(delivery.reconnected for delivery in deliveries)

        run(scenario(), timeout_s=15)


def test_a_subscription_asked_for_while_the_broker_is_away_begins_when_it_is_back(mortal: BrokerProcess) -> None:
    async def scenario() -> None:
        async with connect(mortal.native) as connection, connection.subscribe("early") as early:
            await asyncio.to_thread(mortal.kill)
            late = connection.subscribe("late")
            beginning = asyncio.create_task(late.__aenter__())
            publishing = asyncio.create_task(connection.publish([{"first": 1}, {"first": 2}]))
            await asyncio.to_thread(mortal.start)
            await beginning
            await publishing
            await connection.publish({"early": 1, "late": 1})
            assert (await anext(late)).reconnected is False
            assert (await anext(early)).reconnected is True

    run(scenario())


def test_a_publisher_that_is_held_back_and_loses_its_link_goes_on() -> None:
    """The broker does not read a blocked publisher, so it notices the lost socket only when the publisher is back."""
    count = 400
    flags = ("--publisher-window-bytes", "4096", "--outbox-notifications-max", "10", "--block-s", "60")

    async def scenario(broker: BrokerProcess) -> None:
        async with (
            Forwarder(broker.native) as network,
            connect(network.address) as publisher,
            connect(broker.native) as reader,
            reader.subscribe("n", policy="block") as subscription,
        ):
            publishing = asyncio.create_task(publish_all(publisher, count))
            while not subscription.statistics().received:
                await asyncio.sleep(0.01)
            for _ in range(3):
                await asyncio.sleep(0.2)
                network.cut_all()
            deliveries = await take(subscription, count)
            await publishing
            assert [delivery.notification["n"] for delivery in deliveries] == list(range(count))

    with BrokerProcess(*flags) as broker:
        run(scenario(broker))
        assert broker.terminate() == 0


async def publish_all(publisher: Connection, count: int) -> None:
    """Publishes one after another, each after the acknowledgement of the one before."""
    for n in range(count):
        await publisher.publish({"n": n, "text": "x" * 900})
