"""Writes results in the formats of the W3C: JSON, XML, CSV and TSV for solutions and truth values, N-Triples and
RDF/XML for triples.

A URI is written as its client wrote it, even if it is not an absolute IRI. RDF/XML is the exception: it uses the
store's form. N-Triples are valid Turtle, so one writer serves both media types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from tidegate.knowledge import documents
from tidegate.knowledge.question import Result, Row, Shape
from tidegate.knowledge.ssap import NOT_IN_XML, write_result
from tidegate.knowledge.terms import Blank, NewTriple, Term, Uri, write_term

_QUOTED_IN_CSV: Final = re.compile('[",\r\n]')


def json_row(result: Result, row: Row) -> Any:
    """Returns one row: terms by variable, a triple as if it were the solution of ?s ?p ?o, or a truth value."""
    if isinstance(row, bool):
        return row
    assert isinstance(row, tuple), "WQL has no place in HTTP"
    return {name: _json_term(term) for name, term in zip(result.names, row, strict=False) if term is not None}


def write_json(result: Result) -> bytes:
    if result.shape is Shape.TRUTH:
        return msgspec.json.encode({"head": {}, "boolean": result.rows[0]})
    bindings = [json_row(result, row) for row in result.rows]
    return msgspec.json.encode({"head": {"vars": result.variables}, "results": {"bindings": bindings}})


def write_xml(result: Result) -> bytes:
    return b'<?xml version="1.0"?>\n' + write_result(result).encode("ascii")


def write_csv(result: Result) -> bytes:
    """Writes values without their types, as the standard requires. A truth value is one word."""
    return _lines(result, "\r\n", ",", str, _csv_term)


def write_tsv(result: Result) -> bytes:
    """Writes terms as in Turtle."""
    return _lines(result, "\n", "\t", "?{}".format, lambda term: "" if term is None else write_term(term))


def write_n_triples(result: Result) -> bytes:
    rows: Iterable[Any] = result.rows
    return "".join(f"{' '.join(map(write_term, row[:3]))} .\n" for row in rows).encode()


def write_rdf_xml(result: Result) -> bytes:
    """Writes RDF/XML. Characters that XML does not allow become the replacement character."""
    rows: Iterable[Any] = result.rows
    text = NOT_IN_XML.sub("\ufffd", documents.write_rdf_xml(NewTriple(*row[:3]) for row in rows))
    return text.replace("\r", "&#13;").encode()


# The writers of results by media type. The first is the default for clients without a preference.
SOLUTION_FORMATS: Final[dict[str, Callable[[Result], bytes]]] = {
    "application/sparql-results+json": write_json,
    "application/json": write_json,
    "application/sparql-results+xml": write_xml,
    "application/xml": write_xml,
    "text/csv": write_csv,
    "text/tab-separated-values": write_tsv,
}
TRIPLE_FORMATS: Final[dict[str, Callable[[Result], bytes]]] = {
    "text/turtle": write_n_triples,
    "application/n-triples": write_n_triples,
    documents.RDF_XML: write_rdf_xml,
}


def formats_of(result: Result) -> dict[str, Callable[[Result], bytes]]:
    return TRIPLE_FORMATS if result.shape is Shape.TRIPLES else SOLUTION_FORMATS


def _json_term(term: Any) -> dict[str, str]:
    if isinstance(term, Uri):
        return {"type": "uri", "value": term.text}
    if isinstance(term, Blank):
        return {"type": "bnode", "value": term.label}
    shown = {"type": "literal", "value": term.text}
    if term.language:
        return shown | {"xml:lang": term.language}
    return shown | {"datatype": term.datatype} if term.datatype else shown


def _lines(
    result: Result,
    newline: str,
    comma: str,
    write_variable: Callable[[str], str],
    write: Callable[[Term | None], str],
) -> bytes:
    if result.shape is Shape.TRUTH:
        return f"{str(result.rows[0]).lower()}{newline}".encode()
    rows: Iterable[Any] = result.rows
    head = comma.join(map(write_variable, result.variables))
    return newline.join([head, *(comma.join(map(write, row)) for row in rows), ""]).encode()


def _csv_term(term: Term | None) -> str:
    if term is None:
        return ""
    text = f"_:{term.label}" if isinstance(term, Blank) else term.text
    return '"' + text.replace('"', '""') + '"' if _QUOTED_IN_CSV.search(text) else text
