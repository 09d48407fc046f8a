"""Named persistent queries: whatever happens to the broker and its messages, a subscriber ends with the result."""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, ParamSpec

import pytest
from seeds import in_tiers

from tidegate.errors import TidegateError
from tidegate.knowledge import named_queries
from tidegate.knowledge.graph import Graph
from tidegate.knowledge.knowledge_base import ChangeJob, KnowledgeBase
from tidegate.knowledge.named_queries import NamedQueries, question_of
from tidegate.knowledge.persistent_query import Indication
from tidegate.knowledge.question import Row, ask
from tidegate.knowledge.terms import Literal, Mask, Triple, Uri

P = ParamSpec("P")
WAIT_S = 60
QUESTIONS = [
    {"query": "SELECT ?s (COUNT(?o) AS ?n) { ?s <p> ?o } GROUP BY ?s"},
    {"query": "ASK { <s1> <p> '1' }"},
    {"query": "SELECT ?o { ?s <p> ?o OPTIONAL { ?s <q> ?x } }"},
    {"s": "s1", "p": "p"},
    {"o": "1"},
]


class Broker:
    """A knowledge base that can be killed. Only its graph and its directory survive."""

    def __init__(self, directory: Path, rows_max: int = 1000) -> None:
        self._directory = directory
        self.graph = Graph(rows_max=rows_max)

    async def open(self) -> None:
        self.knowledge = KnowledgeBase(self.graph)
        self.named = NamedQueries(self._directory, self.knowledge)
        await self.named.open()

    async def kill(self) -> None:
        await self.knowledge.stop()
        await self.open()

    async def change(self, removed: Iterable[Mask], inserted: Iterable[Triple]) -> None:
        """Makes a change, and returns when the affected open queries are evaluated."""
        await self.knowledge.call("kp", ChangeJob(tuple(removed), tuple(inserted)))
        async with asyncio.timeout(WAIT_S):
            while self.knowledge.queries.statistics().stale:
                await asyncio.sleep(0.001)


OPENED: list[Broker] = []


async def opened(directory: Path, rows_max: int = 1000) -> Broker:
    """Returns a broker whose workers end with the test."""
    OPENED.append(Broker(directory, rows_max))
    await OPENED[-1].open()
    return OPENED[-1]


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    async def scenario(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            await test(*arguments, **named)
        finally:
            while OPENED:
                await OPENED.pop().knowledge.stop()

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        asyncio.run(scenario(*arguments, **named))

    return run


class Subscriber:
    def __init__(self, broker: Broker, name: str, question: dict[str, str]) -> None:
        self._broker = broker
        self._name = name
        self._question = question
        self.sequence: int | None = None
        self.rows: Counter[Row] = Counter()
        self.resets = 0

    async def connect(self) -> None:
        await self._broker.named.begin(self._name, self._question)
        resumption = self._broker.named.resume(self._name, self.sequence, lambda: None)
        if resumption.result is not None:
            self.resets += 1
            self.rows, self.sequence = Counter(resumption.result.rows), resumption.sequence
        elif resumption.missed is not None:
            self._follow(resumption.missed)

    def take(self, is_lost: bool) -> None:
        taken = self._broker.named.take(self._name)
        if taken is not None and not is_lost:
            self._follow(taken)

    def result(self) -> Counter[Row]:
        return Counter(ask(self._broker.graph, question_of(self._question)).rows)

    def _follow(self, indication: Indication) -> None:
        assert self.sequence is not None
        assert indication.sequence == self.sequence + 1
        removed = Counter(indication.difference.removed)
        assert removed <= self.rows
        self.rows = self.rows - removed + Counter(indication.difference.added)
        self.sequence = indication.sequence


@pytest.mark.parametrize("seed", in_tiers(1, 8))
@in_a_loop
async def test_a_subscriber_has_the_result_whatever_happens(seed: int) -> None:
    """The seed mixes changes, takes, messages that are lost with their connection, and killed brokers."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        broker = await opened(Path(directory))
        subscribers = [Subscriber(broker, f"name{i}", question) for i, question in enumerate(QUESTIONS)]
        for subscriber in subscribers:
            await subscriber.connect()
        for _ in range(60):
            action = chance.choice(["change", "change", "change", "take", "lose", "kill"])
            if action == "change":
                subject, predicate = Uri(f"s{chance.randrange(3)}"), Uri(chance.choice("pq"))
                triple = Triple(subject, predicate, Literal(str(chance.randrange(3))))
                gone = [Mask(subject, predicate)] if chance.random() < 0.3 else []
                await broker.change(gone, [triple] if chance.random() < 0.8 else [])
            elif action == "kill":
                await broker.kill()
                for subscriber in subscribers:
                    await subscriber.connect()
                    assert subscriber.rows == subscriber.result()
            else:
                subscriber = chance.choice(subscribers)
                subscriber.take(is_lost=action == "lose")
                if action == "lose":
                    await subscriber.connect()
                assert subscriber.rows == subscriber.result()
        for subscriber in subscribers:
            subscriber.take(is_lost=False)
            assert subscriber.rows == subscriber.result()


@in_a_loop
async def test_who_has_seen_everything_goes_on_after_a_restart(tmp_path: Path) -> None:
    broker = await opened(tmp_path)
    subscribers = [Subscriber(broker, f"name{i}", question) for i, question in enumerate(QUESTIONS)]
    for subscriber in subscribers:
        await subscriber.connect()
        assert (subscriber.resets, subscriber.sequence) == (1, 0)
    await broker.change([], [Triple(Uri("s1"), Uri("p"), Literal("1"))])
    for subscriber in subscribers:
        subscriber.take(is_lost=False)
    await broker.kill()
    for subscriber in subscribers:
        await subscriber.connect()
        assert (subscriber.resets, subscriber.sequence) == (1, 1), "nothing has changed: no whole result"
    await broker.change([Mask()], [])
    for subscriber in subscribers:
        subscriber.take(is_lost=False)
        assert subscriber.sequence == 2
        assert subscriber.rows == subscriber.result()


@in_a_loop
async def test_names_are_found_without_their_questions_until_they_are_dropped(tmp_path: Path) -> None:
    broker = await opened(tmp_path)
    named, question = broker.named, {"s": "s1"}
    with pytest.raises(TidegateError, match="K127"):
        await named.begin("a", {})
    assert (
        await named.begin("a", question | {"name": "a"})
        == await named.begin("a", {})
        == await named.begin("a", question)
    )
    with pytest.raises(TidegateError, match="K126"):
        await named.begin("a", {"s": "s2"})
    await broker.kill()
    await broker.named.begin("a", {})
    broker.named.drop("a")
    for again in (False, True):
        if again:
            await broker.kill()
        with pytest.raises(TidegateError, match="K127"):
            await broker.named.begin("a", {})
        with pytest.raises(TidegateError, match="K127"):
            broker.named.drop("a")
    assert broker.knowledge.queries.statistics().subscriptions == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "ä", "x" * 65, "a\n"])
@in_a_loop
async def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(TidegateError, match="K125"):
        await (await opened(tmp_path)).named.begin(name, {"s": "x"})
    assert list(tmp_path.iterdir()) == []


@in_a_loop
async def test_there_is_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_queries, "NAMES_MAX", 2)
    named = (await opened(tmp_path)).named
    for name in "ab":
        await named.begin(name, {"s": "x"})
    with pytest.raises(TidegateError, match="L655"):
        await named.begin("c", {"s": "x"})
    named.drop("a")
    await named.begin("c", {"s": "x"})


@in_a_loop
async def test_a_question_that_can_be_answered_no_more_frees_its_name(tmp_path: Path) -> None:
    broker = await opened(tmp_path, rows_max=3)
    subscriber = Subscriber(broker, "all", {"query": "SELECT * { ?s ?p ?o }"})
    await subscriber.connect()
    await broker.change([], [Triple(Uri("s"), Uri("p"), Literal(str(number))) for number in range(4)])
    with pytest.raises(TidegateError, match="K109"):
        subscriber.take(is_lost=False)
    await broker.kill()  # it cannot be reopened either
    assert len(broker.named) == 0
    await broker.change([Mask()], [])
    await subscriber.connect()
    assert subscriber.rows == Counter()


@in_a_loop
async def test_files_that_are_spoilt_are_left_alone(tmp_path: Path) -> None:
    for name, text in {"a": "{", "b": '{"question": {}, "sequence": 0, "digest": ""}', "c": "[]"}.items():
        (tmp_path / f"{name}.json").write_text(text)
    broker = await opened(tmp_path)
    assert len(broker.named) == 0
    await broker.named.begin("a", {"s": "x"})
    await broker.kill()
    assert len(broker.named) == 1
