"""What triples are made of: URIs, literals and blank nodes, as clients write them.

A URI is any text. Clients of the Smart-M3 world send `Agent_X`, `rdf:type` or addresses with spaces, and must get back
what they sent, while the store takes only absolute IRIs. So a text that is no IRI lives in the store under a private
scheme, with the characters that no IRI may hold written as %HH; `private_iri` and `text_of` are inverse to each other.
The encoding goes character by character, so that a prefix and a local name of SPARQL join to the IRI of the joined
text. Literals are kept as they are. The graph holds no blank nodes: each becomes a URI of its own, a `skolem`.

What may go wrong: half a surrogate pair, which no UTF-8 can hold (K101).
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

# All but what may stand in the path of an IRI (RFC 3987); a leading slash could begin an authority.
_NOT_IN_PATH: Final = re.compile(
    r"^/|[^A-Za-z0-9\-._~!$&'()*+,;=:@/"
    "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14))
    + "\U000e1000-\U000efffd]"
)
_NOT_IN_IRI: Final = re.compile(r'[\x00-\x20<>"{}|^`\\]')
_ESCAPED: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


class Uri(msgspec.Struct, frozen=True, gc=False, tag="u", array_like=True):
    """A resource, by the text that its client gave it."""

    text: str


class Literal(msgspec.Struct, frozen=True, gc=False, tag="l", array_like=True):
    """A value: its lexical form, and what SPARQL or RDF/XML said of it. A plain string has no datatype here."""

    text: str
    datatype: str = ""
    language: str = ""


class Blank(msgspec.Struct, frozen=True, gc=False, tag="b", array_like=True):
    """A blank node of a result (BNODE(), the template of a CONSTRUCT) or of an insert; never of the graph."""

    label: str


Term: TypeAlias = Uri | Literal | Blank


class Triple(NamedTuple):
    """A fact. `graph` is the text of its named graph; the default graph has none."""

    subject: Uri
    predicate: Uri
    object: Uri | Literal
    graph: str = ""


class Mask(NamedTuple):
    """Triples of the default graph, where None is a wildcard. A literal stands for all of its lexical form."""

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


def private_iri(text: str) -> str:
    """An IRI for a text that is none, or that begins with the private scheme itself."""
    try:
        return PRIVATE_SCHEME + _NOT_IN_PATH.sub(lambda found: quote(found[0], safe=""), text)
    except UnicodeEncodeError as error:
        raise KnowledgeError("K101", f"{text[:60]!r} holds half a character", "send Unicode text as UTF-8") from error


def text_of(iri: str) -> str:
    """What a client calls the resource that the store knows by this IRI."""
    return unquote(iri[len(PRIVATE_SCHEME) :]) if iri.startswith(PRIVATE_SCHEME) else iri


def skolem() -> Uri:
    """A name that nothing else has, for what came without one."""
    return Uri(uuid.uuid4().urn)


def write_term(term: Term) -> str:
    """As in N-Triples, Turtle and SPARQL."""
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
