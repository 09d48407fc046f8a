"""A publisher's numbers are its own: no other client can use them up, whatever protocol it uses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import msgspec
import pytest
from broker_process import BrokerProcess
from event_stream import EventStream
from http_client import code_of, error_of, open_client
from raw_client import RawClient, publish

from tidegate import connect
from tidegate.errors import NotAllowed
from tidegate.frames import Hello, Kind, encode_frame

HIGHEST = (1 << 62) - 1
KEY = "a-secret-of-the-sensor"
OTHER_KEY = "a-secret-of-somebody-else"


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as opened:
        yield opened


def refused_hello(broker: BrokerProcess, publisher: str, key: str = "") -> str:
    with RawClient(broker.native_port) as stranger:
        stranger.send(encode_frame(Kind.HELLO, Hello(publisher=publisher, key=key)))
        error = stranger.wait_closed()
    assert error is not None
    return error.code


def burn(broker: BrokerProcess, publisher: str, key: str = "") -> None:
    """Publishes the highest possible number."""
    with RawClient(broker.native_port) as stranger:
        assert stranger.hello(publisher, key=key).acknowledged == 0
        stranger.send(publish(HIGHEST, {"burnt": 1}))
        stranger.wait_acknowledged(HIGHEST)


def post(client: httpx.Client, body: object, publisher: str, sequence: int, key: str = "") -> httpx.Response:
    headers = {"Tidegate-Publisher": publisher, "Tidegate-Sequence": str(sequence)}
    headers |= {"Tidegate-Publisher-Key": key} if key else {}
    return client.post("/v1/notifications", json=body, headers=headers)


def test_what_a_client_publishes_arrives_though_a_subscriber_takes_its_name(
    broker: BrokerProcess, client: httpx.Client
) -> None:
    async def scenario() -> None:
        client.put("/v1/queues/burnt", json={"filter": "n"}).raise_for_status()
        async with connect(broker.native) as connection, connection.subscribe("n") as subscription:
            await connection.publish({"n": 1})
            seen = (await anext(subscription)).publisher
            assert await asyncio.to_thread(refused_hello, broker, seen) == "A507"
            assert await asyncio.to_thread(refused_hello, broker, seen, OTHER_KEY) == "A507"
            await asyncio.to_thread(burn, broker, seen.partition("~")[0])
            await asyncio.to_thread(burn, broker, seen.partition("~")[0], OTHER_KEY)
            assert code_of(post(client, {"burnt": 1}, seen, HIGHEST)) == (403, "A507")
            enqueued = {"body": 1, "device": seen, "sequence": HIGHEST}
            assert code_of(client.post("/v1/queues/burnt/messages", json=enqueued)) == (403, "A507")
            await connection.publish([{"n": n} for n in range(2, 1000)])
            numbers = [(await anext(subscription)).notification["n"] for _ in range(998)]
            assert numbers == list(range(2, 1000))
        assert client.get("/v1/queues/burnt").json()["messages"] == 999

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_client_with_the_key_takes_over_its_half_dead_connection(broker: BrokerProcess) -> None:
    with RawClient(broker.native_port) as first, RawClient(broker.native_port) as again:
        assert first.hello("sensor", key=KEY).acknowledged == 0
        first.send(publish(1, {"k": 1}, {"k": 2}))
        first.wait_acknowledged(2)
        assert again.hello("sensor", key=KEY).acknowledged == 2
        error = first.wait_closed()
        assert error is not None
        assert error.code == "A504"
        again.send(publish(3, {"k": 3}))
        again.wait_acknowledged(3)


def test_a_name_without_a_key_works_as_ever(broker: BrokerProcess) -> None:
    with RawClient(broker.native_port) as first, RawClient(broker.native_port) as again:
        first.hello("old-client")
        first.send(publish(1, {"k": 1}))
        first.wait_acknowledged(1)
        assert again.hello("old-client").acknowledged == 1
        error = first.wait_closed()
        assert error is not None
        assert error.code == "A504"


@pytest.mark.parametrize(("name", "key"), [("sensor", "short"), ("", KEY), ("sensor", "x" * 257)])
def test_a_key_that_could_be_guessed_is_refused(
    broker: BrokerProcess, client: httpx.Client, name: str, key: str
) -> None:
    assert refused_hello(broker, name, key) == "P310"
    assert code_of(post(client, {"a": 1}, name, 1, key)) == (400, "P310" if name else "P313")


def test_http_publishers_have_keys_too(broker: BrokerProcess, client: httpx.Client) -> None:
    with EventStream(broker.http, "h") as reader:
        assert post(client, {"h": 1}, "web", 1, KEY).json() == {"accepted": 1}
        assert post(client, {"h": 1}, "web", HIGHEST, OTHER_KEY).json() == {"accepted": 1}
        assert post(client, {"h": 1}, "web", HIGHEST).json() == {"accepted": 1}
        assert post(client, {"h": 1}, "web", 1, KEY).json() == {"accepted": 1}, "sent again, delivered once"
        assert post(client, {"h": 2}, "web", 2, KEY).json() == {"accepted": 1}
        seen = [reader.receive() for _ in range(4)]
    names = [delivery["publisher"] for delivery in seen]
    assert names[0] == names[3] != names[1]
    assert names[2] == "web"
    assert [delivery["sequence"] for delivery in seen] == [1, HIGHEST, HIGHEST, 2]
    response = client.post("/v1/notifications", json={"a": 1}, headers={"Tidegate-Publisher-Key": KEY})
    assert code_of(response) == (400, "P313")


def test_requests_without_a_name_cannot_be_silenced(broker: BrokerProcess, client: httpx.Client) -> None:
    with EventStream(broker.http, "anonymous") as reader:
        client.post("/v1/notifications", json={"anonymous": 1}).raise_for_status()
        seen = reader.receive()["publisher"]
        refused = post(client, {"anonymous": 2}, seen, HIGHEST)
        assert code_of(refused) == (403, "A507")
        assert "~" in error_of(refused)["remedy"]
        client.post("/v1/notifications", json={"anonymous": 3}).raise_for_status()
        assert reader.receive()["notification"] == {"anonymous": 3}


def test_a_numbered_publisher_resumes_with_its_key_and_with_no_other(broker: BrokerProcess) -> None:
    async def publish_as(key: str, first: int, *numbers: int) -> int:
        encoded = [msgspec.msgpack.encode({"job": number}) for number in numbers]
        async with connect(broker.native) as connection, connection.numbered_publisher("job", key=key) as publisher:
            return await publisher.publish(first, encoded)

    async def scenario() -> None:
        async with connect(broker.native) as connection, connection.subscribe("job") as subscription:
            assert await publish_as(KEY, 1, 1, 2) == 2
            assert await publish_as(OTHER_KEY, HIGHEST, 0) == 1
            assert await publish_as("", HIGHEST, 0) == 1
            assert await publish_as(KEY, 1, 1, 2, 3) == 1
            jobs = [(await anext(subscription)).notification["job"] for _ in range(5)]
            assert jobs == [1, 2, 0, 0, 3]
            with pytest.raises(NotAllowed, match="A507"):
                await connection.numbered_publisher("job~aaaaaaaaaaaaaaaa").__aenter__()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_after_a_restart_a_name_belongs_to_its_key_as_before() -> None:
    """Keys are not stored. The queue knows the whole name, and so does every broker."""
    with BrokerProcess() as broker, open_client(broker) as client:
        client.put("/v1/queues/kept", json={"filter": "n"}).raise_for_status()
        post(client, {"n": 1}, "sensor", 1, KEY).raise_for_status()
        seen = client.post("/v1/queues/kept/dequeue", json={"visibility_s": 0.1}).json()["messages"][0]["device"]
        broker.kill()
        broker.start()
        assert refused_hello(broker, seen) == "A507"
        burn(broker, "sensor", OTHER_KEY)
        burn(broker, "sensor")
        post(client, [{"n": 1}, {"n": 2}], "sensor", 1, KEY).raise_for_status()
        assert client.get("/v1/queues/kept").json()["messages"] == 2
