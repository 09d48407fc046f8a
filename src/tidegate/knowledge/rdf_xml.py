"""Prepares RDF/XML as people write it for the store's parser: expands entities and removes document types.

Ontologies declare short names for namespaces in an internal DTD, `<!ENTITY owl "http://…#">`, in ways that the store's
parser does not accept. This module rewrites the document without them.

What may go wrong, all with K106: an entity that refers to another entity or to a file; a document whose entities expand
it to more than twice its length (plus `GROWTH_CHARACTERS`), as entity bombs do to fill the memory; elements that nest
too deep; malformed XML.
"""

from __future__ import annotations

from typing import Final, NoReturn
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from tidegate.errors import KnowledgeError

DEPTH_MAX: Final = 256
GROWTH_CHARACTERS: Final = 65_536


def without_entities(text: str) -> str:
    """Returns the document without its DTD. Refuses truncated documents, which the store's parser would accept."""
    return _Rewriter(2 * len(text) + GROWTH_CHARACTERS).rewrite(text)


class _Rewriter:
    def __init__(self, characters_max: int) -> None:
        self._characters_max = characters_max
        self._parts: list[str] = []
        self._characters = 0
        self._depth = 0
        self._parser = parser = expat.ParserCreate("UTF-8")
        parser.buffer_text = True
        parser.ordered_attributes = True
        parser.EntityDeclHandler = self._on_entity
        parser.StartElementHandler = self._on_start
        parser.EndElementHandler = self._on_end
        parser.CharacterDataHandler = self._on_text

    def rewrite(self, text: str) -> str:
        try:
            self._parser.Parse(text, True)
        except expat.ExpatError as error:
            _refuse(str(error))
        return "".join(self._parts)

    def _on_entity(
        self,
        name: str,
        is_parameter: bool,
        value: str | None,
        base: str | None,
        system_id: str,
        public_id: str | None,
        notation: str | None,
    ) -> None:
        if value is None or is_parameter or "&" in value:
            _refuse(f"the entity {name!r} is not plain text")

    def _on_start(self, name: str, attributes: list[str]) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            _refuse(f"elements nest more than {DEPTH_MAX} deep")
        pairs = zip(attributes[::2], attributes[1::2], strict=True)
        self._write(f"<{name}{''.join(f' {key}={quoteattr(value)}' for key, value in pairs)}>")

    def _on_end(self, name: str) -> None:
        self._depth -= 1
        self._write(f"</{name}>")

    def _on_text(self, text: str) -> None:
        self._write(escape(text))

    def _write(self, part: str) -> None:
        self._characters += len(part)
        if self._characters > self._characters_max:
            _refuse("its entities expand it to more than twice its length")
        self._parts.append(part)


def _refuse(reason: str) -> NoReturn:
    raise KnowledgeError("K106", f"the RDF/XML cannot be read: {reason}", "send one well-formed rdf:RDF element")
