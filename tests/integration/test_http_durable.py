"""Durable push: a named subscription keeps notifications while its subscriber is away, and while the broker is down.

Each law holds for server-sent events and for WebSockets.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import httpx
import pytest
from broker_process import BrokerProcess
from event_stream import EventStream
from http_client import code_of, error_of, open_client, publish, wait_until
from websocket_client import Rejected, WebSocketClient

Subscriber: TypeAlias = type[EventStream] | type[WebSocketClient]

both = pytest.mark.parametrize("subscriber", [EventStream, WebSocketClient], ids=["events", "websocket"])


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as opened:
        yield opened


def numbers(reader: EventStream | WebSocketClient, count: int) -> list[int]:
    return [reader.receive()["notification"]["n"] for _ in range(count)]


def publish_numbers(client: httpx.Client, publisher: str, start: int, stop: int) -> None:
    """Publishes the numbers from `start` to `stop`, each equal to its sequence."""
    body = [{"n": n, "by": publisher} for n in range(start, stop)]
    publish(client, body, publisher, start).raise_for_status()


def level(client: httpx.Client, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = client.get(f"/v1/subscriptions/{name}").raise_for_status().json()
    return shown


def wait_empty(client: httpx.Client, name: str) -> None:
    wait_until(lambda: level(client, name)["messages"] == 0)


# Taking.


@both
def test_it_is_made_by_who_asks_for_it_first(
    broker: BrokerProcess, client: httpx.Client, subscriber: Subscriber
) -> None:
    name = f"first-{subscriber.__name__}"
    with subscriber(broker.http, f"by=={name}", name=name) as reader:
        publish_numbers(client, name, 1, 4)
        assert [reader.receive() for _ in range(3)] == [
            {"notification": {"n": n, "by": name}, "publisher": name, "sequence": n} for n in range(1, 4)
        ]
        wait_empty(client, name)
    assert level(client, name)["filter"] == f"by=={name}"


@both
def test_what_comes_while_nobody_listens_is_kept(
    broker: BrokerProcess, client: httpx.Client, subscriber: Subscriber
) -> None:
    name = f"kept-{subscriber.__name__}"
    client.post("/v1/subscriptions", json={"name": name, "filter": f"by=={name}"}).raise_for_status()
    for start in (1, 501):
        publish_numbers(client, name, start, start + 500)
        with subscriber(broker.http, "", name=name) as reader:
            assert numbers(reader, 500) == list(range(start, start + 500))
            wait_empty(client, name)


@both
def test_who_leaves_in_the_middle_loses_nothing(
    broker: BrokerProcess, client: httpx.Client, subscriber: Subscriber
) -> None:
    """Messages that were written to the connection but not read may be lost with it. The rest is delivered again."""
    name = f"middle-{subscriber.__name__}"
    client.post("/v1/subscriptions", json={"name": name, "filter": f"by=={name}"}).raise_for_status()
    for n in range(1, 501):
        body = {"n": n, "by": name, "text": "x" * 60_000}
        publish(client, body, name, n).raise_for_status()
    with subscriber(broker.http, "", name=name, is_small=True) as slow:
        assert numbers(slow, 3) == [1, 2, 3]
        wait_until(lambda: level(client, name)["leased"] > 0)
    wait_until(lambda: level(client, name)["leased"] == 0)
    left = level(client, name)["messages"]
    assert 0 < left <= 497
    with subscriber(broker.http, "", name=name) as reader:
        assert numbers(reader, left) == list(range(501 - left, 501))
        wait_empty(client, name)


@both
def test_it_resumes_after_the_broker_was_killed(subscriber: Subscriber) -> None:
    with BrokerProcess() as broker, open_client(broker) as client:
        with subscriber(broker.http, "n", name="resume") as reader:
            publish_numbers(client, "p", 1, 101)
            assert numbers(reader, 100) == list(range(1, 101))
            wait_empty(client, "resume")
        publish_numbers(client, "p", 101, 201)
        broker.kill()
        broker.start()
        with subscriber(broker.http, "", name="resume") as reader:
            assert numbers(reader, 100) == list(range(101, 201))
            publish_numbers(client, "q", 201, 301)
            assert numbers(reader, 100) == list(range(201, 301))


@both
def test_a_tidy_end_closes_the_push_and_keeps_the_rest(subscriber: Subscriber) -> None:
    with BrokerProcess() as broker, open_client(broker) as client:
        with subscriber(broker.http, "n", name="tidy") as reader:
            publish_numbers(client, "p", 1, 11)
            assert numbers(reader, 10) == list(range(1, 11))
            broker.send(signal.SIGTERM)
            assert list(reader) == []
            if isinstance(reader, WebSocketClient):
                assert reader.close_code == 1001
            assert broker.wait() == 0
        broker.start()
        publish_numbers(client, "q", 11, 21)
        with subscriber(broker.http, "", name="tidy") as reader:
            assert numbers(reader, 10) == list(range(11, 21))


@both
def test_two_who_take_share(broker: BrokerProcess, client: httpx.Client, subscriber: Subscriber) -> None:
    name = f"share-{subscriber.__name__}"
    with (
        subscriber(broker.http, f"by=={name}", name=name) as one,
        subscriber(broker.http, "", name=name) as other,
        ThreadPoolExecutor() as threads,
    ):
        # Both wait at the same time. Each receives what the other does not.
        taken = [threads.submit(take_until_dropped, reader) for reader in (one, other)]
        for n in range(1, 401):
            publish_numbers(client, name, n, n + 1)
        wait_empty(client, name)
        assert client.delete(f"/v1/subscriptions/{name}").status_code == 204
        assert sorted(taken[0].result() + taken[1].result()) == list(range(1, 401))


def take_until_dropped(reader: EventStream | WebSocketClient) -> list[int]:
    *events, end = list(reader)
    assert end["error"]["code"] == "Q901"
    return [event["notification"]["n"] for event in events]


# Refusals.


REFUSED = [
    pytest.param("", "nobody", (404, "Q901"), id="unknown"),
    pytest.param("", "", (404, "Q901"), id="no name"),
    pytest.param("a", "", (422, "Q902"), id="no name, a filter"),
    pytest.param("a", "a.b", (422, "Q902"), id="bad name"),
    pytest.param("a>", "bad", (400, "F102"), id="bad filter"),
    pytest.param("other", "taken", (409, "Q904"), id="another filter"),
]


@pytest.mark.parametrize(("text", "name", "code"), REFUSED)
def test_it_is_refused_before_it_begins(
    broker: BrokerProcess, client: httpx.Client, text: str, name: str, code: tuple[int, str]
) -> None:
    client.post("/v1/subscriptions", json={"name": "taken", "filter": "a"}).raise_for_status()
    query = {"name": name} | ({"filter": text} if text else {})
    assert code_of(client.post("/v1/stream", params=query)) == code
    with pytest.raises(Rejected) as refused, WebSocketClient(broker.http, text, name=name):
        pass
    assert code_of(refused.value.response) == code


def test_a_policy_that_a_queue_cannot_have_is_refused(client: httpx.Client) -> None:
    response = client.post("/v1/stream", params={"name": "p", "filter": "a", "policy": "disconnect"})
    assert code_of(response) == (422, "Q903")
    assert "policy" in error_of(response)["message"]
