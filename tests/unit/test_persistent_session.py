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
from tidegate.knowledge.terms import Literal, Triple, Uri
from tidegate.listeners.http_persistent import PersistentSession


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
        with pytest.raises(KnowledgeError, match="K117"):
            await waiting
        session.close()
        assert knowledge.queries.statistics().subscriptions == 0

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
