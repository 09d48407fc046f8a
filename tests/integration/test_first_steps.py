"""A publish that was acknowledged reaches a subscription that was acknowledged before it."""

from __future__ import annotations

import asyncio

from broker_process import BrokerProcess

from tidegate import connect, connect_sync


def test_a_notification_reaches_its_subscriber(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with connect(broker.native) as connection, connection.subscribe("NO2>200") as alerts:
            await connection.publish([{"NO2": 150}, {"NO2": 212, "station": "28079004"}])
            delivery = await anext(alerts)
            assert delivery.notification == {"NO2": 212, "station": "28079004"}
            assert delivery.sequence == 2

    asyncio.run(scenario())


def test_the_synchronous_face_does_the_same(broker: BrokerProcess) -> None:
    with connect_sync(broker.native) as connection, connection.subscribe("NO2>200") as alerts:
        connection.publish({"NO2": 201})
        assert next(iter(alerts)).notification == {"NO2": 201}
        assert connection.status()["load"]["connection_point"]["subscriptions"] == 1
