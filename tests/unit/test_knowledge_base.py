"""Jobs that need no worker are answered before `submit` returns; every other job is answered once, whatever happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidegate.errors import KnowledgeError
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.knowledge_base import (
    AskJob,
    ChangeJob,
    CheckJob,
    InsertsJob,
    Job,
    KnowledgeBase,
    Subscribed,
    SubscribeJob,
    UpdateJob,
)
from tidegate.knowledge.question import Question, Result, SparqlQuery
from tidegate.knowledge.terms import Mask, Masks, NewTriple, Triple, Uri
from tidegate.knowledge.wql import read_wql

MASKS = Masks((Mask(),))
PATH = read_wql("wql-values", {"start": Uri("s")}, "p")
SPARQL = SparqlQuery("SELECT * WHERE { ?s ?p ?o }")


def subscribe(question: Question) -> SubscribeJob:
    return SubscribeJob(question, lambda: None)


def submit(knowledge: KnowledgeBase, job: Job) -> list[Any]:
    answers: list[Any] = []
    knowledge.submit("kp", job, lambda answer, _: answers.append(answer))
    return answers


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        (ChangeJob((), (Triple(Uri("s"), Uri("p"), Uri("o")),)), Delta),
        (InsertsJob(((NewTriple(Uri("s"), Uri("p"), Uri("o")),),)), list),
        (UpdateJob("INSERT DATA { <s> <p> <o> }"), Delta),
        (AskJob(MASKS), Result),
        (AskJob(PATH), Result),
        (subscribe(MASKS), Subscribed),
        (subscribe(PATH), Subscribed),
        (CheckJob(), type(None)),
    ],
)
def test_a_job_without_a_worker_is_answered_before_submit_returns(job: Job, kind: type) -> None:
    """It needs no event loop either."""
    (answer,) = submit(KnowledgeBase(Graph()), job)
    assert isinstance(answer, kind)


def test_what_an_answer_submits_is_answered_after_it() -> None:
    knowledge, order = KnowledgeBase(Graph()), list[str]()

    def on_first(_answer: Any, _load: Any) -> None:
        knowledge.submit("kp", CheckJob(), lambda *_: order.append("second"))
        order.append("first")

    knowledge.submit("kp", CheckJob(), on_first)
    assert order == ["first", "second"]


@pytest.mark.parametrize("job", [AskJob(SPARQL), UpdateJob("DELETE WHERE { ?s ?p ?o }"), subscribe(SPARQL)])
@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_job_of_a_worker_is_refused_once_when_the_workers_stop(job: Job, is_waiting: bool) -> None:
    async def scenario() -> None:
        knowledge = KnowledgeBase(Graph())
        answers = submit(knowledge, job) if is_waiting else []
        assert answers == []
        await knowledge.stop()
        if not is_waiting:
            answers = submit(knowledge, job)
        (error,) = answers
        assert error.code == "U702"
        assert knowledge.queries.statistics().queries == 0, "the question is closed again"
        (delta,) = submit(knowledge, ChangeJob((), (Triple(Uri("s"), Uri("p"), Uri("o")),)))
        assert delta, "the lane is free again"

    asyncio.run(scenario())


def test_a_bug_in_a_job_becomes_its_answer_and_the_next_job_runs() -> None:
    def publish(_delta: Delta) -> None:
        raise ZeroDivisionError

    knowledge = KnowledgeBase(Graph(), publish=publish)
    for subject in "ab":
        (error,) = submit(knowledge, ChangeJob((), (Triple(Uri(subject), Uri("p"), Uri("o")),)))
        assert error.code == "K118"
    (refused,) = submit(knowledge, ChangeJob((), (Triple(Uri("\ud800"), Uri("p"), Uri("o")),)))
    assert isinstance(refused, KnowledgeError)
    assert submit(knowledge, CheckJob()) == [None]
