"""Converts terms and triples between the clients' form and the store's, which is pyoxigraph's.

A client's name that is not an IRI is stored under a private scheme. A blank node becomes a URI when it is inserted.

What may go wrong: half a character (K101); triples within triples (K105); an invalid language (K123).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import pyoxigraph as ox

from tidegate.errors import KnowledgeError
from tidegate.knowledge.literal_kinds import Kind
from tidegate.knowledge.terms import (
    PRIVATE_SCHEME,
    Blank,
    Literal,
    NewTriple,
    Term,
    Triple,
    Uri,
    private_iri,
    skolem,
    text_of,
)

IRIS_REMEMBERED: Final = 1 << 16
DEFAULT_GRAPH: Final = ox.DefaultGraph()
StoreTerm: TypeAlias = ox.NamedNode | ox.BlankNode | ox.Literal | ox.Triple

_T = TypeVar("_T")
_STRING: Final = "http://www.w3.org/2001/XMLSchema#string"


# From the clients' form to the store's.


@lru_cache(IRIS_REMEMBERED)
def store_node(text: str) -> ox.NamedNode:
    """Returns the node for a client's name. Only the store decides whether a text is an IRI, so that a name has the
    same stored form wherever it comes from."""
    if not text.startswith(PRIVATE_SCHEME):
        with contextlib.suppress(ValueError):  # includes lone surrogates, for which `private_iri` raises K101
            return ox.NamedNode(text)
    return ox.NamedNode(private_iri(text))


def store_iri(text: str) -> str:
    return store_node(text).value


def store_literal(text: str, datatype: str, language: str) -> ox.Literal:
    try:
        if language:
            tag, _, direction = language.partition("--")
            return ox.Literal(text, language=tag, direction=ox.BaseDirection(direction) if direction else None)
        return ox.Literal(text, datatype=store_node(datatype)) if datatype else ox.Literal(text)
    except UnicodeEncodeError as error:
        raise KnowledgeError("K101", f"{text[:60]!r} contains half a character", "send valid UTF-8 text") from error
    except ValueError as error:
        raise KnowledgeError("K123", f"{language[:60]!r} is not a language", "use a tag such as en or de-AT") from error


def store_term(term: Term) -> Any:
    if isinstance(term, Blank):
        return ox.BlankNode(term.label)
    return store_node(term.text) if isinstance(term, Uri) else store_literal(term.text, term.datatype, term.language)


def store_quad(triple: NewTriple | Triple, named: dict[str, Uri]) -> ox.Quad:
    subject, predicate, found = _name(triple[0], named), store_node(triple[1].text), triple[2]
    term = (
        store_literal(found.text, found.datatype, found.language) if isinstance(found, Literal) else _name(found, named)
    )
    if isinstance(triple, Triple) and triple.graph:
        return ox.Quad(subject, predicate, term, store_node(triple.graph))
    return ox.Quad(subject, predicate, term)  # naming the default graph would double the cost


def name_blank(term: _T, named: dict[str, Uri]) -> _T | ox.NamedNode:
    """Returns the URI of a blank node, and any other term unchanged."""
    return _name(Blank(term.value), named) if isinstance(term, ox.BlankNode) else term


def skolemise(quad: ox.Quad, named: dict[str, Uri]) -> ox.Quad:
    """Replaces the blank nodes of a quad by URIs. `named` holds the URIs of the labels seen so far."""
    subject, found, graph = quad.subject, quad.object, quad.graph_name
    if isinstance(found, ox.Triple) or isinstance(subject, ox.Triple):
        raise KnowledgeError("K105", f"{quad} contains a triple within a triple", "give the statement a URI of its own")
    return ox.Quad(name_blank(subject, named), quad.predicate, name_blank(found, named), name_blank(graph, named))


def as_stored(quads: set[ox.Quad]) -> set[ox.Quad]:
    """Returns the quads with literals in the store's canonical form. Only then can sets of quads be compared."""
    if all(not isinstance(quad.object, ox.Literal) or quad.object.datatype.value == _STRING for quad in quads):
        return quads
    store = ox.Store()
    store.extend(quads)
    return set(store)


def _name(term: Uri | Blank, named: dict[str, Uri]) -> ox.NamedNode:
    if isinstance(term, Blank):
        if term.label not in named:
            named[term.label] = skolem()
        term = named[term.label]
    return store_node(term.text)


# From the store's form to the clients'.


def read_literal(literal: ox.Literal) -> Literal:
    language = literal.language or ""
    if literal.direction is not None:
        language += f"--{literal.direction.value}"
    datatype = "" if language or literal.datatype.value == _STRING else text_of(literal.datatype.value)
    return Literal(literal.value, datatype, language)


def read_term(term: StoreTerm, text: Callable[[str], str] = text_of) -> Term:
    if isinstance(term, ox.NamedNode):
        return Uri(text(term.value))
    if isinstance(term, ox.Literal):
        return read_literal(term)
    if isinstance(term, ox.BlankNode):
        return Blank(term.value)
    raise KnowledgeError("K105", f"{term} is a triple within a triple", "give the statement a URI of its own")


def read_row(row: ox.QuerySolution) -> tuple[Term | None, ...]:
    return tuple(None if term is None else read_term(term) for term in row)


def read_triple(triple: ox.Triple | ox.Quad, text: Callable[[str], str] = text_of) -> NewTriple:
    subject, predicate = read_term(triple.subject, text), read_term(triple.predicate, text)
    assert not isinstance(subject, Literal)
    assert isinstance(predicate, Uri)
    return NewTriple(subject, predicate, read_term(triple.object, text))


def stored_triple(quad: ox.Quad, text: Callable[[str], str] = text_of) -> Triple:
    subject, found, graph = quad.subject, read_term(quad.object, text), quad.graph_name
    assert isinstance(subject, ox.NamedNode), "blank nodes are named before they are stored"
    assert not isinstance(found, Blank), "blank nodes are named before they are stored"
    in_graph = text(graph.value) if isinstance(graph, ox.NamedNode) else ""
    return Triple(Uri(text(subject.value)), Uri(text(quad.predicate.value)), found, in_graph)


def kinds_of(quads: Iterable[ox.Quad]) -> set[Kind]:
    literals = (read_literal(quad.object) for quad in quads if isinstance(quad.object, ox.Literal))
    return {(literal.datatype, literal.language) for literal in literals}


def has_blank_node(quad: ox.Quad) -> bool:
    return any(isinstance(term, ox.BlankNode) for term in (quad.subject, quad.object, quad.graph_name))
