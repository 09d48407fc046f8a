"""Orderly shutdown: acknowledged notifications are delivered before the broker exits, and no client can block it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from broker_checks import run, take
from broker_process import BrokerProcess
from raw_client import RawClient, publish

from tidegate import Delivery, connect
from tidegate.frames import Kind, decode_deliver, encode_frame

PAYLOAD = bytes(4000)


@pytest.fixture
def mortal() -> Iterator[BrokerProcess]:
    """Runs a broker for one test, which ends it."""
    with BrokerProcess() as process:
        yield process


def read_to_the_end(client: RawClient) -> list[int]:
    """Returns the sequences that still arrive. Checks that CLOSING comes after all deliveries."""
    sequences: list[int] = []
    kinds = set()
    while (frame := client.receive()) is not None:
        kinds.add(frame.kind)
        assert kinds <= {Kind.DELIVER, Kind.ACKNOWLEDGE, Kind.CLOSING, Kind.PONG}, kinds
        if frame.kind == Kind.DELIVER:
            assert Kind.CLOSING not in kinds
            sequences += [delivered.sequence for delivered in decode_deliver(frame.body)[1]]
    assert Kind.CLOSING in kinds
    return sequences


def publish_much(broker: BrokerProcess, name: str, count: int = 4000) -> None:
    """Publishes more than the sockets can buffer, and returns when all is acknowledged."""
    with RawClient(broker.native_port) as publisher:
        publisher.hello(name)
        for first in range(1, count, 100):
            publisher.send(publish(first, *({"n": n, "$payload": PAYLOAD} for n in range(first, first + 100))))
            publisher.wait_acknowledged(first + 99)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_what_was_acknowledged_is_delivered_before_the_end(mortal: BrokerProcess, number: signal.Signals) -> None:
    with RawClient(mortal.native_port, receive_bytes=65_536) as subscriber:
        subscriber.hello()
        subscriber.subscribe(1, "n")
        publish_much(mortal, "before")
        mortal.send(number)
        # The broker does not answer a subscriber now. Its input must not cost it the deliveries it has not read.
        subscriber.send(encode_frame(Kind.PING) * 10)
        assert read_to_the_end(subscriber) == list(range(1, 4001))
    assert mortal.wait() == 0


def test_a_subscriber_that_publishes_too_gets_all_that_was_acknowledged(mortal: BrokerProcess) -> None:
    """It uses one connection. Bytes that the broker no longer reads must not cost it deliveries."""
    with RawClient(mortal.native_port) as both:
        both.hello("both")
        both.subscribe(1, "n")
        both.send(*(publish(n, {"n": n}) for n in range(1, 60_001)))
        mortal.send(signal.SIGTERM)
        acknowledged, sequences = 0, []
        while (frame := both.receive()) is not None:
            if frame.kind == Kind.ACKNOWLEDGE:
                acknowledged = frame.sequence
            elif frame.kind == Kind.DELIVER:
                sequences += [delivered.sequence for delivered in decode_deliver(frame.body)[1]]
        assert sequences[:acknowledged] == list(range(1, acknowledged + 1))
    assert mortal.wait() == 0


def test_one_who_does_not_read_cannot_hold_it_up() -> None:
    with (
        BrokerProcess("--drain-s", "1") as broker,
        RawClient(broker.native_port, receive_bytes=65_536) as deaf,
        RawClient(broker.native_port) as mute,
    ):
        deaf.hello()
        deaf.subscribe(1, "n")
        publish_much(broker, "to the deaf")
        assert broker.terminate() == 0
        assert mute.wait_closed() is None


def test_it_ends_with_nobody_connected(mortal: BrokerProcess) -> None:
    assert mortal.terminate() == 0


def test_new_connections_are_refused_while_it_ends(mortal: BrokerProcess) -> None:
    with RawClient(mortal.native_port, receive_bytes=65_536) as subscriber:
        subscriber.hello()
        subscriber.subscribe(1, "n")
        publish_much(mortal, "before")
        mortal.send(signal.SIGTERM)
        subscriber.skip_to(Kind.DELIVER)
        with pytest.raises(ConnectionRefusedError):
            knock_for_ever(mortal.native_port)
        subscriber.wait_closed()
    assert mortal.wait() == 0


def knock_for_ever(port: int) -> None:
    while True:
        # If the listening socket closes while a connection waits in its queue, the connection is reset.
        with suppress(ConnectionResetError):
            RawClient(port).socket.close()


def test_programs_go_on_when_the_next_broker_starts(mortal: BrokerProcess) -> None:
    async def scenario() -> None:
        deliveries: list[Delivery] = []
        async with (
            connect(mortal.native) as publisher,
            connect(mortal.native) as reader,
            reader.subscribe("n") as subscription,
        ):
            await publisher.publish([{"n": n} for n in range(1000)])
            assert await asyncio.to_thread(mortal.terminate) == 0
            # Its last answer was that everything is delivered.
            deliveries = await take(subscription, 1000)
            assert [delivery.notification["n"] for delivery in deliveries] == list(range(1000))
            waiting = asyncio.create_task(publisher.publish({"n": 1000}))
            await asyncio.to_thread(mortal.start)
            await waiting
            while subscription.statistics().received == 1000:
                await publisher.publish({"n": 1001})
            assert (await anext(subscription)).reconnected

    run(scenario())


def test_a_publisher_under_way_loses_nothing_that_was_acknowledged(mortal: BrokerProcess) -> None:
    async def scenario() -> None:
        acknowledged = 0

        async def publish_on() -> None:
            nonlocal acknowledged
            async with connect(mortal.native) as publisher:
                while True:
                    await publisher.publish([{"n": acknowledged + at} for at in range(1, 51)])
                    acknowledged += 50

        async with connect(mortal.native) as reader, reader.subscribe("n") as subscription:
            publishing = asyncio.create_task(publish_on())
            while subscription.statistics().received < 500:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(mortal.terminate) == 0
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            numbers = [delivery.notification["n"] for delivery in await subscription.take()]
            assert numbers == list(range(1, len(numbers) + 1))
            assert len(numbers) >= acknowledged

    run(scenario())
