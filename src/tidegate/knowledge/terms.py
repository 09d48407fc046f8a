"""The terms of triples: URIs, literals and blank nodes, as clients write them.

A URI is any text. Smart-M3 clients send `Agent_X`, `rdf:type` or addresses with spaces, and must get back exactly what
they sent. The store, however, accepts only absolute IRIs. A text that is not an IRI is therefore stored under a private
scheme, with the characters that IRIs do not allow written as %HH. `private_iri` and `text_of` are inverse functions.
The encoding works character by character, so that joining the IRIs of a SPARQL prefix and a local name gives the IRI of
the joined text. Literals are not encoded. The graph has no blank nodes: each becomes a unique URI, a `skolem`.

What may go wrong: a lone surrogate, which UTF-8 cannot encode (K101).
"""

from __future__ import annotations

import re
import uuid
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

import msgspec

from tidegate.errors import KnowledgeError

PRIVATE_SCHEME: Final = "tidegate-text:"
RDF: Final = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
RDFS: Final = "http://www.w3.org/2000/01/rdf-schema#"

# All characters that the path of an IRI does not allow (RFC 3987). A leading slash could start an authority.
_NOT_IN_PATH: Final = re.compile(
    r"^/|[^A-Za-z0-9\-._~!$&'()*+,;=:@/"
    "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14))
    + "\U000e1000-\U000efffd]"
)
_NOT_IN_IRI: Final = re.compile(r'[\x00-\x20<>"{}|^`\\]')
_ESCAPED: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


class Uri(msgspec.Struct, frozen=True, gc=False, tag="u", array_like=True):
    """A resource, named by the text that a client uses for it."""

    text: str


class Literal(msgspec.Struct, frozen=True, gc=False, tag="l", array_like=True):
    """A value: its lexical form, and its datatype or language if it has one. A plain string has neither."""

    text: str
    datatype: str = ""
    language: str = ""


class Blank(msgspec.Struct, frozen=True, gc=False, tag="b", array_like=True):
    """A blank node of a result (from BNODE() or the template of a CONSTRUCT) or of an insert. The graph has none."""

    label: str


Term: TypeAlias = Uri | Literal | Blank


class Triple(NamedTuple):
    """A fact. `graph` is the text of its named graph; the default graph has none."""

    subject: Uri
    predicate: Uri
    object: Uri | Literal
    graph: str = ""


class NewTriple(NamedTuple):
    """A triple to insert. Its subject and object may be blank nodes, for resources without a name."""

    subject: Uri | Blank
    predicate: Uri
    object: Term


class Mask(NamedTuple):
    """A pattern for triples of the default graph. None is a wildcard. A literal matches all literals with its text."""

    subject: Uri | None = None
    predicate: Uri | None = None
    object: Uri | Literal | None = None

    def matches(self, triple: Triple) -> bool:
        if triple.graph or self.subject not in (None, triple.subject) or self.predicate not in (None, triple.predicate):
            return False
        wanted, found = self.object, triple.object
        if isinstance(wanted, Literal) and isinstance(found, Literal):
            return wanted.text == found.text
        return wanted is None or wanted == found


class Masks(msgspec.Struct, frozen=True):
    """Patterns for triples. A triple matches them if it matches any one of them.

    As a question, they ask for all triples that match. Other questions have masks too: only a change that matches can
    change the result. `ANY_CHANGE` matches every change, also of named graphs.
    """

    patterns: tuple[Mask, ...] = ()
    is_everything: bool = False

    def match(self, triple: Triple) -> bool:
        return self.is_everything or any(mask.matches(triple) for mask in self.patterns)


ANY_CHANGE: Final = Masks(is_everything=True)


def private_iri(text: str) -> str:
    """Returns an IRI for a text that is not an IRI, or that starts with the private scheme itself."""
    try:
        return PRIVATE_SCHEME + _NOT_IN_PATH.sub(lambda found: quote(found[0], safe=""), text)
    except UnicodeEncodeError as error:
        raise KnowledgeError("K101", f"{text[:60]!r} contains half a character", "send valid UTF-8 text") from error


def text_of(iri: str) -> str:
    """Returns the client's name for a resource, given the IRI in the store."""
    return unquote(iri[len(PRIVATE_SCHEME) :]) if iri.startswith(PRIVATE_SCHEME) else iri


def skolem() -> Uri:
    """Returns a unique URI for a blank node."""
    return Uri(uuid.uuid4().urn)


def write_term(term: Term) -> str:
    """Writes a term as in N-Triples, Turtle and SPARQL."""
    if isinstance(term, Uri):
        return f"<{_NOT_IN_IRI.sub(_escape_in_iri, term.text)}>"
    if isinstance(term, Blank):
        return f"_:{term.label}"
    text = f'"{term.text.translate(_ESCAPED)}"'
    if term.language:
        return f"{text}@{term.language}"
    return f"{text}^^{write_term(Uri(term.datatype))}" if term.datatype else text


def _escape_in_iri(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04X}"
