"""Persistent queries compared with new queries: the results composed of indications are those of the graph."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from sparql_texts import PROLOGUE, SparqlTexts

from tidegate.errors import KnowledgeError, Overloaded
from tidegate.knowledge import persistent_query
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.persistent_query import (
    INDICATIONS_KEPT,
    SUBSCRIPTIONS_MAX,
    SUBSCRIPTIONS_PER_OWNER_MAX,
    EvaluatedQuestion,
    Evaluation,
    Indication,
    PersistentQueries,
)
from tidegate.knowledge.question import Question, Result, Row, SparqlQuery, ask, find, masks_of
from tidegate.knowledge.terms import Literal, Mask, Masks, Triple, Uri
from tidegate.knowledge.wql import read_wql

NAMESPACE = "http://example.org/"
SUBJECTS = [Uri(NAMESPACE + "a"), Uri(NAMESPACE + "b"), Uri("names/c"), Uri("Agent_X")]
PREDICATES = [Uri(NAMESPACE + "p"), Uri(NAMESPACE + "q"), Uri("names/r")]
OBJECTS: list[Uri | Literal] = [*SUBJECTS[:3], Literal("x"), Literal("1"), Literal("true")]


class World:
    """A graph with its persistent queries, and a count of evaluations. `evaluate` does the work of a broker's
    evaluators."""

    def __init__(self, rows_max: int = 1_000_000, **limits: int) -> None:
        self.graph = Graph(rows_max=rows_max)
        self.asked: list[Question] = []
        self.stale: dict[EvaluatedQuestion, None] = {}
        self.queries = PersistentQueries(
            lambda masks: find(self.graph, masks),
            lambda question: masks_of(self.graph, question),
            limits.get("subscriptions_max", SUBSCRIPTIONS_MAX),
            limits.get("subscriptions_per_owner_max", SUBSCRIPTIONS_PER_OWNER_MAX),
        )

    def subscribe(self, name: str, owner: str, question: Question) -> Result:
        if isinstance(question, Masks):
            return self.queries.subscribe(name, owner, question)
        evaluation = self.queries.open(owner, question)
        try:
            if evaluation is not None:
                self.queries.on_first_answer(evaluation, self.ask(question))
        except KnowledgeError:
            self.queries.end_opening(question)
            raise
        result, is_stale = self.queries.subscribe_open(name, owner, question)
        assert not is_stale
        return result

    def ask(self, question: Question) -> Result:
        self.asked.append(question)
        return ask(self.graph, question)

    def change(self, *inserted: Triple, removed: tuple[Mask, ...] = ()) -> list[str]:
        return self.tell(self.graph.change(removed, inserted))

    def update(self, text: str) -> list[str]:
        return self.tell(self.graph.update(text))

    def tell(self, delta: Delta) -> list[str]:
        """Reports a change, and evaluates it immediately."""
        return [*self.make_stale(delta), *self.evaluate()]

    def make_stale(self, delta: Delta) -> list[str]:
        """Reports a change without evaluating it."""
        told, stale = msgspec.structs.astuple(self.queries.on_change(delta))
        self.stale |= dict.fromkeys(stale)
        assert all(self.queries.is_stale(question) for question in stale)
        return list(told)

    def evaluate(self) -> list[str]:
        told: list[str] = []
        stale, self.stale = self.stale, {}
        for question in stale:
            evaluation = self.queries.begin(question)
            if evaluation is not None:
                told += self.queries.on_answer(evaluation, self.answer(question))
            assert not self.queries.is_stale(question)
        return told

    def answer(self, question: EvaluatedQuestion) -> Result | KnowledgeError:
        try:
            return self.ask(question)
        except KnowledgeError as error:
            return error

    def rows(self, question: Question) -> Counter[Row]:
        return Counter(ask(self.graph, question).rows)


class Subscriber:
    """Keeps a result up to date from indications."""

    def __init__(self, world: World, name: str, question: Question) -> None:
        self.world, self.name, self.question = world, name, question
        self.rows = Counter(world.subscribe(name, f"owner of {name}", question).rows)
        self.sequence = 0
        self.changes = 0

    def apply(self, indication: Indication | None) -> None:
        if indication is None:
            return
        assert indication.sequence == self.sequence + 1
        self.sequence = indication.sequence
        self.changes += 1 + indication.merged
        added, removed = Counter(indication.difference.added), Counter(indication.difference.removed)
        assert added or removed
        assert not added & removed
        assert removed <= self.rows
        self.rows = self.rows - removed + added

    def take(self) -> None:
        self.apply(self.world.queries.take(self.name))


def random_question(rng: random.Random, texts: SparqlTexts) -> Question:
    kind = rng.random()
    if kind < 0.2:
        return Masks(
            tuple(
                Mask(
                    rng.choice([None, *SUBJECTS]),
                    rng.choice([None, *PREDICATES]),
                    rng.choice([None, *OBJECTS]),
                )
                for _ in range(rng.randint(1, 3))
            )
        )
    if kind < 0.3:
        path = rng.choice(["(rep* {})", "(seq {} (inv {}))", "{}"]).replace("{}", rng.choice(PREDICATES).text)
        nodes = {"start": rng.choice(SUBJECTS), "end": rng.choice(OBJECTS)}
        return read_wql(rng.choice(["wql-values", "wql-related"]), nodes, path)
    while (text := texts.query()).startswith(PROLOGUE + "CONSTRUCT"):
        pass
    return SparqlQuery(text)


@pytest.mark.parametrize("seed", range(60))
def test_indications_compose_to_the_result_after_every_change(seed: int) -> None:
    rng, texts, world = random.Random(seed), SparqlTexts(seed), World()
    world.update(PROLOGUE + f"INSERT DATA {texts.data(12)}")
    questions = [random_question(rng, texts) for _ in range(8)]
    prompt = [Subscriber(world, f"prompt {number}", question) for number, question in enumerate(questions)]
    slow = [Subscriber(world, f"slow {number}", question) for number, question in enumerate(questions)]
    changes: Counter[int] = Counter()
    for _ in range(30):
        before = [world.rows(question) for question in questions]
        told = world.update(texts.update(may_fail=False))
        assert len(told) == len(set(told))
        for number, question in enumerate(questions):
            rows = world.rows(question)
            is_changed = rows != before[number]
            changes[number] += is_changed
            assert (f"prompt {number}" in told) == is_changed, question
            assert (f"slow {number}" in told) == is_changed, question
            prompt[number].take()
            assert prompt[number].rows == rows, question
            assert Counter(world.queries.result_of(f"prompt {number}").rows) == rows
        for subscriber in rng.sample(slow, 2):
            subscriber.take()
    for number, question in enumerate(questions):
        slow[number].take()
        assert slow[number].rows == prompt[number].rows == world.rows(question)
        assert prompt[number].changes == changes[number]


@pytest.mark.parametrize("seed", range(20))
def test_indications_compose_to_the_result_once_nothing_is_stale(seed: int) -> None:  # noqa: C901
    """Evaluations come late, include some changes and miss others, overtake each other, and queries close meanwhile."""
    rng, texts, world = random.Random(seed), SparqlTexts(seed), World()
    world.update(PROLOGUE + f"INSERT DATA {texts.data(12)}")
    questions = [random_question(rng, texts) for _ in range(6)]
    subscribers = [Subscriber(world, f"first {number}", question) for number, question in enumerate(questions)]
    under_way: list[tuple[Evaluation, Result | KnowledgeError]] = []
    for step in range(60):
        match rng.choice(["change", "change", "begin", "begin", "answer", "answer", "open", "close"]):
            case "change":
                world.make_stale(world.graph.update(texts.update(may_fail=False)))
            case "begin" if world.stale:
                question = rng.choice(list(world.stale))
                if (evaluation := world.queries.begin(question)) is not None:
                    under_way.append((evaluation, world.answer(question)))
            case "answer" if under_way:
                world.queries.on_answer(*under_way.pop(rng.randrange(len(under_way))))
            case "open":
                subscribers.append(Subscriber(world, f"step {step}", rng.choice(questions)))
                assert subscribers[-1].rows == world.rows(subscribers[-1].question), "it shows all changes before it"
            case "close" if len(subscribers) > 3:
                world.queries.unsubscribe(subscribers.pop(rng.randrange(len(subscribers))).name)
        for subscriber in rng.sample(subscribers, 2):
            subscriber.take()
    for evaluation, answer in under_way:
        world.queries.on_answer(evaluation, answer)
    world.evaluate()
    assert world.queries.statistics().stale == 0
    for subscriber in subscribers:
        subscriber.take()
        assert subscriber.rows == world.rows(subscriber.question), subscriber.question


def test_one_evaluation_stands_for_all_changes_before_it() -> None:
    world = World()
    subscriber = Subscriber(world, "s", SparqlQuery("SELECT ?o { <s> <p> ?o }"))
    for number in range(5):
        world.make_stale(world.graph.change((), [Triple(Uri("s"), Uri("p"), Literal(str(number)))]))
    assert world.queries.take("s") is None
    assert world.evaluate() == ["s"]
    assert len(world.asked) == 2
    subscriber.take()
    assert (subscriber.sequence, subscriber.changes, sum(subscriber.rows.values())) == (1, 5, 5)


@pytest.mark.parametrize("seed", range(60))
def test_who_comes_back_gets_what_was_missed_or_the_whole(seed: int) -> None:
    rng, world = random.Random(seed), World()
    question: Question = Masks((Mask(),)) if seed % 2 else SparqlQuery("SELECT ?s ?o WHERE { ?s ?p ?o }")
    subscriber = Subscriber(world, "s", question)
    for _ in range(40):
        for _ in range(rng.choice((0, 1, 5, 2 * INDICATIONS_KEPT if rng.random() < 0.1 else 3))):
            subject = rng.choice(SUBJECTS)
            world.change(
                Triple(subject, PREDICATES[0], Literal(str(rng.randint(0, 9)))), removed=(Mask(rng.choice(SUBJECTS)),)
            )
            if rng.random() < 0.6:
                world.queries.take("s")  # and the indication is lost in transit
        resumption = world.queries.resume("s", subscriber.sequence)
        if resumption.result is not None:
            subscriber.rows, subscriber.sequence = Counter(resumption.result.rows), resumption.sequence
        else:
            subscriber.apply(resumption.missed)
            assert subscriber.sequence == resumption.sequence
        assert subscriber.rows == world.rows(question)


def test_a_number_that_was_never_given_means_the_whole_result() -> None:
    world = World()
    Subscriber(world, "s", Masks((Mask(),)))
    world.change(Triple(Uri("a"), Uri("p"), Literal("1")))
    resumption = world.queries.resume("s", 99)
    assert resumption.result is not None
    assert len(resumption.result.rows) == 1
    assert world.queries.resume("s", resumption.sequence).result is None


def test_changes_that_undo_each_other_are_not_told_but_counted() -> None:
    world = World()
    subscriber = Subscriber(world, "s", Masks((Mask(),)))
    triple = Triple(Uri("a"), Uri("p"), Literal("1"))
    assert world.change(triple) == ["s"]
    assert world.change(removed=(Mask(),)) == ["s"]
    assert world.queries.take("s") is None
    world.change(triple)
    subscriber.take()
    assert (subscriber.sequence, subscriber.changes) == (1, 3)


def test_the_same_question_is_asked_once_for_all_and_only_when_concerned() -> None:
    world = World()
    question = SparqlQuery("SELECT (COUNT(?o) AS ?n) WHERE { <s> <p> ?o }")
    subscribers = [Subscriber(world, str(number), question) for number in range(100)]
    assert len(world.asked) == 1
    world.change(Triple(Uri("s"), Uri("q"), Literal("1")), Triple(Uri("t"), Uri("p"), Literal("1")))
    assert len(world.asked) == 1
    assert len(world.change(Triple(Uri("s"), Uri("p"), Literal("1")))) == 100
    assert len(world.asked) == 2
    for subscriber in subscribers:
        subscriber.take()
        assert subscriber.rows == world.rows(question)
    statistics = world.queries.statistics()
    assert (statistics.queries, statistics.subscriptions, statistics.asked, statistics.indications) == (1, 100, 1, 100)


def test_blank_nodes_of_a_row_are_the_same_the_next_time() -> None:
    world = World()
    world.change(Triple(Uri("s"), Uri("p"), Literal("1")))
    subscriber = Subscriber(world, "s", SparqlQuery("SELECT ?s (BNODE() AS ?b) WHERE { ?s ?p ?o }"))
    assert world.change(Triple(Uri("t"), Uri("p"), Literal("1"))) == ["s"]
    indication = world.queries.take("s")
    assert indication is not None
    assert (len(indication.difference.added), indication.difference.removed) == (1, ())
    subscriber.apply(indication)


def test_what_has_ended_is_told_nothing_and_costs_nothing() -> None:
    world = World()
    for question in (Masks((Mask(),)), SparqlQuery("ASK { ?s <p>* ?o }"), SparqlQuery("ASK { ?s <p> ?o }")):
        for name in ("one", "two"):
            world.subscribe(f"{name} {question}", name, question)
    assert len(world.queries.subscriptions_of("one")) == 3
    for owner in ("one", "two"):
        for subscription_id in world.queries.subscriptions_of(owner):
            world.queries.unsubscribe(subscription_id)
        assert world.queries.subscriptions_of(owner) == []
    world.asked.clear()
    assert world.change(Triple(Uri("s"), Uri("p"), Literal("1"))) == []
    assert world.asked == []
    assert world.queries.statistics().queries == 0
    with pytest.raises(KnowledgeError, match="K117"):
        world.queries.unsubscribe("one")
    with pytest.raises(KnowledgeError, match="K117"):
        world.queries.take("one")


def test_a_question_that_can_be_answered_no_more_ends_and_the_others_go_on() -> None:
    world = World(rows_max=3)
    Subscriber(world, "large", SparqlQuery("SELECT * WHERE { ?s ?p ?o }"))
    small = Subscriber(world, "small", SparqlQuery("SELECT (COUNT(*) AS ?n) WHERE { ?s ?p ?o }"))
    told = world.change(*(Triple(Uri(str(number)), Uri("p"), Literal("1")) for number in range(4)))
    assert sorted(told) == ["large", "small"]
    small.take()
    assert small.rows == world.rows(small.question)
    with pytest.raises(KnowledgeError, match="K109"):
        world.queries.take("large")
    assert world.queries.statistics().queries == 1


def test_the_reasons_of_the_last_ends_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_query, "REASONS_KEPT", 2)
    world = World(rows_max=3)
    for name in ("one", "two", "three"):
        Subscriber(world, name, SparqlQuery(f"SELECT ?{name} ?p ?o WHERE {{ ?{name} ?p ?o }}"))
    world.change(*(Triple(Uri(str(number)), Uri("p"), Literal("1")) for number in range(4)))
    codes = []
    for name in ("one", "two", "three"):
        with pytest.raises(KnowledgeError) as raised:
            world.queries.take(name)
        codes.append(raised.value.code)
    assert codes == ["K117", "K109", "K109"]


def test_limits_are_kept_and_nothing_is_left_of_what_was_refused() -> None:
    world = World(subscriptions_max=3, subscriptions_per_owner_max=2)
    world.queries.subscribe("1", "one", Masks((Mask(),)))
    world.queries.subscribe("2", "one", Masks((Mask(),)))
    with pytest.raises(Overloaded, match="L651"):
        world.queries.subscribe("3", "one", Masks((Mask(),)))
    world.queries.subscribe("3", "two", Masks((Mask(),)))
    with pytest.raises(Overloaded, match="L650"):
        world.queries.subscribe("4", "two", Masks((Mask(),)))
    world.queries.unsubscribe("3")
    with pytest.raises(KnowledgeError, match="K116"):
        world.subscribe("3", "two", SparqlQuery("CONSTRUCT { ?s ?p [] } WHERE { ?s ?p ?o }"))
    with pytest.raises(KnowledgeError, match="K102"):
        world.subscribe("3", "two", SparqlQuery("SELECT"))
    assert world.queries.subscriptions_of("two") == []
    world.queries.subscribe("3", "two", Masks((Mask(),)))


def test_nothing_changed_concerns_nobody() -> None:
    world = World()
    Subscriber(world, "s", SparqlQuery("ASK { ?s <p>* ?o }"))
    assert world.tell(Delta()) == []
    assert len(world.asked) == 1
