"""Open queries of a real broker: no change waits for them, and at rest the indications compose to their results."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from broker_process import BrokerProcess
from http_client import metrics, open_client
from ssap_world import Kp, graph_of, parameter, sparql, status, text_of
from websocket_client import WebSocketClient

SUCCESS = "m3:Success"
WAIT_S = 60
TRIPLES = 400
# A join over all triples that takes some tens of milliseconds. The number makes each query different.
EXPENSIVE = "SELECT (COUNT(*) AS ?n) {{ ?a <p> ?b . ?c <p> ?d . FILTER(?b != ?d && {0} = {0}) }}"


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess("--knowledge-evaluation-share", "0.1", has_knowledge=True) as process:
        yield process


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def workers_of(broker: BrokerProcess) -> set[int]:
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command = (directory / "cmdline").read_bytes()
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"tidegate.knowledge.sparql_worker" in command and parent == broker.pid:
            found.add(int(directory.name))
    return found


def insert(kp: Kp, *triples: tuple[str, str, str]) -> None:
    assert status(kp.ask("INSERT", graph_of("insert_graph", *triples))) == SUCCESS


def values(message: ElementTree.Element, name: str) -> Counter[str]:
    return Counter(each.text or "" for each in parameter(message, name).iter() if each.tag.endswith("literal"))


def result(client: httpx.Client, query: str) -> Counter[str]:
    response = client.get("/v1/sparql", params={"query": query}).raise_for_status()
    return values_of(response.json()["results"]["bindings"])


def values_of(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(term["value"] for row in rows for term in row.values())


class SsapSubscriber:
    """Accumulates the indications of a subscription over SSAP."""

    def __init__(self, broker: BrokerProcess, name: str, query: str) -> None:
        self.kp, self.query = Kp(broker, name), query
        self.kp.socket.settimeout(WAIT_S)
        confirm = self.kp.ask("SUBSCRIBE", sparql(query))
        assert status(confirm) == SUCCESS
        self.rows = values(confirm, "results")
        self.held_s: list[float] = []

    def read(self) -> None:
        message = self.kp.read()
        assert values(message, "obsolete_results") <= self.rows
        self.rows = self.rows - values(message, "obsolete_results") + values(message, "new_results")
        self.held_s += [float(each.text or "") for each in message.iter("parameter") if each.get("name") == "held_s"]

    def close(self) -> None:
        self.kp.socket.close()


def test_a_change_is_confirmed_while_the_evaluators_stand_still(broker: BrokerProcess) -> None:
    """A confirmation waits for no work of an open query: the process of the evaluator does not even run here."""
    query = "SELECT ?o { <s> <p> ?o }"
    with (
        open_client(broker) as client,
        Kp(broker, "writer") as writer,
        WebSocketClient(broker.http, path="/v1/persistent", query={"query": query}) as websocket,
    ):
        websocket.receive()
        subscriber = SsapSubscriber(broker, "subscriber", query)
        insert(writer, ("s", "p", "0"))  # the evaluator is running by now
        subscriber.read()
        assert values_of(websocket.receive()["added"]) == subscriber.rows == Counter(["0"])
        stopped = workers_of(broker)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(1, 4):
                insert(writer, ("s", "p", str(number)))
            update = "INSERT DATA { <s> <p> '4' }"
            assert client.post("/v1/sparql", data={"update": update}).raise_for_status().json()["added"] == 1
            assert stopped <= workers_of(broker), "all is confirmed, and the evaluation has not begun"
            assert metrics(client)["knowledge_queries_stale"] == 1
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        everything = Counter(map(str, range(5)))
        websocket_rows = Counter(["0"])
        while websocket_rows != everything:
            websocket_rows += values_of(websocket.receive()["added"])
        while subscriber.rows != everything:
            subscriber.read()
        assert result(client, query) == everything
        subscriber.close()


def test_many_expensive_questions_end_with_their_results_and_tell_what_was_held(broker: BrokerProcess) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    with open_client(broker) as client, Kp(broker, "writer") as writer:
        insert(writer, *((f"s{number}", "p", str(number)) for number in range(TRIPLES)))
        subscribers = [SsapSubscriber(broker, "greedy", EXPENSIVE.format(number)) for number in range(8)]
        modest = SsapSubscriber(broker, "modest", "SELECT ?o { <modest> <p> ?o }")
        changes = 0
        while metrics(client)["knowledge_evaluations_held_total"] == 0:
            changes += 1
            insert(writer, (f"s{chance.randrange(TRIPLES)}", "p", f"more {changes}"))
        insert(writer, ("modest", "p", "1"))
        modest.read()
        assert modest.rows == Counter(["1"]), f"seed {seed}"
        for subscriber in subscribers:
            wanted = result(client, subscriber.query)
            while subscriber.rows != wanted:
                subscriber.read()
        until(lambda: metrics(client)["knowledge_queries_stale"] == 0)
        # An evaluation covers many changes. Otherwise there would be one per change and query.
        assert metrics(client)["knowledge_queries_asked_again_total"] < 8 * changes
        assert any(subscriber.held_s for subscriber in subscribers)
        assert not modest.held_s
        for subscriber in (*subscribers, modest):
            subscriber.close()


def test_a_question_over_its_limit_ends_with_the_code_and_no_other_does(broker: BrokerProcess) -> None:
    """One triple makes the query endless. Changes are confirmed meanwhile."""
    endless = "SELECT (COUNT(*) AS ?n) { <on> ?p ?o . ?a ?b ?c . ?d ?e ?f . ?g ?h ?i . ?j ?k ?l }"
    with (
        open_client(broker) as client,
        Kp(broker, "writer") as writer,
        WebSocketClient(broker.http, path="/v1/persistent", query={"query": endless}) as websocket,
    ):
        insert(writer, *((f"s{number}", "p", str(number)) for number in range(TRIPLES)))
        websocket.receive()
        ended = SsapSubscriber(broker, "ended", endless)
        other = SsapSubscriber(broker, "other", "SELECT ?o { <on> <p> ?o }")
        insert(writer, ("on", "p", "1"))
        other.read()
        insert(writer, ("on", "p", "2"))
        other.read()
        assert other.rows == Counter(["1", "2"])
        last = ended.kp.read()
        assert status(last) == "m3:SIB.Notification.Reset"
        assert "K140" in text_of(last, "error")
        messages = list(websocket)
        assert messages[-1]["error"]["code"] == "K140"
        assert metrics(client)["knowledge_subscriptions"] == 1
        for subscriber in (ended, other):
            subscriber.close()
