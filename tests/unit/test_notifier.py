"""A notifier calls each attached subscriber, whatever the others do; the knowledge base leaves the moment to it."""

from __future__ import annotations

from typing import Any

from tidegate.knowledge.graph import Graph
from tidegate.knowledge.knowledge_base import ChangeJob, KnowledgeBase, SubscribeJob
from tidegate.knowledge.notifier import Notifier
from tidegate.knowledge.terms import Literal, Mask, Masks, Triple, Uri


class Patient(Notifier):
    """Calls subscribers only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []

    def notify(self, notified: list[str], spread_s: float) -> None:
        self.spread_s = 7.0
        self.waiting += notified


def triple(text: str) -> Triple:
    return Triple(Uri("s"), Uri("p"), Literal(text))


def fail() -> None:
    raise ValueError("a subscriber that fails")


def insert(knowledge: KnowledgeBase, text: str) -> list[Any]:
    answers: list[Any] = []
    knowledge.submit("kp", ChangeJob((), (triple(text),)), lambda answer, _: answers.append(answer))
    return answers


def test_all_attached_subscribers_are_called_although_one_fails() -> None:
    notifier, called = Notifier(), list[str]()
    notifier.attach("a", lambda: called.append("a"))
    notifier.attach("fails", fail)
    notifier.attach("b", lambda: called.append("b"))
    notifier.notify(["a", "fails", "unknown", "b"], 0.5)
    assert called == ["a", "b"]
    assert notifier.spread_s == 0.5


def test_a_detached_subscriber_is_not_called() -> None:
    notifier, called = Notifier(), list[str]()
    notifier.attach("a", lambda: called.append("a"))
    assert notifier.detach("a")
    assert not notifier.detach("a")
    notifier.notify(["a"], 0.0)
    assert called == []


def test_a_change_is_answered_although_its_subscribers_are_called_later() -> None:
    notifier, taken = Patient(), list[Any]()
    knowledge = KnowledgeBase(Graph(), notifier=notifier)
    job = SubscribeJob(Masks((Mask(),)), lambda: taken.append(knowledge.take("it")), "it")
    knowledge.submit("kp", job, lambda *_: None)
    for text in "12":
        (delta,) = insert(knowledge, text)
        assert delta.added == (triple(text),)
    assert taken == []
    assert notifier.waiting == ["it", "it"]
    assert knowledge.spread_s == 7.0
    notifier.call(["it"])
    (indication,) = taken
    assert set(indication.difference.added) == {triple("1"), triple("2")}
    assert (indication.sequence, indication.merged) == (1, 1)


def test_a_lost_connection_detaches_until_it_resumes() -> None:
    knowledge, called = KnowledgeBase(Graph()), list[str]()
    knowledge.submit("kp", SubscribeJob(Masks((Mask(),)), lambda: called.append("first"), "it"), lambda *_: None)
    knowledge.detach("it")
    insert(knowledge, "1")
    resumption = knowledge.resume("it", 0, lambda: called.append("second"))
    assert resumption.missed is not None
    insert(knowledge, "2")
    assert called == ["second"]
