"""WQL compared with equivalent property paths of SPARQL."""

from __future__ import annotations

import random

import pytest

from tidegate.errors import KnowledgeError
from tidegate.knowledge.graph import Graph, Solutions
from tidegate.knowledge.terms import RDF, RDFS, Literal, Triple, Uri
from tidegate.knowledge.wql import Path, WqlQuery, evaluate, read_path, read_wql

NODES = [Uri(name) for name in "abcde"]
PREDICATES = [Uri(name) for name in "pq"]


def random_path(rng: random.Random, depth: int) -> Path:
    operator = rng.choice(["seq", "or", "inv", "rep*", "rep+", "", ""])
    if not operator or depth == 0:
        return rng.choice(PREDICATES)
    steps = 1 if operator in ("inv", "rep*", "rep+") else rng.randint(1, 3)
    return operator, tuple(random_path(rng, depth - 1) for _ in range(steps))


def as_sparql(path: Path) -> str:
    if isinstance(path, Uri):
        return f"<{path.text}>"
    operator, steps = path
    written = [as_sparql(step) for step in steps]
    match operator:
        case "seq":
            return "(" + "/".join(written) + ")"
        case "or":
            return "(" + "|".join(written) + ")"
        case "inv":
            return f"(^{written[0]})"
    return f"({written[0]}{operator[-1]})"


def as_text(path: Path) -> str:
    return path.text if isinstance(path, Uri) else f"({path[0]} {' '.join(map(as_text, path[1]))})"


@pytest.mark.parametrize("seed", range(200))
def test_paths_lead_where_those_of_sparql_do(seed: int) -> None:
    rng, graph = random.Random(seed), Graph()
    triples = [Triple(rng.choice(NODES), rng.choice(PREDICATES), rng.choice(NODES)) for _ in range(rng.randint(0, 9))]
    # The store finds no path, not even an empty one, from a node that is in no triple.
    graph.change(inserted=[*triples, Triple(Uri("a"), Uri("z"), Uri("a"))])
    path = random_path(rng, 3)
    assert read_path(as_text(path)) == path
    answer = graph.query(f"SELECT DISTINCT ?x WHERE {{ <a> {as_sparql(path)} ?x }}")
    assert isinstance(answer, Solutions)
    reached = evaluate(WqlQuery(Uri("a"), path), graph.triples, 1000)
    assert isinstance(reached, list)
    assert {(node,) for node in reached} == set(answer.rows)
    assert len(reached) == len(answer.rows)
    for node in NODES:
        assert evaluate(WqlQuery(Uri("a"), path, node), graph.triples, 1000) == ((node,) in answer.rows)


def test_the_forms_about_types_know_classes_above_and_both_spellings() -> None:
    graph = Graph()
    graph.change(
        inserted=[
            Triple(Uri("tom"), Uri("rdf:type"), Uri("Cat")),
            Triple(Uri("Cat"), Uri(RDFS + "subClassOf"), Uri("Animal")),
            Triple(Uri("rex"), Uri(RDF + "type"), Uri("Dog")),
            Triple(Uri("tom"), Uri("age"), Literal("5")),
        ]
    )

    def ask(form: str, path: str = "", **nodes: str) -> object:
        return evaluate(read_wql(form, {name: Uri(text) for name, text in nodes.items()}, path), graph.triples, 1000)

    assert ask("wql-nodetypes", node="tom") == [Uri("Animal"), Uri("Cat")]
    assert ask("wql-nodetypes", node="rex") == [Uri("Dog")]
    assert ask("wql-istype", node="tom", type="Animal") is True
    assert ask("wql-istype", node="rex", type="Animal") is False
    assert ask("wql-issubtype", subtype="Cat", supertype="Animal") is True
    assert ask("wql-issubtype", subtype="Animal", supertype="Cat") is False
    assert ask("wql-values", "age", start="tom") == [Literal("5")]
    assert ask("wql-values", "[:inv !rdf:type]", start="Cat") == [Uri("tom")]
    related = read_wql("wql-related", {"start": Uri("tom"), "end": Literal("5")}, "'age'")
    assert evaluate(related, graph.triples, 1000) is True


def test_a_path_leads_over_so_many_triples_and_no_more() -> None:
    graph = Graph()
    graph.change(inserted=[Triple(Uri(str(number)), Uri("next"), Uri(str(number + 1))) for number in range(100)])
    chain = read_wql("wql-values", {"start": Uri("0")}, "['rep+', 'next']")
    reached = evaluate(chain, graph.triples, 100)
    assert isinstance(reached, list)
    assert len(reached) == 100
    with pytest.raises(KnowledgeError, match="K128"):
        evaluate(chain, graph.triples, 99)


@pytest.mark.parametrize("text", ["", "(", ")", "(seq)", "(inv a b)", "(test a)", "a b", "[" * 99, "'a", "x" * 5000])
def test_a_path_that_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(KnowledgeError, match="K115"):
        read_path(text)
