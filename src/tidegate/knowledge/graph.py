"""The graph: the triples, in memory or in a directory. Its store is pyoxigraph's.

A change is atomic and returns its exact delta: the triples that it actually added and removed. The store does not
report deltas, so the graph computes a delta before it commits the change. Masks and triples are looked up, and SPARQL
updates are predicted (`update_prediction`). The resulting data is committed in one transaction.

Some updates cannot be predicted. The graph then compares all triples that the templates may change before and after the
update. In the worst case it compares the whole graph.

Blank nodes become URIs when they are inserted. Literals with a datatype are stored by value, in one canonical form (01
becomes 1), and a delta contains that form. In a directory, a change is in the write-ahead log of the store when
`change` returns: killing the process loses nothing. A power cut loses nothing that was changed before the last `sync`.
One thread makes changes. Other threads may query meanwhile, and see the graph either before or after a change.

When the store cannot be written, `failure` holds the reason. Changes are refused until `reopen` succeeds, and queries
still work. A store on a full disk is opened read-only, with such a failure.

What may go wrong: SPARQL that is malformed (K102), or cannot be evaluated (K104); triples within triples (K105); a
directory that cannot be opened (K107) or a dump that cannot be read (K108); a result of more than `rows_max` rows
(K109); a damaged file (K130); a disk that cannot store a change (K131), or does not confirm one (K132).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

import msgspec
import pyoxigraph as ox

from tidegate.errors import KnowledgeError, TidegateError
from tidegate.knowledge import sparql
from tidegate.knowledge.literal_kinds import LiteralKinds
from tidegate.knowledge.store_files import (
    WriteAheadLog,
    damaged,
    is_damage,
    is_disk_full,
    not_opened,
    not_synced,
    unwritable,
)
from tidegate.knowledge.store_opening import COPIES, DUMP, GRAPHS, KINDS, TRIPLES, ClosedStore, open_store
from tidegate.knowledge.store_terms import (
    DEFAULT_GRAPH,
    as_stored,
    has_blank_node,
    kinds_of,
    read_row,
    read_triple,
    skolemise,
    store_iri,
    store_literal,
    store_node,
    store_quad,
    stored_triple,
)
from tidegate.knowledge.terms import ANY_CHANGE, Literal, Mask, Masks, NewTriple, Term, Triple, Uri
from tidegate.knowledge.update_prediction import check_update, malformed, not_evaluated, predict, template_masks

ROWS_MAX: Final = 100_000

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _without_traceback(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a method so that its errors hold no references to results of the store.

    The thread that created a store result must also release it. A traceback keeps the local variables of its frames
    alive, so an error that is passed to another thread would take store results with it.
    """

    @wraps(method)
    def wrapper(*arguments: _P.args, **named: _P.kwargs) -> _T:
        try:
            return method(*arguments, **named)
        except TidegateError as error:
            raise error.with_traceback(None) from None

    return wrapper


class Delta(msgspec.Struct, frozen=True):
    """The triples that a change actually added and removed. `named` maps each blank node's label to its new URI."""

    added: tuple[Triple, ...] = ()
    removed: tuple[Triple, ...] = ()
    named: dict[str, Uri] = {}

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


class Solutions(msgspec.Struct, frozen=True):
    """The answer to a SELECT. A row has a term, or None, for each variable."""

    variables: tuple[str, ...]
    rows: list[tuple[Term | None, ...]]


Answer: TypeAlias = Solutions | bool | list[NewTriple]


class Graph:
    """All triples of a knowledge base: `Graph()` in memory, `Graph(directory)` on disk.

    Only one process at a time may open a directory.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, rows_max: int = ROWS_MAX) -> None:
        self.rows_max = rows_max
        self._directory = None if directory is None else Path(directory)
        self._kinds = LiteralKinds(None if self._directory is None else self._directory / KINDS)
        self._log = None if self._directory is None else WriteAheadLog(self._directory / TRIPLES)
        self._opening = threading.Lock()  # held while the store is copied or reopened
        self._is_unsynced = False  # a sync failed, but the store itself is intact
        self.failures = 0  # changes and syncs that failed
        self.damages = 0  # reads that found a damaged file
        self._store: Any = ox.Store()
        self.failure: TidegateError | None = None
        if self._directory is not None:
            self._store, self.failure = open_store(self._directory)
        try:
            if not self._kinds.load():
                self._scan()
        except (OSError, RuntimeError) as error:
            raise not_opened(Path(directory or ""), error) from error

    def __len__(self) -> int:
        with self._reading():
            return len(self._store)

    @property
    def is_on_disk(self) -> bool:
        return self._directory is not None

    def copy(self) -> Path:
        """Copies the graph into a new directory and returns its path.

        Another process opens the copy with `open_copy`, and removes it. Any thread may call this method. The copy
        contains all changes made before the call, and possibly some made during it. A graph in memory, or one whose
        disk is full, is copied as a dump in the directory for temporary files.
        """
        with self._opening:
            if self._directory is not None and self.failure is None:
                try:
                    return self._copy_files(self._directory / COPIES / str(uuid.uuid4()))
                except OSError as error:
                    if not is_disk_full(error):
                        raise
            return self._copy_dump(Path(tempfile.mkdtemp(prefix="tidegate-graph-")))

    def _copy_files(self, copy: Path) -> Path:
        copy.mkdir(parents=True)
        try:
            self._store.backup(copy / TRIPLES)  # cheap: hard links to the store's files
            # Written last: changes made meanwhile may add kinds, and the copy must know at least its own.
            self._kinds.write(copy / KINDS)
        except OSError:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        return copy

    def _copy_dump(self, copy: Path) -> Path:
        try:
            # A dump omits named graphs without triples, so the names of all graphs are stored beside it.
            graphs = [graph.value for graph in self._store.named_graphs()]
            (copy / GRAPHS).write_bytes(msgspec.json.encode(graphs))
            self._store.dump(os.fspath(copy / DUMP), ox.RdfFormat.N_QUADS)
            self._kinds.write(copy / KINDS)
        except OSError:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        return copy

    @classmethod
    def open_copy(cls, copy: Path) -> Graph:
        """Opens a copy that `copy` made. A dump is read into memory and then deleted."""
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
        """Removes all triples that match a mask, then inserts the new ones, as one atomic change."""
        with self._reading():
            gone = {quad for mask in removed for quad in self._quads(mask)}
        named: dict[str, Uri] = {}
        new = as_stored({store_quad(triple, named) for triple in inserted})
        return self._commit(gone - new, new, named)

    def insert_together(self, inserts: Iterable[Iterable[NewTriple]]) -> list[Delta]:
        """Makes several inserts in one transaction of the store, which costs little more than a single insert.

        Returns the delta of each insert, as if they had been made one after another. If one insert is refused, none is
        made.
        """
        added: set[ox.Quad] = set()
        deltas = []
        with self._writing():
            for inserted in inserts:
                named: dict[str, Uri] = {}
                new = as_stored({store_quad(triple, named) for triple in inserted})
                new = {quad for quad in new if quad not in added and quad not in self._store}
                added |= new
                deltas.append(_delta(new, (), named))
            self._add_kinds(deltas)
            self._store.extend(added)
        return deltas

    def apply(self, delta: Delta) -> Delta:
        """Applies the delta of another graph. Triples that are already added or removed are skipped."""
        gone, new = ({store_quad(triple, {}) for triple in triples} for triples in (delta.removed, delta.added))
        return self._commit(gone, new, delta.named)

    @_without_traceback
    def update(self, text: str) -> Delta:
        """Executes a SPARQL update and returns its delta."""
        text = sparql.with_iris(text, store_iri)
        if not sparql.is_update(text):
            raise KnowledgeError("K102", "a query was sent as an update", "send it as a query")
        check_update(text)
        operations = sparql.operations_of(text)
        predicted = predict(self._store, operations)
        if predicted is None:
            return self._update_and_compare(text, ANY_CHANGE if operations is None else template_masks(operations))
        named: dict[str, Uri] = {}
        gone, new = predicted
        return self._commit(gone, {skolemise(quad, named) for quad in new}, named)

    @_without_traceback
    def triples(self, masks: Iterable[Mask]) -> list[Triple]:
        """Returns each triple that matches at least one mask, once."""
        masks = tuple(masks)
        with self._reading():
            found = (quad for mask in masks for quad in self._quads(mask))
            distinct = found if len(masks) == 1 else dict.fromkeys(self._bounded(found))
            return [stored_triple(quad) for quad in self._bounded(distinct)]

    @_without_traceback
    def query(self, text: str) -> Answer:
        """Evaluates a SPARQL query. Returns solutions, a truth value, or the triples of a CONSTRUCT or DESCRIBE."""
        text = sparql.with_iris(text, store_iri)
        try:
            answer = self._store.query(text)
            if isinstance(answer, ox.QueryBoolean):
                return bool(answer)
            if isinstance(answer, ox.QueryTriples):
                return [read_triple(triple) for triple in self._bounded(answer)]
            variables = tuple(variable.value for variable in answer.variables)
            return Solutions(variables, [read_row(row) for row in self._bounded(answer)])
        except SyntaxError as error:
            raise malformed(error) from error
        except (OSError, RuntimeError, ValueError) as error:
            raise not_evaluated(error) from error

    def masks_of(self, text: str) -> Masks:
        """Returns the masks of a query: only a change that matches one can change the answer."""
        return sparql.masks_of(sparql.with_iris(text, store_iri))

    def _bounded(self, rows: Iterable[_T]) -> Iterator[_T]:
        for number, row in enumerate(rows):
            if number == self.rows_max:
                raise KnowledgeError("K109", f"the result has over {number} rows", "narrow the query, or use LIMIT")
            yield row

    def sync(self) -> None:
        """Waits until the disk has all changes made so far, so that they survive a power cut. Any thread may call
        this method."""
        if self._log is None:
            return
        try:
            self._log.sync()
        except OSError as error:
            # Changes of a failed sync may be lost even if a later sync succeeds. So further changes are refused until
            # `reopen` has rewritten all tables.
            self.failures += 1
            self._is_unsynced = self.failure is None
            self.failure = unwritable(error)
            raise not_synced(error) from None

    def flush(self) -> None:
        """Rewrites the tables of the store, so that all changes are on the disk."""
        try:
            self._store.flush()
        except (OSError, RuntimeError) as error:
            self.failure = self.failure or unwritable(error)
            raise self.failure from None

    def reopen(self) -> None:
        """Reopens a store that could not be written, if its disk has room.

        On success `failure` is None. This method blocks for as long as the store takes to read its log.
        """
        if self._directory is None or self._log is None or not self._log.has_room():
            return
        if not self._opening.acquire(blocking=False):
            return  # a copy is in progress; the caller tries again later
        try:
            if not self._is_unsynced:
                self._store = ClosedStore()  # the store closes with its last reference, and must before it is reopened
                self._store, self.failure = open_store(self._directory)
            if self.failure is None or self._is_unsynced:
                self._store.flush()
                self.failure, self._is_unsynced = None, False
        except (OSError, RuntimeError, KnowledgeError) as error:
            self._is_unsynced = False
            self.failure = unwritable(error)
        finally:
            self._opening.release()

    def dump(self, file: str | os.PathLike[str]) -> None:
        """Writes all triples to a file of N-Quads. The file appears only once it is complete."""
        unfinished = Path(file).with_name(Path(file).name + ".unfinished")
        self._store.dump(os.fspath(unfinished), ox.RdfFormat.N_QUADS)
        unfinished.replace(file)

    def restore(self, file: str | os.PathLike[str]) -> Delta:
        """Replaces the content of the graph with a dump, as one atomic change."""
        try:
            dumped = set(ox.parse(path=os.fspath(file), format=ox.RdfFormat.N_QUADS))
        except (OSError, SyntaxError) as error:
            raise KnowledgeError(
                "K108", f"the dump {os.fspath(file)!r} cannot be read: {error}", "name a file of N-Quads"
            ) from error
        named: dict[str, Uri] = {}
        new = as_stored({skolemise(quad, named) for quad in dumped})
        return self._commit(set(self._store) - new, new, named)

    def _commit(self, gone: set[ox.Quad], new: set[ox.Quad], named: dict[str, Uri]) -> Delta:
        """Commits a computed change as one transaction of the store."""
        store = self._store
        with self._writing():
            removed = [quad for quad in gone if quad in store]
            added = [quad for quad in new if quad not in store]
            delta = _delta(added, removed, named)
            self._add_kinds([delta])
            # Each branch is one transaction. A SPARQL update is the only one that can both remove and add.
            if removed and added:
                store.update(f"DELETE DATA {{{_data(removed)}}};INSERT DATA {{{_data(added)}}}")
            elif removed:
                store.update(f"DELETE DATA {{{_data(removed)}}}")
            elif len(added) == 1:
                store.add(added[0])
            elif added:
                store.extend(added)
        return delta

    def check_writable(self) -> None:
        """Raises `failure` if the store cannot be written."""
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuses changes after a failure. An error of the store inside the block becomes the new failure, because the
        store refuses all changes until it is reopened."""
        self.check_writable()
        try:
            yield
        except (OSError, RuntimeError) as error:
            if is_damage(error):
                self.damages += 1
                raise damaged(error) from None
            self.failures += 1
            self._is_unsynced = False
            self.failure = unwritable(error)
            raise self.failure from None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.damages += 1
            raise damaged(error) from None

    def _add_kinds(self, deltas: Iterable[Delta]) -> None:
        added = (triple.object for delta in deltas for triple in delta.added)
        self._kinds.add({(found.datatype, found.language) for found in added if isinstance(found, Literal)})

    def _update_and_compare(self, text: str, masks: Masks) -> Delta:
        """Executes an update, and computes its delta by comparing all matching triples before and after."""
        named: dict[str, Uri] = {}
        with self._writing():
            before, graphs = self._snapshot(masks), set(self._store.named_graphs())
            self._kinds.invalidate()
            try:
                self._store.update(text)
            except (RuntimeError, ValueError) as error:
                self._kinds.save()
                raise not_evaluated(error) from error
            after = self._snapshot(masks)
            added = self._name_blank_nodes(after - before, named)
            self._kinds.add(kinds_of(added))
            self._kinds.save()
            self._restore_graphs(graphs)
        return _delta(added, before - after, named)

    def _restore_graphs(self, before: set[ox.NamedNode | ox.BlankNode]) -> None:
        """Restores the rule for named graphs: a graph exists from its first triple on, even after it becomes empty.

        A copy that applies all deltas follows the same rule, so that both know the same graphs.
        """
        after = set(self._store.named_graphs())
        for graph in after - before:
            if next(self._store.quads_for_pattern(None, None, None, graph), None) is None:
                self._store.remove_graph(graph)
        for graph in before - after:
            self._store.add_graph(graph)

    def _snapshot(self, masks: Masks) -> set[ox.Quad]:
        if masks.is_everything:
            return set(self._store)
        return {quad for mask in masks.patterns for quad in self._quads(mask)}

    def _name_blank_nodes(self, quads: Iterable[ox.Quad], named: dict[str, Uri]) -> set[ox.Quad]:
        """Replaces stored blank nodes by URIs. If the process is killed meanwhile, opening the graph completes it."""
        skolemised = {quad: skolemise(quad, named) for quad in quads}
        for quad, new in skolemised.items():
            if new != quad:
                self._store.add(new)
                self._store.remove(quad)
        return set(skolemised.values())

    def _quads(self, mask: Mask) -> Iterator[ox.Quad]:
        subject = None if mask.subject is None else store_node(mask.subject.text)
        predicate = None if mask.predicate is None else store_node(mask.predicate.text)
        if not isinstance(mask.object, Literal):
            named = None if mask.object is None else store_node(mask.object.text)
            yield from self._store.quads_for_pattern(subject, predicate, named, DEFAULT_GRAPH)
            return
        text = mask.object.text
        # The store finds literals only together with their datatype or language, so it is queried once per known kind.
        for kind in self._kinds:
            literal = store_literal(text, *kind)
            for quad in self._store.quads_for_pattern(subject, predicate, literal, DEFAULT_GRAPH):
                if isinstance(quad.object, ox.Literal) and quad.object.value == text:
                    yield quad

    def _scan(self) -> None:
        """Scans the whole graph for blank nodes and kinds of literals, when the file of kinds is missing."""
        self._name_blank_nodes(filter(has_blank_node, self._store), {})
        self._kinds.add(kinds_of(self._store))
        self._kinds.save()


def _delta(added: Iterable[ox.Quad], removed: Iterable[ox.Quad], named: dict[str, Uri]) -> Delta:
    return Delta(tuple(map(stored_triple, added)), tuple(map(stored_triple, removed)), named)


def _data(quads: Iterable[ox.Quad]) -> str:
    """Writes the quads as the data block of a SPARQL update."""
    return "".join(
        f"{quad.subject} {quad.predicate} {quad.object}."
        if quad.graph_name == DEFAULT_GRAPH
        else f"GRAPH {quad.graph_name} {{{quad.subject} {quad.predicate} {quad.object}}}"
        for quad in quads
    )
