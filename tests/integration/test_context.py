"""Filters that refer to their subscriber's context: new values replace the old ones in one step."""

from __future__ import annotations

import asyncio
import random

import pytest
from bad_network import CuttingProxy
from broker_checks import run, take
from broker_process import BrokerProcess
from websocket_client import Rejected, WebSocketClient

from tidegate import FilterError, connect, connect_sync
from tidegate.filters import Filter


def test_other_values_take_the_place_of_the_old_ones(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        context = {"floor": 1, "limit": 30}
        async with (
            connect(broker.native) as connection,
            connection.subscribe("floor==$floor;heat>$limit", context=context) as mine,
        ):
            readings = [{"floor": floor, "heat": 40, "round": 1} for floor in (1, 2)]
            await connection.publish(readings)
            assert [each.notification["floor"] for each in await take(mine, 1)] == [1]
            await mine.context(floor=2)
            assert mine.filter == Filter.parse("floor==2;heat>30")
            await connection.publish(readings)
            assert [each.notification["floor"] for each in await take(mine, 1)] == [2]
            await mine.context(limit=50)
            await connection.publish([*readings, {"floor": 2, "heat": 60}])
            assert [each.notification["heat"] for each in await take(mine, 1)] == [60]

    run(scenario())


def test_nothing_falls_between_the_old_and_the_new(broker: BrokerProcess) -> None:
    """Notifications that match both contexts arrive without interruption."""

    async def scenario() -> None:
        async with (
            connect(broker.native) as connection,
            connect(broker.native) as publishing,
            connection.subscribe("number>=$least", context={"least": 0}, policy="block") as mine,
        ):
            is_over = asyncio.Event()

            async def publish() -> int:
                sent = 0
                while not is_over.is_set():
                    await publishing.publish([{"number": sent + place} for place in range(20)])
                    sent += 20
                return sent

            task = asyncio.create_task(publish())
            for turn in range(50):
                await mine.context(least=-turn)
            is_over.set()
            sent = await task
            assert [each.notification["number"] for each in await take(mine, sent)] == list(range(sent))

    run(scenario())


def test_a_reconnected_subscription_has_its_newest_context(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with (
            CuttingProxy(broker.native, random.Random(1), bytes_max=1, cuts_max=0) as proxy,
            connect(proxy.address) as connection,
            connection.subscribe("floor==$floor", context={"floor": 1}) as mine,
        ):
            await mine.context(floor=2)
            proxy.cut_all()
            await mine.context(floor=3)
            async with connect(broker.native) as publishing:
                await publishing.publish([{"floor": floor} for floor in (1, 2, 3)])
            assert [each.notification["floor"] for each in await take(mine, 1)] == [3]

    run(scenario())


def test_a_program_without_a_loop_has_a_context_too(broker: BrokerProcess) -> None:
    with connect_sync(broker.native) as connection, connection.subscribe("floor==$floor", context={"floor": 1}) as mine:
        mine.context(floor=2)
        connection.publish([{"floor": 1}, {"floor": 2}])
        assert [each.notification["floor"] for each in mine.take(10)] == [2]


def test_a_context_that_lacks_a_value_is_refused_with_the_cure(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with connect(broker.native) as connection:
            with pytest.raises(FilterError, match=r"F124.*\$floor"):
                connection.subscribe("floor==$floor")
            async with connection.subscribe(Filter.parse("floor==1")) as plain:
                with pytest.raises(FilterError, match="F125"):
                    await plain.context(floor=2)
            async with connection.subscribe("floor==$floor", context={"floor": 1}) as mine:
                with pytest.raises(FilterError, match="F124"):
                    await mine.context(floor=[2])  # type: ignore[arg-type]
                await connection.publish({"floor": 1})
                assert len(await take(mine, 1)) == 1

    run(scenario())


def test_a_websocket_says_where_its_subscriber_is(broker: BrokerProcess) -> None:
    with (
        WebSocketClient(broker.http, "floor==$floor;n>=0", context='{"floor": 1}') as mine,
        connect_sync(broker.native) as publishing,
    ):
        publishing.publish([{"floor": 1, "n": 0}, {"floor": 2, "n": 1}])
        assert mine.receive()["notification"] == {"floor": 1, "n": 0}
        mine.say('{"context": {"floor": 2}}')
        assert mine.receive() == {"context": {"floor": 2}}
        publishing.publish([{"floor": 1, "n": 2}, {"floor": 2, "n": 3}])
        assert mine.receive()["notification"] == {"floor": 2, "n": 3}


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("not JSON", "P344"),
        ('{"context": 3}', "P344"),
        ('{"context": {}, "more": 1}', "P344"),
        ("[" * 100_000, "P344"),
        ('{"context": {"floor": true}}', "F115"),
    ],
)
def test_a_context_that_is_none_ends_the_websocket_with_the_cure(
    broker: BrokerProcess, message: str, code: str
) -> None:
    with WebSocketClient(broker.http, "floor>$floor", context='{"floor": 1}') as mine:
        mine.say(message)
        (told,) = list(mine)
        assert told["error"]["code"] == code
        assert mine.close_code == 1008


def test_a_filter_without_its_context_is_refused_over_http(broker: BrokerProcess) -> None:
    for context, code in ((None, "F124"), ("{", "P344"), ('{"floor": null}', "P344"), ('{"room": 1}', "F124")):
        with pytest.raises(Rejected) as rejected, WebSocketClient(broker.http, "floor==$floor", context=context):
            pass
        assert rejected.value.response.json()["error"]["code"] == code
