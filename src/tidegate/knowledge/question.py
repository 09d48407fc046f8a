"""A question to the graph, asked once or kept open: masks, SPARQL, or WQL; and its result as rows.

Whatever was asked, a result is a multiset of rows, so that what has changed between two results is rows that came and
rows that went. Blank nodes of a row, which SPARQL makes anew every time, are numbered within it: the same row is equal
to itself the next time.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from tidegate.knowledge.graph import Graph, NewTriple, Solutions
from tidegate.knowledge.terms import Blank, Literal, Mask, Term, Triple, Uri
from tidegate.knowledge.wql import WqlQuery, evaluate


class SparqlQuery(msgspec.Struct, frozen=True):
    text: str


Question: TypeAlias = tuple[Mask, ...] | SparqlQuery | WqlQuery
Row: TypeAlias = Triple | NewTriple | tuple[Term | None, ...] | Uri | Literal | bool


class Shape(StrEnum):
    """What the rows of a result are: triples, solutions with a term for each variable, nodes, or one yes or no."""

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
        """Of the terms in a row, where it has several."""
        return ("s", "p", "o") if self.shape is Shape.TRIPLES else self.variables

    def with_rows(self, rows: list[Row]) -> Result:
        """Rows of the same shape."""
        return Result(self.shape, rows, self.variables)


def ask(graph: Graph, question: Question) -> Result:
    if isinstance(question, tuple):
        return Result(Shape.TRIPLES, list(graph.triples(question)))
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


def masks_of(graph: Graph, question: Question) -> tuple[Mask, ...] | None:
    """What a change must match to change the result; None when any change may."""
    if isinstance(question, tuple):
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
