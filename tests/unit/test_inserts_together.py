"""Inserts that are committed together have the same effect as one after another: each has its own delta and answer."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import KnowledgeError
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.knowledge_base import InsertsJob, KnowledgeBase, SubscribeJob
from tidegate.knowledge.terms import Blank, Literal, Mask, NewTriple, Triple, Uri
from tidegate.knowledge.wql import read_wql

WAIT_S = 60
INTEGER = "http://www.w3.org/2001/XMLSchema#integer"
HALF_A_CHARACTER = "\ud800"

uris = st.sampled_from(["a", "b", "http://e/c", "x y"]).map(Uri)
literals = st.sampled_from([Literal("5"), Literal("5", INTEGER), Literal("05", INTEGER), Literal("x", "", "en")])
inserts = st.lists(st.builds(NewTriple, uris, uris, uris | literals), max_size=4).map(tuple)


def triple(subject: str, text: str = "o") -> NewTriple:
    return NewTriple(Uri(subject), Uri("p"), Literal(text))


def changed(delta: Delta) -> tuple[set[Triple], set[Triple]]:
    return set(delta.added), set(delta.removed)


@given(inserts, st.lists(inserts, max_size=6))
def test_the_deltas_are_those_of_one_after_another(before: tuple[NewTriple, ...], together: list[Any]) -> None:
    graph, oracle = Graph(), Graph()
    for each in (graph, oracle):
        each.change((), before)
    deltas = graph.insert_together(together)
    assert list(map(changed, deltas)) == [changed(oracle.change((), inserted)) for inserted in together]
    assert set(graph.triples([Mask()])) == set(oracle.triples([Mask()]))
    for kind in (Literal("5"), Literal("x")):
        assert set(graph.triples([Mask(None, None, kind)])) == set(oracle.triples([Mask(None, None, kind)]))


def test_a_blank_node_is_one_thing_within_an_insert_and_another_in_the_next() -> None:
    one, other = Graph().insert_together([[NewTriple(Blank("x"), Uri("p"), Blank("x"))]] * 2)
    (found,) = one.added
    assert found.subject == found.object == one.named["x"] != other.named["x"]


def test_all_of_them_are_on_disk_when_they_are_answered(tmp_path: Any) -> None:
    graph = Graph(tmp_path)
    graph.insert_together([(triple(str(number)),) for number in range(64)])
    del graph
    assert len(Graph(tmp_path)) == 64


def test_one_that_is_refused_concerns_no_other() -> None:
    knowledge = KnowledgeBase(Graph())
    answers = _inserted(knowledge, [(triple("a"),), (triple(HALF_A_CHARACTER),), (triple("a"), triple("b"))])
    assert [len(each.added) if isinstance(each, Delta) else each.code for each in answers] == [1, "K101", 1]
    assert {found.subject.text for found in knowledge.graph.triples([Mask()])} == {"a", "b"}


def test_a_question_that_must_be_evaluated_is_told_what_they_made_together() -> None:
    """The inserts are answered immediately. The evaluation comes later, and covers all of them."""

    async def scenario() -> None:
        knowledge = KnowledgeBase(Graph())
        told: list[Any] = []
        path = read_wql("wql-values", {"start": Uri("s")}, "p")
        knowledge.submit("kp", SubscribeJob(path, lambda: told.append(knowledge.take("it")), "it"), lambda *_: None)
        answers = _inserted(knowledge, [(triple("s", str(number // 2)),) for number in range(6)])
        assert [len(each.added) for each in answers] == [1, 0, 1, 0, 1, 0]
        assert told == []
        async with asyncio.timeout(WAIT_S):
            while knowledge.queries.statistics().stale:
                await asyncio.sleep(0.01)
        await knowledge.stop()
        (indication,) = told
        assert set(indication.difference.added) == {Literal(str(number)) for number in range(3)}
        assert (indication.sequence, indication.merged) == (1, 2)

    asyncio.run(scenario())


def test_a_full_lane_refuses_all_of_them() -> None:
    def check_room() -> None:
        raise KnowledgeError("K100", "no room", "wait")

    knowledge = KnowledgeBase(Graph(), check_room=check_room)
    answered: list[Any] = []
    knowledge.submit("kp", InsertsJob(((triple("a"),),)), lambda answer, _: answered.append(answer))
    assert answered[0].code == "K100"
    assert len(knowledge.graph) == 0


def _inserted(knowledge: KnowledgeBase, together: list[tuple[NewTriple, ...]]) -> list[Any]:
    answered: list[Any] = []
    knowledge.submit("kp", InsertsJob(tuple(together)), lambda answer, _: answered.extend(answer))
    return answered
