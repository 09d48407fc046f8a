"""Predicts what a SPARQL update will remove and insert, before the graph commits it.

For each operation it queries the solutions of the WHERE once and fills the templates with them. An operation that reads
the changes of an earlier one in the same update cannot be predicted, nor can one that names graphs. For such updates,
`template_masks` returns masks of all triples that they may change.

What may go wrong: SPARQL that is malformed (K102), or cannot be evaluated (K104).
"""

from __future__ import annotations

import pyoxigraph as ox

from tidegate.errors import KnowledgeError, TidegateError
from tidegate.knowledge import sparql
from tidegate.knowledge.store_files import damaged, is_damage
from tidegate.knowledge.store_terms import StoreTerm, as_stored, name_blank, skolemise, stored_triple
from tidegate.knowledge.terms import Mask, Masks, Uri


def check_update(text: str) -> None:
    """Raises K102 for a syntax error, which it finds by executing the update on an empty store."""
    try:
        ox.Store().update(text)
    except SyntaxError as error:
        raise malformed(error) from error
    except (OSError, RuntimeError, ValueError):
        pass  # for example a graph that does not exist in the empty store


def predict(store: ox.Store, operations: list[sparql.Operation] | None) -> tuple[set[ox.Quad], set[ox.Quad]] | None:
    """Returns the quads that an update removes and inserts, or None if they cannot be predicted.

    They cannot when an operation reads what an earlier operation of the same update changes.
    """
    gone: set[ox.Quad] = set()
    new: set[ox.Quad] = set()
    if operations is None:
        return None
    for operation in operations:
        if operation.where and _may_be_affected(operation, gone | new):
            return None
        deleted, inserted = _evaluate(store, operation)
        # An operation deletes before it inserts, so a quad in both sets remains.
        gone, new = (gone | deleted) - inserted, (new - deleted) | inserted
    return gone, new


def template_masks(operations: list[sparql.Operation]) -> Masks:
    """Returns masks of all triples that an update may change.

    The masks leave the object open, because a literal in a mask finds only kinds that are known before the update.
    """
    found: set[Mask] = set()
    for operation in operations:
        for template in filter(None, (operation.deleted, operation.inserted)):
            masks = sparql.masks_of(f"{operation.prologue} SELECT * WHERE {template}")
            if masks.is_everything:
                return masks
            found |= {mask._replace(object=None) for mask in masks.patterns}
    return Masks(tuple(found))


def malformed(error: SyntaxError) -> KnowledgeError:
    return KnowledgeError(
        "K102", f"the SPARQL is malformed: {error}", "check the syntax at this position, and declare all prefixes"
    )


def not_evaluated(error: Exception) -> TidegateError:
    if is_damage(error):
        return damaged(error)
    return KnowledgeError("K104", f"the SPARQL cannot be evaluated: {error}", "rewrite the query")


def _evaluate(store: ox.Store, operation: sparql.Operation) -> tuple[set[ox.Quad], set[ox.Quad]]:
    prologue, deleted, inserted, where = operation
    if not where:
        return _data_quads(prologue, deleted), _data_quads(prologue, inserted)
    try:
        solutions = store.query(f"{prologue} SELECT * WHERE {where}")
        assert isinstance(solutions, ox.QuerySolutions)
        values = _values(solutions)
    except (OSError, RuntimeError, ValueError) as error:
        raise not_evaluated(error) from error
    return _filled(prologue, deleted, values), _filled(prologue, inserted, values)


def _may_be_affected(operation: sparql.Operation, changed: set[ox.Quad]) -> bool:
    """Reports whether these changed quads may affect the solutions of an operation's WHERE."""
    if not changed:
        return False
    masks = sparql.masks_of(f"{operation.prologue} SELECT * WHERE {operation.where}")
    if masks.is_everything:
        return True
    named: dict[str, Uri] = {}
    triples = [stored_triple(skolemise(quad, named)) for quad in changed]
    return any(map(masks.match, triples))


def _data_quads(prologue: str, block: str) -> set[ox.Quad]:
    store = ox.Store()
    if block:
        store.update(f"{prologue} INSERT DATA {block}")
    return set(store)


def _values(solutions: ox.QuerySolutions) -> str:
    """Writes solutions as the VALUES block of a query."""
    named: dict[str, Uri] = {}

    def write(term: StoreTerm | None) -> str:
        return "UNDEF" if term is None else str(name_blank(term, named))

    names = " ".join(str(variable) for variable in solutions.variables)
    rows = "".join(f"({' '.join(map(write, solution))})" for solution in solutions)
    return f"VALUES ({names}) {{{rows}}}"


def _filled(prologue: str, template: str, values: str) -> set[ox.Quad]:
    """Returns the quads of a template filled with solutions."""
    if not template:
        return set()
    constructed = ox.Store().query(f"{prologue} CONSTRUCT {template} WHERE {{{values}}}")
    assert isinstance(constructed, ox.QueryTriples)
    return as_stored({ox.Quad(triple.subject, triple.predicate, triple.object) for triple in constructed})
