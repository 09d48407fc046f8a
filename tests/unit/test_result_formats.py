"""Results as text: independent readers of the W3C formats read what was written."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from xml.etree import ElementTree

import pyoxigraph as ox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import KnowledgeError
from tidegate.knowledge.graph import Graph
from tidegate.knowledge.question import Result, Shape, SparqlQuery, ask
from tidegate.knowledge.result_formats import (
    SOLUTION_FORMATS,
    TRIPLE_FORMATS,
    json_row,
    write_csv,
    write_json,
    write_n_triples,
    write_rdf_xml,
    write_tsv,
    write_xml,
)
from tidegate.knowledge.ssap import NOT_IN_XML
from tidegate.knowledge.terms import Blank, Literal, Mask, Masks, NewTriple, Term, Triple, Uri, write_term
from tidegate.listeners.http.sparql import acceptable

NAMESPACE = "{http://www.w3.org/2005/sparql-results#}"
# Only characters that XML allows, so that all formats can be compared.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), max_size=8) | (
    st.sampled_from(["", " ", "a,b", '"', "''", "\n", "\t\r", "\\", "\\u0041", "<&>", "é", "\U0001f600"])
)
uris = st.sampled_from(["http://e/a", "urn:x:1", "http://e/é#b"]).map(Uri)
literals = st.one_of(
    texts.map(Literal),
    st.builds(Literal, texts, datatype=st.just("http://e/type")),
    st.builds(Literal, texts, language=st.sampled_from(["en", "de-at"])),
)
blanks = st.sampled_from(["b0", "b1"]).map(Blank)
terms = st.one_of(uris, literals, blanks)
results = st.integers(0, 3).flatmap(
    lambda width: st.builds(
        Result,
        st.just(Shape.SOLUTIONS),
        st.lists(st.tuples(*[terms | st.none()] * width), max_size=4),
        st.just(tuple("xyz"[:width])),
    )
)


def term_of(term: object) -> Term | None:
    if isinstance(term, ox.NamedNode):
        return Uri(term.value)
    if isinstance(term, ox.BlankNode):
        return Blank(term.value)
    if isinstance(term, ox.Literal):
        datatype = "" if term.language or term.datatype.value.endswith("#string") else term.datatype.value
        return Literal(term.value, datatype, term.language or "")
    assert term is None
    return None


def xml_term(element: ElementTree.Element) -> Term:
    text = element.text or ""
    match element.tag.removeprefix(NAMESPACE):
        case "uri":
            return Uri(text)
        case "bnode":
            return Blank(text)
    language = element.get("{http://www.w3.org/XML/1998/namespace}lang", "")
    return Literal(text, element.get("datatype", ""), language)


@given(results.filter(lambda result: result.variables))
@pytest.mark.parametrize(
    ("write", "kind"),
    [(write_json, ox.QueryResultsFormat.JSON), (write_tsv, ox.QueryResultsFormat.TSV)],
    ids=["json", "tsv"],
)
def test_another_reader_finds_the_same_solutions(
    write: Callable[[Result], bytes], kind: ox.QueryResultsFormat, result: Result
) -> None:
    read = ox.parse_query_results(write(result), kind)
    assert isinstance(read, ox.QuerySolutions)
    assert tuple(variable.value for variable in read.variables) == result.variables
    assert [tuple(map(term_of, row)) for row in read] == result.rows


@given(results)
def test_an_xml_parser_finds_the_same_solutions(result: Result) -> None:
    """Oxigraph's own reader would trim the texts."""
    document = ElementTree.fromstring(write_xml(result))
    assert tuple(each.get("name") for each in document.iter(f"{NAMESPACE}variable")) == result.variables
    read = []
    for solution in document.iter(f"{NAMESPACE}result"):
        found = {each.get("name"): xml_term(each[0]) for each in solution.iter(f"{NAMESPACE}binding")}
        read.append(tuple(map(found.get, result.variables)))
    assert read == result.rows


@given(results.filter(lambda result: len(result.variables) > 1))
def test_csv_has_the_values(result: Result) -> None:
    header, *rows = csv.reader(io.StringIO(write_csv(result).decode(), newline=""))
    assert tuple(header) == result.variables

    def value(term: Term | None) -> str:
        return "" if term is None else f"_:{term.label}" if isinstance(term, Blank) else term.text

    assert rows == [list(map(value, row)) for row in result.rows]  # type: ignore[arg-type]


@given(st.lists(st.tuples(uris | blanks, uris, terms), max_size=4))
def test_triples_are_turtle_and_n_triples(triples: list[tuple[Term, Uri, Term]]) -> None:
    written = write_n_triples(Result(Shape.TRIPLES, list(triples)))
    read = list(ox.parse(written, ox.RdfFormat.N_TRIPLES))
    assert [(term_of(each.subject), term_of(each.predicate), term_of(each.object)) for each in read] == triples
    # Turtle renames blank nodes.
    assert len(list(ox.parse(written, ox.RdfFormat.TURTLE))) == len(triples)


@given(
    st.lists(
        st.builds(
            NewTriple,
            st.sampled_from([Uri("http://e/a&b"), Uri("http://e/s"), Blank("b0")]),
            st.sampled_from([Uri("http://e/p"), Uri("http://e#q-1.x"), Uri("http://e/größe"), Uri("urn:x:1a")]),
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(Literal)
            | st.sampled_from([Uri("http://e/o"), Literal("5", "http://e/kind"), Literal("a", "", "en")]),
        ),
        max_size=4,
    )
)
def test_another_reader_finds_the_triples_in_rdf_xml(triples: list[NewTriple]) -> None:
    """Exceptions are what XML cannot express, and the labels of blank nodes."""
    read = list(ox.parse(write_rdf_xml(Result(Shape.TRIPLES, list(triples))), ox.RdfFormat.RDF_XML))
    found = [(term_of(each.subject), term_of(each.predicate), term_of(each.object)) for each in read]
    assert list(map(_as_in_xml, found)) == list(map(_as_in_xml, triples))


def _as_in_xml(triple: Iterable[Term | None]) -> tuple[Term | None, ...]:
    return tuple(
        Blank("")
        if isinstance(term, Blank)
        else Literal(NOT_IN_XML.sub("\ufffd", term.text), term.datatype, term.language)
        if isinstance(term, Literal)
        else term
        for term in triple
    )


@pytest.mark.parametrize("predicate", ["http://e/1", "http://e/", "http://e/p²"])
def test_a_predicate_that_rdf_xml_cannot_write_is_refused(predicate: str) -> None:
    result = Result(Shape.TRIPLES, [NewTriple(Uri("s"), Uri(predicate), Uri("o"))])
    with pytest.raises(KnowledgeError, match="K129"):
        write_rdf_xml(result)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8))
def test_what_is_written_in_an_answer_can_be_asked_for(text: str) -> None:
    """Names that are not IRIs are returned as they were written. Only names that SPARQL cannot write are left out."""
    graph = Graph()
    graph.change(inserted=[Triple(Uri("http://e/s"), Uri("http://e/p"), Literal(text))])
    graph.update(f"INSERT DATA {{ <http://e/s> <http://e/q> {write_term(Literal(text))} }}")
    result = ask(graph, SparqlQuery("SELECT ?a { ?s <http://e/p> ?a ; <http://e/q> ?a }"))
    assert result.rows == [(Literal(text),)]
    assert json_row(result, result.rows[0]) == {"a": {"type": "literal", "value": text}}


@pytest.mark.parametrize("truth", [True, False])
def test_yes_or_no(truth: bool) -> None:
    result = Result(Shape.TRUTH, [truth])
    for write, kind in ((write_json, ox.QueryResultsFormat.JSON), (write_xml, ox.QueryResultsFormat.XML)):
        read = ox.parse_query_results(write(result), kind)
        assert isinstance(read, ox.QueryBoolean)
        assert bool(read) is truth
    assert write_csv(result).strip() == write_tsv(result).strip() == (b"true" if truth else b"false")


def test_a_row_of_a_mask_is_a_triple() -> None:
    graph = Graph()
    graph.change(inserted=[Triple(Uri("Agent X"), Uri("p"), Uri("o"))])
    result = ask(graph, Masks((Mask(),)))
    assert json_row(result, result.rows[0]) == {
        "s": {"type": "uri", "value": "Agent X"},
        "p": {"type": "uri", "value": "p"},
        "o": {"type": "uri", "value": "o"},
    }
    assert write_n_triples(result) == b"<Agent\\u0020X> <p> <o> .\n"


JSON, XML, CSV = "application/sparql-results+json", "application/sparql-results+xml", "text/csv"


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("*/*", JSON),
        ("text/*", CSV),
        ("text/csv", CSV),
        ("Text/CSV; charset=utf-8", CSV),
        (f"{JSON};q=0.5, {XML}", XML),
        (f"{JSON};q=0.5, {XML};q=0.4", JSON),
        (f"text/html, {XML};q=0.9, */*;q=0.1", XML),
        (f"*/*, {JSON};q=0", "application/json"),
        ("image/png", None),
        (f"{JSON};q=0", None),
        (f"{JSON};q=much", None),
        ("", None),
        (";;,=", None),
    ],
)
def test_what_accept_chooses(accept: str, chosen: str | None) -> None:
    assert acceptable(accept, SOLUTION_FORMATS) == chosen


def test_triples_are_offered_in_their_own_formats() -> None:
    assert acceptable("*/*", TRIPLE_FORMATS) == "text/turtle"
    assert acceptable(JSON, TRIPLE_FORMATS) is None
