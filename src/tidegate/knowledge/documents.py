"""Reads RDF documents that clients send, and writes RDF/XML, with the parsers and serializers of the store.

What may go wrong: malformed RDF/XML (K106); a malformed document of another format (K123); a predicate that RDF/XML
cannot write (K129).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import pyoxigraph as ox

from tidegate.errors import KnowledgeError
from tidegate.knowledge.rdf_xml import without_entities
from tidegate.knowledge.store_terms import read_triple, skolemise, store_node, store_term, stored_triple
from tidegate.knowledge.terms import PRIVATE_SCHEME, NewTriple, Triple, Uri, text_of

# media type -> (format, whether dumps may be written in this format)
DOCUMENT_FORMATS: Final = {
    "text/turtle": (ox.RdfFormat.TURTLE, False),
    "application/trig": (ox.RdfFormat.TRIG, False),
    "application/n-triples": (ox.RdfFormat.N_TRIPLES, True),
    "application/n-quads": (ox.RdfFormat.N_QUADS, True),
}
RDF_XML: Final = "application/rdf+xml"
DOCUMENTS: Final = (*DOCUMENT_FORMATS, RDF_XML)

# RDF/XML writes a predicate as an element, so it must end in a valid element name. XML allows more characters of other
# scripts than this.
_LETTER: Final = r"A-Za-z_\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02ff\u0370-\u037d\u037f-\u1fff\u3001-\ud7ff"
_LOCAL_NAME: Final = re.compile(f"[{_LETTER}][{_LETTER}0-9.-]*$")


def read_document(data: bytes, media_type: str) -> tuple[Triple | NewTriple, ...]:
    """Returns the triples of a document in one of the formats of `DOCUMENTS`.

    Relative names in Turtle, TriG and RDF/XML are kept as written. The formats of dumps have no relative names; there,
    names of the private scheme are decoded to the texts that they stand for.
    """
    if media_type == RDF_XML:
        return tuple(read_rdf_xml(_decoded(data)))
    form, is_dump = DOCUMENT_FORMATS[media_type]
    named: dict[str, Uri] = {}
    try:
        parsed = ox.parse(data, form, base_iri=None if is_dump else PRIVATE_SCHEME, lenient=True)
        quads = [skolemise(quad, named) for quad in parsed]
    except (SyntaxError, UnicodeDecodeError) as error:
        raise KnowledgeError(
            "K123", f"the document cannot be read: {error}", f"send well-formed {media_type}, in UTF-8"
        ) from error
    return tuple(stored_triple(quad, text_of if is_dump else _text_in_document) for quad in quads)


def read_rdf_xml(text: str) -> list[NewTriple]:
    """Returns the triples of an RDF/XML document, for `change`. Relative names are kept as written."""
    try:
        parsed = ox.parse(without_entities(text), ox.RdfFormat.RDF_XML, base_iri=PRIVATE_SCHEME, lenient=True)
        return [read_triple(quad, _text_in_document) for quad in parsed]
    except SyntaxError as error:
        raise KnowledgeError(
            "K106", f"the RDF/XML cannot be read: {error}", "send one well-formed rdf:RDF element"
        ) from error


def write_rdf_xml(triples: Iterable[NewTriple]) -> str:
    """Returns an RDF/XML document. Names that are not IRIs appear in the form that the store uses. Literals are
    written unchanged, even with characters that XML does not allow."""
    written = ox.serialize(map(_store_triple, triples), format=ox.RdfFormat.RDF_XML)
    assert written is not None, "without a file, the serializer returns bytes"
    return written.decode()


def _store_triple(triple: NewTriple) -> ox.Triple:
    """Returns a triple for a document, in which blank nodes stay blank nodes."""
    predicate = store_node(triple.predicate.text)
    if _LOCAL_NAME.search(predicate.value) is None:
        raise KnowledgeError(
            "K129",
            f"RDF/XML cannot express the predicate {triple.predicate.text[:60]!r}",
            "request the result as text/turtle",
        )
    return ox.Triple(store_term(triple.subject), predicate, store_term(triple.object))


def _text_in_document(iri: str) -> str:
    """Returns a relative name as written in the document. Unlike a stored name, it is not percent-encoded yet."""
    return iri.removeprefix(PRIVATE_SCHEME)


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise KnowledgeError("K123", f"the document cannot be read: {error}", "send it in UTF-8") from error
