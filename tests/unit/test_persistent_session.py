"""A session of a persistent query over HTTP, without the connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tidegate.errors import KnowledgeError
from tidegate.knowledge.graph import Graph
from tidegate.knowledge.knowledge_base import ChangeJob, KnowledgeBase
from tidegate.knowledge.named_queries import NamedQueries
from tidegate.knowledge.request_pool import Lane, PoolRequest, PoolSettings
from tidegate.knowledge.terms import Literal, Triple, Uri
from tidegate.listeners.http.persistent import PersistentSession


def insert(knowledge: KnowledgeBase, numbers: range) -> None:
    triples = tuple(Triple(Uri("s"), Uri("p"), Literal(str(number))) for number in numbers)
    knowledge.submit("kp", ChangeJob((), triples), lambda *_: None)


def test_a_question_whose_result_grows_too_large_ends_with_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        knowledge = KnowledgeBase(Graph(rows_max=10))
        session = PersistentSession(NamedQueries(tmp_path, knowledge))
        await session.open("kp", {"query": "SELECT ?o { ?s ?p ?o }"})
        events = session.events()
        assert [msgspec.json.decode(event)["result"] for event in await anext(events)] == [[]]
        insert(knowledge, range(10))
        assert [len(msgspec.json.decode(event)["added"]) for event in await anext(events)] == [10]
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        insert(knowledge, range(10, 11))
        with pytest.raises(KnowledgeError, match="K109"):
            await waiting
        session.close()
        assert knowledge.queries.statistics().subscriptions == 0
        await knowledge.stop()

    asyncio.run(scenario())


def test_a_session_that_stops_tells_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        knowledge = KnowledgeBase(Graph())
        session = PersistentSession(NamedQueries(tmp_path, knowledge))
        await session.open("kp", {"p": "p"})
        events = session.events()
        await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        session.stop()
        with pytest.raises(StopAsyncIteration):
            await waiting
        session.close()
        assert knowledge.queries.statistics().subscriptions == 1, "it waits for another connection"

    asyncio.run(scenario())


def test_a_check_tells_the_last_number_after_everything_up_to_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        knowledge = KnowledgeBase(Graph())
        session = PersistentSession(NamedQueries(tmp_path, knowledge))
        await session.open("kp", {"p": "p"})
        events = session.events()
        await anext(events)
        for number in range(3):
            insert(knowledge, range(number, number + 1))
            session.check(number)
            told = [msgspec.json.decode(event) for event in await anext(events)]
            assert [message["sequence"] for message in told] == [number + 1, number + 1]
            assert "added" in told[0]
            assert told[1]["check"] == number
            assert told[1]["interval_s"] >= 0
        session.check(7)
        (alone,) = [msgspec.json.decode(event) for event in await anext(events)]
        assert (alone["check"], alone["sequence"]) == (7, 3)

    asyncio.run(scenario())


def test_a_check_that_the_pool_has_no_room_for_is_refused_and_tells_when_to_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        knowledge = KnowledgeBase(Graph(), PoolSettings(requests_max=1))
        knowledge.pool.on_request(PoolRequest(1_000_000, Lane.QUERIES, "another, with a long query"), 0.0)
        knowledge.pool.start(0.0)
        session = PersistentSession(NamedQueries(tmp_path, knowledge))
        await session.open("kp", {"p": "p"})
        events = session.events()
        await anext(events)
        session.check(1)
        (told,) = [msgspec.json.decode(event) for event in await anext(events)]
        assert told.keys() == {"check", "refused"}
        assert told["refused"]["code"].startswith("L65")
        assert told["refused"]["retry_after_s"] > 0

    asyncio.run(scenario())
