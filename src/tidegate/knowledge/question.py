"""A question to the graph, asked once or kept open: masks, SPARQL, or WQL; and its result as rows.

Every result is a multiset of rows, so the difference between two results is a set of added and a set of removed rows.
SPARQL creates new blank nodes in each evaluation. They are therefore numbered within their row, so that the same row
compares equal the next time.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from tidegate.knowledge.graph import Graph, Solutions
from tidegate.knowledge.terms import Blank, Literal, Masks, NewTriple, Term, Triple, Uri
from tidegate.knowledge.wql import WqlQuery, evaluate


class SparqlQuery(msgspec.Struct, frozen=True):
    text: str


Question: TypeAlias = Masks | SparqlQuery | WqlQuery
Row: TypeAlias = Triple | NewTriple | tuple[Term | None, ...] | Uri | Literal | bool


class Shape(StrEnum):
    """The type of a result's rows: triples, solutions with a term for each variable, nodes, or a single truth value."""

    TRIPLES = "triples"
    SOLUTIONS = "solutions"
    TRUTH = "truth"
    NODES = "nodes"
    WQL_TRUTH = "wql-truth"


class Result(msgspec.Struct, frozen=True):
    shape: Shape
    rows: list[Row]
    variables: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the terms in a row, if rows have several."""
        return ("s", "p", "o") if self.shape is Shape.TRIPLES else self.variables

    def with_rows(self, rows: list[Row]) -> Result:
        """Returns a result of the same shape with other rows."""
        return Result(self.shape, rows, self.variables)


def find(graph: Graph, masks: Masks) -> Result:
    """Returns the triples that any of the masks matches."""
    return Result(Shape.TRIPLES, list(graph.triples(masks.patterns)))


def ask(graph: Graph, question: Question) -> Result:
    if isinstance(question, Masks):
        return find(graph, question)
    if isinstance(question, WqlQuery):
        reached = evaluate(question, graph.triples, graph.rows_max)
        if isinstance(reached, bool):
            return Result(Shape.WQL_TRUTH, [reached])
        return Result(Shape.NODES, list(reached))
    answer = graph.query(question.text)
    if isinstance(answer, bool):
        return Result(Shape.TRUTH, [answer])
    if isinstance(answer, Solutions):
        return Result(Shape.SOLUTIONS, [_numbered(row) for row in answer.rows], answer.variables)
    return Result(Shape.TRIPLES, list(answer))


def masks_of(graph: Graph, question: Question) -> Masks:
    """Returns the masks of a question: only a change that matches one can change its result."""
    if isinstance(question, Masks):
        return question
    if isinstance(question, WqlQuery):
        return question.masks
    return graph.masks_of(question.text)


def _numbered(row: tuple[Term | None, ...]) -> tuple[Term | None, ...]:
    if not any(isinstance(term, Blank) for term in row):
        return row
    numbers: dict[Blank, Blank] = {}
    return tuple(
        numbers.setdefault(term, Blank(f"b{len(numbers)}")) if isinstance(term, Blank) else term for term in row
    )
