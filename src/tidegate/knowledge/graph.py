"""The graph: the triples themselves, in memory or in a directory, over pyoxigraph, which only this module knows.

A change is atomic and answers with its exact delta: the triples that were not there and are, and those that were and
are not. The store tells no deltas, so a change is worked out before it is made. Masks and triples are looked up. An
operation of a SPARQL update is evaluated once, as a query for the solutions of its WHERE; its templates are filled in
with them, and what follows is one transaction of data. Operations that look at what earlier ones of the same update
have changed, or that name graphs, cannot be foreseen like this: there, what their templates may change is compared
before and after, at worst the whole graph.

Blank nodes become URIs on their way in. Literals with a datatype are kept by value, in one form of it (01 is 1); a
delta shows that form. In a directory, a change is in the write-ahead log of the store when `change` returns: killing
the process loses nothing, a power cut may lose the last moments, unless `flush` was called. One thread changes; others
may ask meanwhile, and see the graph before a change or after it.

What may go wrong: SPARQL that is malformed (K102), or cannot be evaluated (K104); triples within triples (K105);
RDF/XML that is malformed (K106); a directory that cannot be opened (K107) or a dump that cannot be read (K108); a
result of more than `rows_max` rows (K109); a predicate that RDF/XML cannot write (K129).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

import msgspec
import pyoxigraph as ox

from tidegate.errors import KnowledgeError
from tidegate.knowledge import sparql
from tidegate.knowledge.literal_kinds import Kind, LiteralKinds
from tidegate.knowledge.rdf_xml import without_entities
from tidegate.knowledge.terms import (
    PRIVATE_SCHEME,
    Blank,
    Literal,
    Mask,
    Term,
    Triple,
    Uri,
    private_iri,
    skolem,
    text_of,
)

IRIS_REMEMBERED: Final = 1 << 16
ROWS_MAX: Final = 100_000
# What lies in the directory of a graph, or of a copy.
TRIPLES: Final = "triples"
KINDS: Final = "kinds.json"
COPIES: Final = "copies"
DUMP: Final = "triples.nq"
GRAPHS: Final = "graphs.json"

_P = ParamSpec("_P")
_T = TypeVar("_T")
# How a predicate must end to be the name of an element; of other scripts XML allows more than this.
_LETTER: Final = r"A-Za-z_\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02ff\u0370-\u037d\u037f-\u1fff\u3001-\ud7ff"
_LOCAL_NAME: Final = re.compile(f"[{_LETTER}][{_LETTER}0-9.-]*$")
_STRING: Final = "http://www.w3.org/2001/XMLSchema#string"
_DEFAULT_GRAPH: Final = ox.DefaultGraph()
# media type -> (format, whether it is one of those that dumps are written in)
DOCUMENT_FORMATS: Final = {
    "text/turtle": (ox.RdfFormat.TURTLE, False),
    "application/trig": (ox.RdfFormat.TRIG, False),
    "application/n-triples": (ox.RdfFormat.N_TRIPLES, True),
    "application/n-quads": (ox.RdfFormat.N_QUADS, True),
}
RDF_XML: Final = "application/rdf+xml"
DOCUMENTS: Final = (*DOCUMENT_FORMATS, RDF_XML)
_StoreTerm: TypeAlias = ox.NamedNode | ox.BlankNode | ox.Literal | ox.Triple


def _leaves_nothing(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Results of the store must be dropped by the thread that made them: an error that travels to another thread must
    not take them along, in the frames of its traceback."""

    @wraps(method)
    def wrapper(*arguments: _P.args, **named: _P.kwargs) -> _T:
        try:
            return method(*arguments, **named)
        except KnowledgeError as error:
            raise error.with_traceback(None) from None

    return wrapper


class NewTriple(NamedTuple):
    """A triple to insert, where blank nodes may stand for things without a name."""

    subject: Uri | Blank
    predicate: Uri
    object: Term


class Delta(msgspec.Struct, frozen=True):
    """What a change has really changed. `named` tells which URI each blank node has become."""

    added: tuple[Triple, ...] = ()
    removed: tuple[Triple, ...] = ()
    named: dict[str, Uri] = {}

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


class Solutions(msgspec.Struct, frozen=True):
    """The answer to a SELECT: a row has a term, or None, for each variable."""

    variables: tuple[str, ...]
    rows: list[tuple[Term | None, ...]]


Answer: TypeAlias = Solutions | bool | list[NewTriple]


class Graph:
    """`Graph()` lives in memory, `Graph(directory)` on disk, where one process at a time may open it."""

    def __init__(self, directory: str | os.PathLike[str] | None = None, rows_max: int = ROWS_MAX) -> None:
        self.rows_max = rows_max
        self._directory = None if directory is None else Path(directory)
        self._kinds = LiteralKinds(None if self._directory is None else self._directory / KINDS)
        self._store = ox.Store() if self._directory is None else _open(self._directory)
        if not self._kinds.load():
            self._learn()

    def __len__(self) -> int:
        return len(self._store)

    def copy(self) -> Path:
        """A directory with a copy, for another process to open with `open_copy` and to remove. Any thread may call it;
        it has all changes made before, and perhaps some that are made meanwhile."""
        if self._directory is None:
            copy = Path(tempfile.mkdtemp(prefix="tidegate-graph-"))
            graphs = [graph.value for graph in self._store.named_graphs()]  # a dump has those with triples alone
            (copy / GRAPHS).write_bytes(msgspec.json.encode(graphs))
            self._store.dump(os.fspath(copy / DUMP), ox.RdfFormat.N_QUADS)
        else:
            copy = self._directory / COPIES / str(uuid.uuid4())
            copy.mkdir(parents=True)
            self._store.backup(copy / TRIPLES)  # links to its files
        self._kinds.write(copy / KINDS)  # of at least what was copied
        return copy

    @classmethod
    def open_copy(cls, copy: Path) -> Graph:
        """Reads the copy of a graph in memory, and takes its dump away, or opens that of one on disk."""
        if not (copy / DUMP).exists():
            return cls(copy)
        graph, kinds = cls(), LiteralKinds(copy / KINDS)
        graph._store.load(path=copy / DUMP, format=ox.RdfFormat.N_QUADS)
        (copy / DUMP).unlink()
        for name in msgspec.json.decode((copy / GRAPHS).read_bytes(), type=list[str]):
            graph._store.add_graph(ox.NamedNode(name))
        kinds.load()
        graph._kinds.add(kinds)
        return graph

    def change(self, removed: Iterable[Mask] = (), inserted: Iterable[NewTriple | Triple] = ()) -> Delta:
        """Removes what the masks match, then inserts, in one step."""
        gone = {quad for mask in removed for quad in self._quads(mask)}
        named: dict[str, Uri] = {}
        new = _as_stored({_new_quad(triple, named) for triple in inserted})
        return self._commit(gone - new, new, named)

    def insert_together(self, inserts: Iterable[Iterable[NewTriple]]) -> list[Delta]:
        """Several inserts as one transaction of the store, which costs little more than one of them; the delta of each,
        as if they had come one after another. When one of them is refused, none is made."""
        added: set[ox.Quad] = set()
        deltas = []
        for inserted in inserts:
            named: dict[str, Uri] = {}
            new = _as_stored({_new_quad(triple, named) for triple in inserted})
            new = {quad for quad in new if quad not in added and quad not in self._store}
            added |= new
            deltas.append(_delta(new, (), named))
        self._know_kinds(deltas)
        self._store.extend(added)
        return deltas

    def apply(self, delta: Delta) -> Delta:
        """Makes what another graph has become: what is so already is left so."""
        gone, new = ({_new_quad(triple, {}) for triple in triples} for triples in (delta.removed, delta.added))
        return self._commit(gone, new, delta.named)

    @_leaves_nothing
    def update(self, text: str) -> Delta:
        """Makes a SPARQL update."""
        text = sparql.with_iris(text, _iri)
        if not sparql.is_update(text):
            raise KnowledgeError("K102", "a query was sent as an update", "ask it as a query")
        _check_update(text)
        operations = sparql.operations_of(text)
        foreseen = self._foresee(operations)
        if foreseen is None:
            return self._update_and_compare(text, None if operations is None else _template_masks(operations))
        named: dict[str, Uri] = {}
        gone, new = foreseen
        return self._commit(gone, {_skolemised(quad, named) for quad in new}, named)

    @_leaves_nothing
    def triples(self, masks: Iterable[Mask]) -> list[Triple]:
        """What any of the masks matches, once each."""
        masks = tuple(masks)
        found = (quad for mask in masks for quad in self._quads(mask))
        distinct = found if len(masks) == 1 else dict.fromkeys(self._bounded(found))
        return [_stored_triple(quad) for quad in self._bounded(distinct)]

    @_leaves_nothing
    def query(self, text: str) -> Answer:
        """The answer to a SPARQL query: solutions, yes or no, or the triples of a CONSTRUCT or DESCRIBE."""
        text = sparql.with_iris(text, _iri)
        try:
            answer = self._store.query(text)
            if isinstance(answer, ox.QueryBoolean):
                return bool(answer)
            if isinstance(answer, ox.QueryTriples):
                return [_read_triple(triple) for triple in self._bounded(answer)]
            variables = tuple(variable.value for variable in answer.variables)
            return Solutions(variables, [_read_row(row) for row in self._bounded(answer)])
        except SyntaxError as error:
            raise _malformed(error) from error
        except (OSError, RuntimeError, ValueError) as error:
            raise _not_evaluated(error) from error

    def masks_of(self, text: str) -> tuple[Mask, ...] | None:
        """What a change must match to change the answer to a query; None when any change may."""
        return sparql.masks_of(sparql.with_iris(text, _iri))

    def _bounded(self, rows: Iterable[_T]) -> Iterator[_T]:
        for number, row in enumerate(rows):
            if number == self.rows_max:
                raise KnowledgeError("K109", f"the result has over {number} rows", "ask for less, or use LIMIT")
            yield row

    def flush(self) -> None:
        """Waits until all changes are on the disk, so that they outlive a power cut."""
        self._store.flush()

    def dump(self, file: str | os.PathLike[str]) -> None:
        """Writes all triples to a file of N-Quads, which appears when it is whole."""
        unfinished = Path(file).with_name(Path(file).name + ".unfinished")
        self._store.dump(os.fspath(unfinished), ox.RdfFormat.N_QUADS)
        unfinished.replace(file)

    def restore(self, file: str | os.PathLike[str]) -> Delta:
        """Makes the graph what a dump says, in one step."""
        try:
            dumped = set(ox.parse(path=os.fspath(file), format=ox.RdfFormat.N_QUADS))
        except (OSError, SyntaxError) as error:
            raise KnowledgeError(
                "K108", f"the dump {os.fspath(file)!r} cannot be read: {error}", "give a file of N-Quads"
            ) from error
        named: dict[str, Uri] = {}
        new = _as_stored({_skolemised(quad, named) for quad in dumped})
        return self._commit(set(self._store) - new, new, named)

    def _commit(self, gone: set[ox.Quad], new: set[ox.Quad], named: dict[str, Uri]) -> Delta:
        """Makes a change that was worked out, as one transaction of the store."""
        store = self._store
        removed = [quad for quad in gone if quad in store]
        added = [quad for quad in new if quad not in store]
        delta = _delta(added, removed, named)
        self._know_kinds([delta])
        if removed and added:
            store.update(f"DELETE DATA {{{_data(removed)}}};INSERT DATA {{{_data(added)}}}")
        elif removed:
            store.update(f"DELETE DATA {{{_data(removed)}}}")
        elif len(added) == 1:
            store.add(added[0])
        elif added:
            store.extend(added)
        return delta

    def _know_kinds(self, deltas: Iterable[Delta]) -> None:
        added = (triple.object for delta in deltas for triple in delta.added)
        self._kinds.add({(found.datatype, found.language) for found in added if isinstance(found, Literal)})

    def _foresee(self, operations: list[sparql.Operation] | None) -> tuple[set[ox.Quad], set[ox.Quad]] | None:
        """What an update removes and inserts; None when an operation sees what one before it has changed."""
        gone: set[ox.Quad] = set()
        new: set[ox.Quad] = set()
        if operations is None:
            return None
        for operation in operations:
            if operation.where and _sees(operation, gone | new):
                return None
            deleted, inserted = self._evaluate(operation)
            gone, new = (gone | deleted) - inserted, (new - deleted) | inserted
        return gone, new

    def _evaluate(self, operation: sparql.Operation) -> tuple[set[ox.Quad], set[ox.Quad]]:
        prologue, deleted, inserted, where = operation
        if not where:
            return _data_quads(prologue, deleted), _data_quads(prologue, inserted)
        try:
            solutions = self._store.query(f"{prologue} SELECT * WHERE {where}")
            assert isinstance(solutions, ox.QuerySolutions)
            values = _values(solutions)
        except (OSError, RuntimeError, ValueError) as error:
            raise _not_evaluated(error) from error
        return _filled(prologue, deleted, values), _filled(prologue, inserted, values)

    def _update_and_compare(self, text: str, masks: tuple[Mask, ...] | None) -> Delta:
        """Compares what the masks match, or everything, before and after."""
        before, graphs = self._snapshot(masks), set(self._store.named_graphs())
        named: dict[str, Uri] = {}
        self._kinds.doubt()
        try:
            self._store.update(text)
        except (OSError, RuntimeError, ValueError) as error:
            self._kinds.confirm()
            raise _not_evaluated(error) from error
        after = self._snapshot(masks)
        added = self._name_blank_nodes(after - before, named)
        self._kinds.add(_kinds_of(added))
        self._kinds.confirm()
        self._know_graphs(graphs)
        return _delta(added, before - after, named)

    def _know_graphs(self, before: set[ox.NamedNode | ox.BlankNode]) -> None:
        """A named graph is known from its first triple on, for ever: so whoever makes all deltas knows the same."""
        after = set(self._store.named_graphs())
        for graph in after - before:
            if next(self._store.quads_for_pattern(None, None, None, graph), None) is None:
                self._store.remove_graph(graph)
        for graph in before - after:
            self._store.add_graph(graph)

    def _snapshot(self, masks: tuple[Mask, ...] | None) -> set[ox.Quad]:
        return set(self._store) if masks is None else {quad for mask in masks for quad in self._quads(mask)}

    def _name_blank_nodes(self, quads: Iterable[ox.Quad], named: dict[str, Uri]) -> set[ox.Quad]:
        """Gives stored blank nodes their names. A process that is killed meanwhile does it when it opens the graph."""
        skolemised = {quad: _skolemised(quad, named) for quad in quads}
        for quad, new in skolemised.items():
            if new != quad:
                self._store.add(new)
                self._store.remove(quad)
        return set(skolemised.values())

    def _quads(self, mask: Mask) -> Iterator[ox.Quad]:
        subject = None if mask.subject is None else _node(mask.subject.text)
        predicate = None if mask.predicate is None else _node(mask.predicate.text)
        if not isinstance(mask.object, Literal):
            named = None if mask.object is None else _node(mask.object.text)
            yield from self._store.quads_for_pattern(subject, predicate, named, _DEFAULT_GRAPH)
            return
        text = mask.object.text
        # The store finds literals with their datatype only: so it is asked once for each that there is.
        for kind in self._kinds:
            literal = _literal(text, *kind)
            for quad in self._store.quads_for_pattern(subject, predicate, literal, _DEFAULT_GRAPH):
                if isinstance(quad.object, ox.Literal) and quad.object.value == text:
                    yield quad

    def _learn(self) -> None:
        """Goes through a graph of which nothing is known."""
        self._name_blank_nodes(filter(_has_blank_node, self._store), {})
        self._kinds.add(_kinds_of(self._store))
        self._kinds.confirm()


def _open(directory: Path) -> ox.Store:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        store = ox.Store(directory / TRIPLES)
        shutil.rmtree(directory / COPIES, ignore_errors=True)  # of a process that was killed
        return store
    except OSError as error:
        raise KnowledgeError(
            "K107", f"the graph in {str(directory)!r} cannot be opened: {error}", "end the process that uses it"
        ) from error


def read_rdf_xml(text: str) -> list[NewTriple]:
    """The triples of an RDF/XML document, for `change`. Relative names in it are taken as they are."""
    try:
        parsed = ox.parse(without_entities(text), ox.RdfFormat.RDF_XML, base_iri=PRIVATE_SCHEME, lenient=True)
        return [_read_triple(quad, _text_in_document) for quad in parsed]
    except SyntaxError as error:
        raise KnowledgeError(
            "K106", f"the RDF/XML cannot be read: {error}", "send one well-formed rdf:RDF element"
        ) from error


def write_rdf_xml(triples: Iterable[NewTriple]) -> str:
    """An RDF/XML document, where names that are no IRIs stand as the store has them, and texts as they are: some have
    characters that XML cannot hold."""
    written = ox.serialize(map(_store_triple, triples), format=ox.RdfFormat.RDF_XML)
    assert written is not None, "it goes to no file"
    return written.decode()


def read_document(data: bytes, media_type: str) -> tuple[Triple | NewTriple, ...]:
    """The triples of a document in one of `DOCUMENTS`. Relative names in Turtle and RDF/XML are taken as they are; in
    the formats of dumps, which have none, names of the private scheme are what they stand for."""
    if media_type == RDF_XML:
        return tuple(read_rdf_xml(_decoded(data)))
    form, is_dump = DOCUMENT_FORMATS[media_type]
    named: dict[str, Uri] = {}
    try:
        parsed = ox.parse(data, form, base_iri=None if is_dump else PRIVATE_SCHEME, lenient=True)
        quads = [_skolemised(quad, named) for quad in parsed]
    except (SyntaxError, UnicodeDecodeError) as error:
        raise KnowledgeError(
            "K123", f"the document cannot be read: {error}", f"send well-formed {media_type}, in UTF-8"
        ) from error
    return tuple(_stored_triple(quad, text_of if is_dump else _text_in_document) for quad in quads)


# From clients to the store.


@lru_cache(IRIS_REMEMBERED)
def _node(text: str) -> ox.NamedNode:
    """The store alone decides what an IRI is, so that a name is stored in one form wherever it comes from."""
    if not text.startswith(PRIVATE_SCHEME):
        with contextlib.suppress(ValueError):  # half a character among them, which `private_iri` explains
            return ox.NamedNode(text)
    return ox.NamedNode(private_iri(text))


def _iri(text: str) -> str:
    return _node(text).value


def _literal(text: str, datatype: str, language: str) -> ox.Literal:
    try:
        if language:
            tag, _, direction = language.partition("--")
            return ox.Literal(text, language=tag, direction=ox.BaseDirection(direction) if direction else None)
        return ox.Literal(text, datatype=_node(datatype)) if datatype else ox.Literal(text)
    except UnicodeEncodeError as error:
        raise KnowledgeError("K101", f"{text[:60]!r} holds half a character", "send Unicode text as UTF-8") from error
    except ValueError as error:
        raise KnowledgeError("K123", f"{language[:60]!r} is no language", "write a tag such as en or de-AT") from error


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise KnowledgeError("K123", f"the document cannot be read: {error}", "send it in UTF-8") from error


def _store_triple(triple: NewTriple) -> ox.Triple:
    """For a document, where blank nodes stay blank."""
    predicate = _node(triple.predicate.text)
    if _LOCAL_NAME.search(predicate.value) is None:
        raise KnowledgeError(
            "K129", f"RDF/XML has no way to write the predicate {triple.predicate.text[:60]!r}", "accept text/turtle"
        )
    return ox.Triple(_store_term(triple.subject), predicate, _store_term(triple.object))


def _store_term(term: Term) -> Any:
    if isinstance(term, Blank):
        return ox.BlankNode(term.label)
    return _node(term.text) if isinstance(term, Uri) else _literal(term.text, term.datatype, term.language)


def _name(term: Uri | Blank, named: dict[str, Uri]) -> ox.NamedNode:
    if isinstance(term, Blank):
        if term.label not in named:
            named[term.label] = skolem()
        term = named[term.label]
    return _node(term.text)


def _new_quad(triple: NewTriple | Triple, named: dict[str, Uri]) -> ox.Quad:
    subject, predicate, found = _name(triple[0], named), _node(triple[1].text), triple[2]
    term = _literal(found.text, found.datatype, found.language) if isinstance(found, Literal) else _name(found, named)
    if isinstance(triple, Triple) and triple.graph:
        return ox.Quad(subject, predicate, term, _node(triple.graph))
    return ox.Quad(subject, predicate, term)  # to name the default graph would cost as much again


# From the store to clients.


def _text_in_document(iri: str) -> str:
    """Of a name that was relative, what was written: nothing of it is encoded yet."""
    return iri.removeprefix(PRIVATE_SCHEME)


def _read_literal(literal: ox.Literal) -> Literal:
    language = literal.language or ""
    if literal.direction is not None:
        language += f"--{literal.direction.value}"
    datatype = "" if language or literal.datatype.value == _STRING else text_of(literal.datatype.value)
    return Literal(literal.value, datatype, language)


def _read_term(term: _StoreTerm, text: Callable[[str], str] = text_of) -> Term:
    if isinstance(term, ox.NamedNode):
        return Uri(text(term.value))
    if isinstance(term, ox.Literal):
        return _read_literal(term)
    if isinstance(term, ox.BlankNode):
        return Blank(term.value)
    raise KnowledgeError("K105", f"{term} is a triple within a triple", "give the statement a URI of its own")


def _read_row(row: ox.QuerySolution) -> tuple[Term | None, ...]:
    return tuple(None if term is None else _read_term(term) for term in row)


def _read_triple(triple: ox.Triple | ox.Quad, text: Callable[[str], str] = text_of) -> NewTriple:
    subject, predicate = _read_term(triple.subject, text), _read_term(triple.predicate, text)
    assert not isinstance(subject, Literal)
    assert isinstance(predicate, Uri)
    return NewTriple(subject, predicate, _read_term(triple.object, text))


def _stored_triple(quad: ox.Quad, text: Callable[[str], str] = text_of) -> Triple:
    subject, found, graph = quad.subject, _read_term(quad.object, text), quad.graph_name
    assert isinstance(subject, ox.NamedNode), "blank nodes are named before they are stored"
    assert not isinstance(found, Blank), "blank nodes are named before they are stored"
    in_graph = text(graph.value) if isinstance(graph, ox.NamedNode) else ""
    return Triple(Uri(text(subject.value)), Uri(text(quad.predicate.value)), found, in_graph)


def _delta(added: Iterable[ox.Quad], removed: Iterable[ox.Quad], named: dict[str, Uri]) -> Delta:
    return Delta(tuple(map(_stored_triple, added)), tuple(map(_stored_triple, removed)), named)


# Quads.


def _kinds_of(quads: Iterable[ox.Quad]) -> set[Kind]:
    literals = (_read_literal(quad.object) for quad in quads if isinstance(quad.object, ox.Literal))
    return {(literal.datatype, literal.language) for literal in literals}


def _has_blank_node(quad: ox.Quad) -> bool:
    return any(isinstance(term, ox.BlankNode) for term in (quad.subject, quad.object, quad.graph_name))


def _skolemised(quad: ox.Quad, named: dict[str, Uri]) -> ox.Quad:
    subject, found, graph = quad.subject, quad.object, quad.graph_name
    if isinstance(found, ox.Triple) or isinstance(subject, ox.Triple):
        raise KnowledgeError("K105", f"{quad} holds a triple within a triple", "give the statement a URI of its own")
    return ox.Quad(
        _name(Blank(subject.value), named) if isinstance(subject, ox.BlankNode) else subject,
        quad.predicate,
        _name(Blank(found.value), named) if isinstance(found, ox.BlankNode) else found,
        _name(Blank(graph.value), named) if isinstance(graph, ox.BlankNode) else graph,
    )


def _as_stored(quads: set[ox.Quad]) -> set[ox.Quad]:
    """The store keeps one form of equal values: only then are sets of quads to be compared."""
    if all(not isinstance(quad.object, ox.Literal) or quad.object.datatype.value == _STRING for quad in quads):
        return quads
    store = ox.Store()
    store.extend(quads)
    return set(store)


def _data(quads: Iterable[ox.Quad]) -> str:
    """The quads as the data of an update."""
    return "".join(
        f"{quad.subject} {quad.predicate} {quad.object}."
        if quad.graph_name == _DEFAULT_GRAPH
        else f"GRAPH {quad.graph_name} {{{quad.subject} {quad.predicate} {quad.object}}}"
        for quad in quads
    )


def _data_quads(prologue: str, block: str) -> set[ox.Quad]:
    store = ox.Store()
    if block:
        store.update(f"{prologue} INSERT DATA {block}")
    return set(store)


def _values(solutions: ox.QuerySolutions) -> str:
    """Solutions as the VALUES of a query."""
    named: dict[str, Uri] = {}

    def write(term: _StoreTerm | None) -> str:
        return (
            "UNDEF"
            if term is None
            else str(_name(Blank(term.value), named) if isinstance(term, ox.BlankNode) else term)
        )

    names = " ".join(str(variable) for variable in solutions.variables)
    rows = "".join(f"({' '.join(map(write, solution))})" for solution in solutions)
    return f"VALUES ({names}) {{{rows}}}"


def _filled(prologue: str, template: str, values: str) -> set[ox.Quad]:
    """What a template becomes with solutions."""
    if not template:
        return set()
    constructed = ox.Store().query(f"{prologue} CONSTRUCT {template} WHERE {{{values}}}")
    assert isinstance(constructed, ox.QueryTriples)
    return _as_stored({ox.Quad(triple.subject, triple.predicate, triple.object) for triple in constructed})


def _sees(operation: sparql.Operation, changed: set[ox.Quad]) -> bool:
    """Whether the WHERE of an operation may find something else when these quads have changed."""
    masks = sparql.masks_of(f"{operation.prologue} SELECT * WHERE {operation.where}") if changed else ()
    if masks is None:
        return True
    named: dict[str, Uri] = {}
    triples = [_stored_triple(_skolemised(quad, named)) for quad in changed]
    return any(mask.matches(triple) for mask in masks for triple in triples)


def _template_masks(operations: list[sparql.Operation]) -> tuple[Mask, ...] | None:
    """What an update may change; None when it cannot be told. Objects are left out: a literal in a mask finds only the
    kinds that are known before."""
    found: set[Mask] = set()
    for operation in operations:
        for template in filter(None, (operation.deleted, operation.inserted)):
            masks = sparql.masks_of(f"{operation.prologue} SELECT * WHERE {template}")
            if masks is None:
                return None
            found |= {mask._replace(object=None) for mask in masks}
    return tuple(found)


def _check_update(text: str) -> None:
    """Finds errors of syntax, in a store without anything."""
    try:
        ox.Store().update(text)
    except SyntaxError as error:
        raise _malformed(error) from error
    except (OSError, RuntimeError, ValueError):
        pass  # such as a graph that is not in that store


def _malformed(error: SyntaxError) -> KnowledgeError:
    return KnowledgeError("K102", f"the SPARQL is malformed: {error}", "declare its prefixes, and mind the place named")


def _not_evaluated(error: Exception) -> KnowledgeError:
    return KnowledgeError("K104", f"the SPARQL cannot be evaluated: {error}", "change the query")
