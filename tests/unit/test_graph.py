"""The graph compared with plain sets: a delta is exactly the difference between all triples before and after."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pyoxigraph
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparql_texts import SparqlTexts

from tidegate.errors import KnowledgeError
from tidegate.knowledge.documents import read_rdf_xml
from tidegate.knowledge.graph import Delta, Graph, Solutions
from tidegate.knowledge.sparql import with_iris
from tidegate.knowledge.terms import Blank, Literal, Mask, NewTriple, Triple, Uri, private_iri

INTEGER = "http://www.w3.org/2001/XMLSchema#integer"
RDF_ROOT = '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:e="http://e/">'

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
uris = st.sampled_from(["a", "b", "http://e/c", "x y"]).map(Uri) | texts.map(Uri)
literals = texts.map(Literal) | st.sampled_from(
    [Literal("5"), Literal("5", INTEGER), Literal("a", language="en"), Literal("b"), Literal("")]
)
triples = st.builds(Triple, uris, uris, uris | literals, st.just(""))
masks = st.builds(Mask, st.none() | uris, st.none() | uris, st.none() | uris | literals)


def all_triples(graph: Graph) -> set[Triple]:
    return set(graph.triples([Mask()]))


@given(st.lists(st.tuples(st.lists(masks, max_size=3), st.lists(triples, max_size=4)), max_size=6))
def test_changes_by_masks_are_those_of_a_set(changes: list[tuple[list[Mask], list[Triple]]]) -> None:
    graph, model = Graph(), set[Triple]()
    for removed, inserted in changes:
        before = set(model)
        model = {triple for triple in model if not any(mask.matches(triple) for mask in removed)} | set(inserted)
        delta = graph.change(removed, inserted)
        assert set(delta.added) == model - before
        assert set(delta.removed) == before - model
        assert len(delta.added) + len(delta.removed) == len(model ^ before)
        assert all_triples(graph) == model
        for mask in removed:
            assert set(graph.triples([mask])) == {triple for triple in model if mask.matches(triple)}


@pytest.mark.parametrize("seed", range(120))
def test_the_delta_of_an_update_is_the_difference_of_all_quads(seed: int) -> None:
    """The oracle is the store itself, which makes the same updates and is compared as a whole."""
    sparql, graph, oracle = SparqlTexts(seed), Graph(), pyoxigraph.Store()
    for _ in range(25):
        text = sparql.update()
        before, graphs = set(oracle), set(oracle.named_graphs())
        try:
            oracle.update(with_iris(text, iri_of))
        except (OSError, RuntimeError):
            assert not is_changed_by(graph, text), text
            continue
        for emptied in set(oracle.named_graphs()) - graphs - {quad.graph_name for quad in oracle}:
            oracle.remove_graph(emptied)  # deltas alone do not mention an empty graph
        delta = graph.update(text)
        assert quads(delta.added) == set(oracle) - before, text
        assert quads(delta.removed) == before - set(oracle), text
        assert len(graph) == len(oracle)


def iri_of(text: str) -> str:
    return text if text.startswith("http:") else private_iri(text)


def quads(triples: tuple[Triple, ...]) -> set[pyoxigraph.Quad]:
    def term(found: Uri | Literal) -> pyoxigraph.NamedNode | pyoxigraph.Literal:
        if isinstance(found, Uri):
            return pyoxigraph.NamedNode(iri_of(found.text))
        if found.language:
            return pyoxigraph.Literal(found.text, language=found.language)
        return pyoxigraph.Literal(found.text, datatype=pyoxigraph.NamedNode(found.datatype) if found.datatype else None)

    made = {
        pyoxigraph.Quad(
            pyoxigraph.NamedNode(iri_of(triple.subject.text)),
            pyoxigraph.NamedNode(iri_of(triple.predicate.text)),
            term(triple.object),
            pyoxigraph.NamedNode(iri_of(triple.graph)) if triple.graph else pyoxigraph.DefaultGraph(),
        )
        for triple in triples
    }
    assert len(made) == len(triples), "a triple twice in a delta"
    return made


def is_changed_by(graph: Graph, text: str) -> bool:
    before = all_triples(graph)
    with pytest.raises(KnowledgeError, match="K104"):
        graph.update(text)
    return all_triples(graph) != before


def test_a_change_that_changes_nothing_says_so() -> None:
    graph = Graph()
    graph.update("INSERT DATA { <s> <p> 5, 'x' }")
    assert not graph.update("INSERT DATA { <s> <p> 05 }")
    assert not graph.update("DELETE { ?s ?p ?o } INSERT { ?s ?p ?o } WHERE { ?s ?p ?o }")
    assert not graph.change([Mask(Uri("s"))], [Triple(Uri("s"), Uri("p"), Literal("5", INTEGER)), x("s")])
    assert not graph.change([Mask(Uri("nobody"))])


def x(subject: str) -> Triple:
    return Triple(Uri(subject), Uri("p"), Literal("x"))


def test_the_solutions_of_an_update_are_found_once() -> None:
    """If random solutions were drawn twice, the update would delete from some and insert for others."""
    graph = Graph()
    graph.change(inserted=[Triple(Uri(f"s{number}"), Uri("p"), Literal("x")) for number in range(40)])
    delta = graph.update("DELETE { ?s <p> 'x' } INSERT { ?s <p> 'y' } WHERE { ?s <p> 'x' FILTER(RAND() < 0.5) }")
    assert {triple.subject for triple in delta.added} == {triple.subject for triple in delta.removed}


def test_blank_nodes_become_uris_that_are_told_one_for_each_solution() -> None:
    graph = Graph()
    delta = graph.change(
        inserted=[NewTriple(Blank("b"), Uri("p"), Blank("c")), NewTriple(Blank("b"), Uri("q"), Uri("o"))]
    )
    assert set(delta.named) == {"b", "c"}
    assert set(delta.added) == {
        Triple(delta.named["b"], Uri("p"), delta.named["c"]),
        Triple(delta.named["b"], Uri("q"), Uri("o")),
    }
    delta = graph.update("INSERT { ?s <has> [ <is> 'part' ] } WHERE { ?s ?p ?o }")
    assert len({triple.subject for triple in delta.added if triple.predicate == Uri("is")}) == 2
    assert len(graph.triples([Mask(predicate=Uri("has"))])) == 2
    delta = graph.update("CREATE SILENT GRAPH <g>; INSERT DATA { _:x <in> 'a graph' }")
    assert [triple.predicate for triple in delta.added] == [Uri("in")]
    assert graph.triples([Mask(delta.added[0].subject)]) == list(delta.added)


def test_answers_of_each_form() -> None:
    graph = Graph()
    graph.change(inserted=[x("Agent X"), x("http://e/ y")])
    answer = graph.query("SELECT ?s ?none WHERE { ?s <p> 'x' } ORDER BY ?s")
    assert isinstance(answer, Solutions)
    assert answer.variables == ("s", "none")
    assert set(answer.rows) == {(Uri("Agent X"), None), (Uri("http://e/ y"), None)}
    assert graph.query("ASK { ?s <p> 'z' }") is False
    assert graph.query("CONSTRUCT { <a> <b> ?s } WHERE { ?s ?p ?o }") != []
    assert graph.query("PREFIX n: <http://n/> BASE <http://base/> ASK { <s> n:p 'x' }") is False


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("SELECT", "K102"),
        ("ASK { SERVICE <http://127.0.0.1:1/> { ?s ?p ?o } }", "K103"),
        ("ASK { SERVICE\n#\nSILENT ?x { ?s ?p ?o } }", "K103"),
        ("SELECT (<<( <a> <b> <c> )>> AS ?t) {}", "K105"),
    ],
)
def test_queries_that_are_refused(text: str, code: str) -> None:
    with pytest.raises(KnowledgeError, match=code):
        Graph().query(text)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("LOAD <file:///etc/passwd>", "K103"),
        ("INSERT DATA { <a> <b> ?x }", "K102"),
        ("INSERT DATA { <a> <b> <c> } ; DELETE { _:b <p> <o> } WHERE {}", "K102"),
        ("ASK {}", "K102"),
        ("INSERT DATA { <a> <b> <<( <a> <b> <c> )>> }", "K105"),
        ("INSERT DATA { <a> <b> <c> } ; CLEAR GRAPH <nowhere>", "K104"),
    ],
)
def test_updates_that_are_refused_change_nothing(text: str, code: str) -> None:
    graph = Graph()
    with pytest.raises(KnowledgeError, match=code):
        graph.update(text)
    assert len(graph) == 0


def test_service_is_a_word_that_names_and_texts_may_hold() -> None:
    graph = Graph()
    graph.update("PREFIX service: <http://s/> INSERT DATA { service:load <SERVICE> 'LOAD SERVICE' } # SERVICE")
    assert graph.query("PREFIX x: <http://s/> ASK { x:load <SERVICE> ?service }") is True


def test_a_result_has_a_bound() -> None:
    graph = Graph(rows_max=3)
    graph.change(inserted=[x(str(number)) for number in range(3)])
    assert len(graph.triples([Mask()])) == 3
    graph.change(inserted=[x("more")])
    for ask in (
        lambda: graph.triples([Mask()]),
        lambda: graph.triples([Mask(), Mask()]),
        lambda: graph.query("SELECT * { ?s ?p ?o }"),
        lambda: graph.query("CONSTRUCT WHERE { ?s ?p ?o }"),
    ):
        with pytest.raises(KnowledgeError, match="K109"):
            ask()
    assert graph.query("ASK { ?s ?p ?o }") is True


def test_an_error_may_be_dropped_by_another_thread() -> None:
    """pytest would report an unraisable exception if a result of the store were dropped with the error."""
    graph = Graph(rows_max=1)
    graph.change(inserted=[x("a"), x("b")])
    errors: list[KnowledgeError] = []

    def ask() -> None:
        for question in (lambda: graph.query("SELECT * { ?s ?p ?o }"), lambda: graph.triples([Mask()])):
            try:
                question()
            except KnowledgeError as error:
                errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert [error.code for error in errors] == ["K109", "K109"]
    errors.clear()
    gc.collect()


def test_rdf_xml_keeps_relative_names_spaces_and_blank_nodes() -> None:
    text = (
        RDF_ROOT + '<rdf:Description rdf:about="Agent X 100%41"><e:v>5</e:v><e:w rdf:resource="http://x/ y"/>'
        '<e:part rdf:parseType="Resource"><e:v xml:lang="en">é</e:v></e:part></rdf:Description></rdf:RDF>'
    )
    graph = Graph()
    delta = graph.change(inserted=read_rdf_xml(text))
    agent = Uri("Agent X 100%41")
    (part,) = delta.named.values()
    assert all_triples(graph) == {
        Triple(agent, Uri("http://e/v"), Literal("5")),
        Triple(agent, Uri("http://e/w"), Uri("http://x/ y")),
        Triple(agent, Uri("http://e/part"), part),
        Triple(part, Uri("http://e/v"), Literal("é", language="en")),
    }


def test_rdf_xml_with_entities_of_namespaces_in_either_quotes() -> None:
    text = (
        "<?xml version='1.0'?><!DOCTYPE rdf:RDF [<!ENTITY e 'http://e/'><!ENTITY f \"http://f/\">]>"
        + RDF_ROOT
        + '<rdf:Description rdf:about="&e;a"><e:v rdf:resource="&f;b"/><e:t>&lt;&amp;&e;</e:t></rdf:Description>'
        + "</rdf:RDF>"
    )
    assert set(read_rdf_xml(text)) == {
        NewTriple(Uri("http://e/a"), Uri("http://e/v"), Uri("http://f/b")),
        NewTriple(Uri("http://e/a"), Uri("http://e/t"), Literal("<&http://e/")),
    }


@pytest.mark.parametrize(
    "text",
    [
        "<rdf:RDF",
        RDF_ROOT,
        "<!DOCTYPE r [<!ENTITY a 'ab'><!ENTITY b '&a;&a;'>]><r>&b;</r>",
        "<!DOCTYPE r [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><r>&a;</r>",
        "<!DOCTYPE r [<!ENTITY a '" + "x" * 9999 + "'>]><r>" + "&a;" * 99 + "</r>",
        "<!DOCTYPE r>" + "<r>" * 1000,
    ],
)
def test_rdf_xml_that_is_refused(text: str) -> None:
    with pytest.raises(KnowledgeError, match="K106"):
        read_rdf_xml(text)


def test_a_dump_restores_the_graph_in_one_step(tmp_path: Path) -> None:
    graph = Graph()
    graph.update("INSERT DATA { <s_p> <p> 'x', 5, 'a'@en . GRAPH <g> { <s> <p> 'é' } }")
    graph.change(inserted=[x("Agent X")])
    graph.dump(tmp_path / "dump.nq")
    other = Graph()
    other.change(inserted=[x("gone"), x("Agent X")])
    delta = other.restore(tmp_path / "dump.nq")
    assert delta.removed == (x("gone"),)
    assert len(delta.added) == 4
    assert not graph.restore(tmp_path / "dump.nq")
    (tmp_path / "bad.nq").write_text("<a> <b>")
    with pytest.raises(KnowledgeError, match="K108"):
        other.restore(tmp_path / "bad.nq")
    assert len(other) == 5


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_that_is_told_all_deltas_becomes_the_graph(seed: int, tmp_path: Path) -> None:
    """It may receive deltas that it already has, because changes continue while the copy is made. It also knows the
    same empty graphs."""
    texts, graph = SparqlTexts(seed), Graph(tmp_path / "graph" if seed % 4 == 0 else None)
    others = ["CREATE SILENT GRAPH <g>", "DROP SILENT GRAPH <http://example.org/g>", "DROP ALL"]
    deltas = [graph.update(f"{kind} DATA {{ GRAPH <emptied> {{ <s> <p> 'x' }} }}") for kind in ("INSERT", "DELETE")]
    for number in range(24):
        text = others[number % 3] if number % 8 == 7 else texts.update(may_fail=False)
        deltas.append(graph.update(text))
        if number == 12:
            copied = graph.copy()
    copy = Graph.open_copy(copied)
    if seed % 4:
        shutil.rmtree(copied)
    for delta in deltas[6:]:
        copy.apply(delta)
    assert len(copy) == len(graph)
    assert all_triples(copy) == all_triples(graph)
    for text in ("SELECT ?g { GRAPH ?g {} }", "SELECT * { GRAPH ?g { ?s ?p ?o } }"):
        ours, theirs = graph.query(text), copy.query(text)
        assert isinstance(ours, Solutions)
        assert isinstance(theirs, Solutions)
        assert set(ours.rows) == set(theirs.rows)
    for triple in all_triples(graph):
        assert set(copy.triples([Mask(object=triple.object)])) == set(graph.triples([Mask(object=triple.object)]))


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    graph = Graph(tmp_path / "not" / "yet")
    with pytest.raises(KnowledgeError, match="K107"):
        Graph(tmp_path / "not" / "yet")
    assert len(graph) == 0


@pytest.mark.parametrize("damage", ["none", "missing", "malformed"])
def test_literals_of_every_kind_are_found_after_a_restart(tmp_path: Path, damage: str) -> None:
    graph = Graph(tmp_path)
    graph.update("INSERT DATA { <s> <p> 5, '5', '5'@en }")
    graph.update(
        "INSERT DATA { <s> <q> 1 } ; INSERT { ?s <p> '5'^^<own type> } WHERE { ?s <q> 1 }".replace("n t", "nt")
    )
    with pytest.raises(KnowledgeError, match="K104"):
        graph.update("CLEAR GRAPH <nowhere>")
    del graph
    kinds = tmp_path / "kinds.json"
    known = kinds.read_text()
    if damage == "missing":
        kinds.unlink()
    elif damage == "malformed":
        kinds.write_text(known[:-3])
    assert len(Graph(tmp_path).triples([Mask(object=Literal("5"))])) == 4
    assert kinds.read_text() == known


def test_blank_nodes_of_a_process_that_was_killed_are_named_when_the_graph_is_opened(tmp_path: Path) -> None:
    """It was killed between an update and the naming, so the file of kinds is missing."""
    store = pyoxigraph.Store(tmp_path / "triples")
    store.update("INSERT DATA { _:b <http://e/p> 'x' . <http://e/s> <http://e/p> _:b }")
    del store
    first, second = Graph(tmp_path).triples([Mask()])
    assert {first.object, second.object} & {first.subject, second.subject}


WRITER = """
import os, sys
from tidegate.knowledge.graph import Graph
graph = Graph(sys.argv[1])
for number in range(10_000):
    graph.update(f"DELETE WHERE {{ <s> <p> ?o }}; INSERT DATA {{ <s> <p> {number} . <s{number}> <p> 'x' }}")
    os.write(1, f"{number}\\n".encode())
"""


def test_a_killed_process_loses_nothing_that_it_has_confirmed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        confirmed = [int(writer.stdout.readline()) for _ in range(200)]
        writer.kill()
        confirmed += [int(line) for line in writer.stdout.read().split("\n") if line]
    graph = Graph(tmp_path)
    (last,) = graph.triples([Mask(Uri("s"))])
    assert confirmed[-1] <= int(last.object.text) <= confirmed[-1] + 1
    assert len(graph) == int(last.object.text) + 2


def test_no_delta_is_no_truth() -> None:
    assert not Delta()
    assert Delta(added=(x("s"),))
