"""The blocking client of the knowledge base, when the broker is overloaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from bad_network import RefusingProxy
from broker_process import BrokerProcess
from command import tidegate
from http_client import open_client

from tidegate import Overloaded
from tidegate.client.knowledge import Knowledge

COUNT = "SELECT (COUNT(*) AS ?n) { ?s ?p ?o }"
JSON = "application/sparql-results+json"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(has_knowledge=True) as process:
        yield process


def count(knowledge: Knowledge) -> int:
    answer = msgspec.json.decode(knowledge.query(COUNT, JSON, wait_s=WAIT_S).body)
    return int(answer["results"]["bindings"][0]["n"]["value"])


def insert_until_full(knowledge: Knowledge) -> int:
    """Inserts until nothing is accepted for a while, and returns how many inserts were accepted."""
    accepted = refusals = 0
    while refusals < 10:
        try:
            knowledge.update(f"INSERT DATA {{ <s> <p> {accepted} }}")
            accepted, refusals = accepted + 1, 0
        except Overloaded:
            refusals += 1
            time.sleep(0.1)
    return accepted


def test_changes_wait_until_the_broker_has_room_and_are_made_once() -> None:
    arguments = ("--publisher-window-bytes", "1", "--outbox-notifications-max", "1")
    with BrokerProcess(*arguments, has_knowledge=True) as broker, open_client(broker) as client:
        client.put("/v1/queues/full", json={"filter": "s", "messages_max": 1, "block_s": 600}).raise_for_status()
        knowledge = Knowledge(broker.http)
        accepted = insert_until_full(knowledge)

        async def scenario() -> None:
            waiting = asyncio.create_task(
                asyncio.to_thread(knowledge.update, "INSERT DATA { <s> <p> 'waits' }", wait_s=WAIT_S)
            )
            await asyncio.sleep(0.3)
            assert not waiting.done()
            client.delete("/v1/queues/full").raise_for_status()
            assert (await waiting)["added"] == 1

        asyncio.run(scenario())
        assert count(knowledge) == accepted + 1


INTEGER = {"datatype": "http://www.w3.org/2001/XMLSchema#integer"}


async def next_with(field: str, messages: Iterator[dict[str, Any]]) -> Any:
    """Returns the field of the first message that has it."""
    return await asyncio.to_thread(lambda: next(message[field] for message in messages if field in message))


def test_who_follows_a_question_is_not_sent_away_by_refusals(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        knowledge = Knowledge(broker.http)
        async with RefusingProxy(broker.http) as proxy:
            messages = Knowledge(proxy.address).follow("SELECT ?o { <s> <p> ?o }", wait_s=WAIT_S)
            proxy.refusals = 2
            assert await next_with("result", messages) == []
            assert proxy.refusals == 0
            proxy.refusals = 3
            proxy.cut_all()
            knowledge.update("INSERT DATA { <s> <p> 1 }")
            assert await next_with("added", messages) == [{"o": {"type": "literal", "value": "1", **INTEGER}}]
            assert proxy.refusals == 0
            del messages

    asyncio.run(scenario())


def test_without_patience_a_refusal_is_told_and_with_it_the_commands_wait(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with RefusingProxy(broker.http) as proxy:
            for arguments in (["insert", "a", "b", "c"], ["query", COUNT]):
                proxy.refusals = 1
                refused = await asyncio.to_thread(tidegate, *arguments, "--http", proxy.address, "--wait", "0")
                assert refused.code != 0
                assert "L652" in refused.err
                proxy.refusals = 2
                done = await asyncio.to_thread(tidegate, *arguments, "--http", proxy.address)
                assert done.code == 0, done.err

    asyncio.run(scenario())


def test_a_time_to_wait_is_a_time() -> None:
    for text in ("-1", "nan", "inf", "soon"):
        refused = tidegate("insert", "a", "b", "c", "--wait", text)
        assert refused.code == 2
        assert text in refused.err
