"""Persistent queries over WebSocket: the messages to a subscriber always compose to the result after each change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from broker_checks import wait_until
from broker_process import BrokerProcess
from event_stream import EventStream
from http_client import code_of, metrics, open_client
from ssap_world import Kp, graph_of
from websocket_client import Rejected, WebSocketClient

AVERAGE = "SELECT ?room (AVG(?t) AS ?mean) WHERE { ?room <t> ?t OPTIONAL { ?room <name> ?name } } GROUP BY ?room ?name"


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(has_knowledge=True) as process:
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as client:
        update(client, "CLEAR ALL")
        yield client


def update(client: httpx.Client, text: str) -> None:
    client.post("/v1/sparql", data={"update": text}).raise_for_status()


def result(client: httpx.Client, query: str) -> Counter[bytes]:
    found = client.get("/v1/sparql", params={"query": query}).raise_for_status().json()
    return rows_of(found["results"]["bindings"])


def rows_of(rows: list[Any]) -> Counter[bytes]:
    return Counter(msgspec.json.encode(row, order="deterministic") for row in rows)


def open_query(broker: BrokerProcess, query: str, is_small: bool = False, **others: str) -> WebSocketClient:
    return WebSocketClient(broker.http, path="/v1/persistent", query={"query": query} | others, is_small=is_small)


class Follower:
    """Composes the messages that it receives."""

    def __init__(self, first: dict[str, Any]) -> None:
        self.id = first["subscription"]
        self.sequence = first["sequence"]
        self.rows = rows_of(first["result"])

    def follow(self, message: dict[str, Any]) -> None:
        assert message["sequence"] == self.sequence + 1
        assert message["added"] or message["removed"]
        self.sequence = message["sequence"]
        removed = rows_of(message["removed"])
        assert removed <= self.rows, "only what was there goes"
        self.rows = self.rows - removed + rows_of(message["added"])


def test_what_is_told_composes_to_the_result_after_each_change(broker: BrokerProcess, client: httpx.Client) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with open_query(broker, AVERAGE) as subscriber:
        first = subscriber.receive()
        assert (first["sequence"], first["variables"], first["result"]) == (0, ["room", "mean"], [])
        assert {"processing_s", "waiting_s", "delay_s", "interval_s", "spread_s"} <= first.keys()
        follower = Follower(first)
        for _ in range(60):
            room, value = chance.randrange(4), chance.randrange(5)
            verb = chance.choice(["INSERT", "INSERT", "DELETE"])
            what = chance.choice([f"<t> {value}", f'<name> "{value}"', "<other> 1"])
            update(client, f"{verb} DATA {{ <r{room}> {what} }}")
            after = result(client, AVERAGE)
            while follower.rows != after:  # changes may arrive together or separately
                follower.follow(subscriber.receive())


def test_a_mask_and_a_question_of_yes_or_no(broker: BrokerProcess, client: httpx.Client) -> None:
    mask = {"s": "lamp", "o": "on"}
    with (
        WebSocketClient(broker.http, path="/v1/persistent", query=mask) as lamp,
        open_query(broker, "ASK { ?lamp <is> 'on' }") as any_lamp,
    ):
        assert lamp.receive()["result"] == []
        assert any_lamp.receive()["result"] == [False]
        update(client, "INSERT DATA { <lamp> <is> 'on', 'red' . <lamp> <mode> <on> . <other> <is> 'on' }")
        added = lamp.receive()["added"]
        assert {(row["p"]["value"], row["o"]["type"]) for row in added} == {("is", "literal"), ("mode", "uri")}
        told = any_lamp.receive()
        assert (told["added"], told["removed"]) == ([True], [False])


def test_who_comes_back_gets_what_was_missed(broker: BrokerProcess, client: httpx.Client) -> None:
    query = "SELECT ?o WHERE { <s> <p> ?o }"
    with open_query(broker, query) as subscriber:
        follower = Follower(subscriber.receive())
        update(client, "INSERT DATA { <s> <p> 1 }")
        follower.follow(subscriber.receive())
    for number in (2, 3):
        update(client, f"INSERT DATA {{ <s> <p> {number} }}")
    lost = {"subscription": follower.id, "sequence": str(follower.sequence)}
    with open_query(broker, query, **lost) as subscriber:
        opening = subscriber.receive()
        assert (opening["subscription"], opening["sequence"]) == (follower.id, 1)
        assert "result" not in opening
        while follower.rows != result(client, query):
            follower.follow(subscriber.receive())
        update(client, "DELETE DATA { <s> <p> 1 }")
        follower.follow(subscriber.receive())
        assert follower.rows == result(client, query)
        with open_query(broker, query, subscription=follower.id, sequence=str(follower.sequence)) as another:
            assert another.receive()["sequence"] == follower.sequence
            assert [message["error"]["code"] for message in subscriber] == ["K124"]
            update(client, "INSERT DATA { <s> <p> 4 }")
            follower.follow(another.receive())


@pytest.mark.parametrize("why", ["unknown", "another question", "ended", "a number from the future"])
def test_who_cannot_go_on_is_reset(broker: BrokerProcess, client: httpx.Client, why: str) -> None:
    query = "SELECT ?o WHERE { <s> <p> ?o }"
    update(client, "INSERT DATA { <s> <p> 1 }")
    others = metrics(client)["knowledge_subscriptions"]
    with open_query(broker, "ASK {}" if why == "another question" else query) as subscriber:
        subscription = subscriber.receive()["subscription"] if why != "unknown" else "nobody"
        if why == "ended":
            subscriber.close()
    sequence = "7" if why == "a number from the future" else "0"
    wait_until(lambda: why != "ended" or metrics(client)["knowledge_subscriptions"] == others)
    with open_query(broker, query, subscription=subscription, sequence=sequence) as subscriber:
        first = subscriber.receive()
        assert first["reset"] is True
        follower = Follower(first)
        assert follower.rows == result(client, query)
        update(client, "INSERT DATA { <s> <p> 2 }")
        follower.follow(subscriber.receive())
        assert follower.rows == result(client, query)


def test_a_reader_that_stops_costs_the_others_nothing_and_gets_changes_merged(
    broker: BrokerProcess, client: httpx.Client
) -> None:
    query = "SELECT ?s ?o WHERE { ?s <big> ?o }"
    with open_query(broker, query, is_small=True) as slow, open_query(broker, query) as quick, Kp(broker) as kp:
        lazy, eager = Follower(slow.receive()), Follower(quick.receive())
        for number in range(300):
            kp.ask("INSERT", graph_of("insert_graph", (f"s{number}", "big", f"{number:05}" * 4000)))
            eager.follow(quick.receive())
        assert eager.sequence == 300
        merged = 0
        while lazy.rows != eager.rows:
            message = slow.receive()
            merged += message["merged"]
            lazy.follow(message)
        assert lazy.sequence + merged == 300
        assert merged > 0


@pytest.mark.parametrize(
    ("query", "refusal"),
    [
        ({}, (400, "K122")),
        ({"query": "ASK {}", "s": "x"}, (400, "K122")),
        ({"query": "SELECT"}, (400, "K102")),
        ({"query": "CONSTRUCT { ?s ?p 1 } WHERE { ?s ?p ?o }"}, (400, "K116")),
        ({"query": "ASK {}", "subscription": "x", "sequence": "-1"}, (400, "P322")),
    ],
)
def test_what_is_refused(broker: BrokerProcess, query: dict[str, str], refusal: tuple[int, str]) -> None:
    with pytest.raises(Rejected) as rejected, WebSocketClient(broker.http, path="/v1/persistent", query=query):
        pass
    assert code_of(rejected.value.response) == refusal


def test_without_an_upgrade_it_is_a_stream_of_events(broker: BrokerProcess, client: httpx.Client) -> None:
    query = "SELECT ?o WHERE { <s> <p> ?o }"
    with EventStream(broker.http, path="/v1/persistent", query={"query": query}) as stream:
        follower = Follower(stream.receive())
        update(client, "INSERT DATA { <s> <p> 1 }")
        follower.follow(stream.receive())
    update(client, "INSERT DATA { <s> <p> 2 }")
    again = {"query": query, "subscription": follower.id, "sequence": "1"}
    with EventStream(broker.http, path="/v1/persistent", query=again) as stream:
        assert stream.receive()["sequence"] == 1
        follower.follow(stream.receive())
    assert follower.rows == result(client, query)
    assert code_of(client.get("/v1/persistent")) == (400, "K122")


def test_a_name_outlives_the_connection_and_the_broker() -> None:
    query = "SELECT ?o WHERE { <s> <p> ?o }"
    with BrokerProcess(has_knowledge=True) as broker, open_client(broker) as client:
        with open_query(broker, query, name="dashboard") as subscriber:
            first = subscriber.receive()
            assert "reset" not in first
            follower = Follower(first)
            update(client, "INSERT DATA { <s> <p> 1 }")
            follower.follow(subscriber.receive())
            kept = {"name": "dashboard", "query": query}
            assert client.get("/v1/persistent/named").json() == {"queries": [kept | {"is_followed": True}]}
            subscriber.close()
        for number in (2, 3):
            update(client, f"INSERT DATA {{ <s> <p> {number} }}")
        with open_query(broker, query, subscription=follower.id, sequence="1") as stranger:
            assert stranger.receive()["reset"] is True, "it goes on by its name only"
        again = {"name": "dashboard", "sequence": "1"}
        with WebSocketClient(broker.http, path="/v1/persistent", query=again) as subscriber:
            assert subscriber.receive()["sequence"] == 1
            follower.follow(subscriber.receive())
            assert follower.rows == result(client, query)
        broker.kill()
        broker.start()
        again["sequence"] = str(follower.sequence)
        with WebSocketClient(broker.http, path="/v1/persistent", query=again) as subscriber:
            opening = subscriber.receive()
            assert opening["sequence"] == follower.sequence
            assert "result" not in opening
            update(client, "DELETE DATA { <s> <p> 2 }")
            follower.follow(subscriber.receive())
            assert follower.rows == result(client, query)
            assert client.delete("/v1/persistent", params={"name": "dashboard"}).status_code == 204
            assert [message["error"]["code"] for message in subscriber] == ["K127"]
        assert client.get("/v1/persistent/named").json() == {"queries": []}
        assert code_of(client.delete("/v1/persistent", params={"name": "dashboard"})) == (404, "K127")
        assert code_of(client.post("/v1/persistent", params=again)) == (404, "K127")


def test_an_orderly_end_is_told() -> None:
    with BrokerProcess(has_knowledge=True) as broker, open_query(broker, "ASK {}") as subscriber:
        subscriber.receive()
        assert broker.terminate() == 0
        assert list(subscriber) == []
        assert subscriber.close_code == 1001
