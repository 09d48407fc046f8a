"""SSAP, the protocol of Smart-M3 knowledge processors (KPs): reads and writes XML messages over TCP.

A message is one `SSAP_message` element, without a length before it or a mark after it. `MessageReader` is fed with the
bytes of a socket and returns complete requests. It parses a connection as the content of one element that never ends.
Messages may therefore follow each other with whitespace between them. A document type, which entity bombs need, is
malformed wherever it appears. Clients differ in the order of elements, in case and in spacing, and all variants are
accepted. A literal is text without a datatype, two URIs are wildcards, and blank nodes have labels.

Output is ASCII, without a declaration and without CDATA: the only form that all known clients read correctly.

What may go wrong: XML that is malformed, too deep or too long ends the connection (K110 to K112), because the bytes
after it cannot be trusted. A message with missing or unknown parts (K113, K114) is answered with the error, and the
next message is read.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, TypeAlias
from xml.parsers import expat

import msgspec

from tidegate.errors import KnowledgeError, NotAllowed, Overloaded, TidegateError
from tidegate.knowledge.documents import read_rdf_xml
from tidegate.knowledge.question import Question, Result, Shape, SparqlQuery
from tidegate.knowledge.terms import Blank, Literal, Mask, Masks, NewTriple, Term, Triple, Uri
from tidegate.knowledge.wql import WQL_FORMS, read_wql

MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
DEPTH_MAX: Final = 16
# Limits of tags: expat rescans an unfinished tag with every piece of data, and keeps every name that it has seen.
TAG_BYTES_MAX: Final = 4096
NAMES_MAX: Final = 256
# A text that arrives in more pieces than this is joined, because each piece is an object of its own.
PIECES_MAX: Final = 4096
WILDCARDS: Final = frozenset({"http://www.nokia.com/NRC/M3/sib#any", "sib:any"})

_CHANGES: Final = {"INSERT": ("insert_graph",), "REMOVE": ("remove_graph",), "UPDATE": ("remove_graph", "insert_graph")}
_NEEDS_ESCAPE: Final = re.compile("[^\t\n\x20-%'-;=?-~]")
NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_FIELDS: Final = ("node_id", "space_id", "transaction_id", "transaction_type", "message_type")
_NAMESPACE: Final = "http://www.w3.org/2005/sparql-results#"
_CONNECTION: Final = b"<connection>"
_DECLARATION: Final = b"<?xml"
_KINDS: Final[dict[type, str]] = {Uri: "uri", Literal: "literal", Blank: "bnode"}


class Status(StrEnum):
    """The first parameter of every confirm. Clients only distinguish success from everything else."""

    SUCCESS = "m3:Success"
    RESET = "m3:SIB.Notification.Reset"
    CLOSING = "m3:SIB.Notification.Closing"
    ERROR = "m3:SIB.Error"
    ACCESS_DENIED = "m3:SIB.Error.AccessDenied"
    OUT_OF_RESOURCES = "m3:SIB.Failure.OutOfResources"
    NOT_IMPLEMENTED = "m3:SIB.Failure.NotImplemented"
    KP_ERROR = "m3:KP.Error"
    BAD_REQUEST = "m3:KP.Error.Request"
    INCOMPLETE = "m3:KP.Error.Message.Incomplete"
    BAD_SYNTAX = "m3:KP.Error.Message.Syntax"


_STATUS_OF_CODE: Final = {
    "K109": Status.OUT_OF_RESOURCES,
    "K110": Status.BAD_SYNTAX,
    "K111": Status.BAD_SYNTAX,
    "K112": Status.OUT_OF_RESOURCES,
    "K113": Status.INCOMPLETE,
    "K128": Status.OUT_OF_RESOURCES,
    "K131": Status.OUT_OF_RESOURCES,
    "K140": Status.OUT_OF_RESOURCES,
    "K141": Status.OUT_OF_RESOURCES,
    "K142": Status.OUT_OF_RESOURCES,
}


class Envelope(msgspec.Struct, frozen=True):
    """The sender of a request and its transaction id. Ids are text, and clients may use the same one twice."""

    transaction_type: str = ""
    transaction_id: str = ""
    space_id: str = ""
    node_id: str = ""


class Join(msgspec.Struct, frozen=True):
    envelope: Envelope
    credentials: str


class Leave(msgspec.Struct, frozen=True):
    envelope: Envelope


class ChangeTriples(msgspec.Struct, frozen=True):
    """INSERT, REMOVE or UPDATE: removes all triples that match a mask, then inserts, as one atomic change."""

    envelope: Envelope
    removed: tuple[Mask, ...]
    inserted: tuple[NewTriple, ...]
    is_confirmed: bool


class ChangeBySparql(msgspec.Struct, frozen=True):
    """UPDATE with the encoding SPARQL-UPDATE. Most clients send their updates as a QUERY instead."""

    envelope: Envelope
    text: str
    is_confirmed: bool


class Query(msgspec.Struct, frozen=True):
    envelope: Envelope
    question: Question


class Subscribe(msgspec.Struct, frozen=True):
    """A question that stays open. With a subscription id and the last indication it saw, a client resumes it."""

    envelope: Envelope
    question: Question
    subscription_id: str
    last_sequence: int


class Unsubscribe(msgspec.Struct, frozen=True):
    envelope: Envelope
    subscription_id: str


class Malformed(msgspec.Struct, frozen=True):
    """The readable part of an invalid message, and its error. After a fatal one, the connection is unreadable."""

    envelope: Envelope
    error: KnowledgeError
    is_fatal: bool


Request: TypeAlias = Join | Leave | ChangeTriples | ChangeBySparql | Query | Subscribe | Unsubscribe


class _Node(msgspec.Struct):
    """A subject, a predicate, an object, or a node of a WQL query: its type, and its text as received."""

    kind: str
    text: str


class _Parameter(msgspec.Struct):
    encoding: str = ""
    text: str = ""
    triples: list[dict[str, _Node]] = []
    nodes: dict[str, _Node] = {}
    path: str = ""


class MessageReader:
    """Parses the messages of one connection. Do not call `feed` again after a fatal message."""

    def __init__(self, message_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self.message_bytes_max = message_bytes_max
        self._messages: list[Request | Malformed] = []
        self._elements: list[str] = []
        self._attributes: list[dict[str, str]] = []
        self._text: list[str] = []
        self._fields: dict[str, str] = {}
        self._parameters: dict[str, _Parameter] = {}
        self._parameter = _Parameter()
        self._parser = parser = expat.ParserCreate("UTF-8")
        parser.buffer_text = True
        parser.StartElementHandler = self._on_start
        parser.EndElementHandler = self._on_end
        parser.CharacterDataHandler = self._text.append
        if hasattr(parser, "SetReparseDeferralEnabled"):  # deferral could hold back a message until the next arrives
            parser.SetReparseDeferralEnabled(False)
        self._beginning: bytes | None = b""
        self._fed_bytes = self._message_start = len(_CONNECTION)
        parser.Parse(_CONNECTION)

    @property
    def is_between_messages(self) -> bool:
        return len(self._elements) == 1

    def feed(self, data: bytes) -> list[Request | Malformed]:
        """Returns the messages that are completed by this piece of data."""
        if self._beginning is not None:
            data = self._without_declaration(self._beginning + data)
        try:
            self._parser.Parse(data)
            self._fed_bytes += len(data)
            self._check_limits()
        except expat.ExpatError as error:
            reason = f"the message is not well-formed XML: {error}"
            self._refuse(KnowledgeError("K110", reason, "escape &, < and > in texts"), is_fatal=True)
        except KnowledgeError as error:
            self._refuse(error, is_fatal=True)
        messages, self._messages = self._messages, []
        return messages

    def _without_declaration(self, data: bytes) -> bytes:
        """Removes an XML declaration, which is allowed only at the beginning of a connection.

        Returns nothing until enough bytes have arrived to decide whether there is a declaration.
        """
        text = data.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n")
        if text.startswith(_DECLARATION) or _DECLARATION.startswith(text):
            _, is_whole, following = text.partition(b"?>")
            if is_whole:
                text = following
            elif len(data) <= TAG_BYTES_MAX:
                self._beginning = data
                return b""
        self._beginning = None
        return text

    def _check_limits(self) -> None:
        if len(self._text) > PIECES_MAX:
            self._text[:] = ["".join(self._text)]
        if self.is_between_messages:
            self._check_between()
        elif self._fed_bytes - self._message_start > self.message_bytes_max:
            raise self._too_long()
        # The parser's position stays at the start of an unfinished tag.
        if self._fed_bytes - self._parser.CurrentByteIndex > TAG_BYTES_MAX:
            raise KnowledgeError("K111", f"a tag has over {TAG_BYTES_MAX} bytes", "put long texts between tags")

    def _too_long(self) -> KnowledgeError:
        return KnowledgeError(
            "K112",
            f"a message has over {self.message_bytes_max} bytes",
            "send JOIN before large messages, or split the message",
        )

    def _check_between(self) -> None:
        """Refuses text between messages, except whitespace, which clients send as a wake-up."""
        text = "".join(self._text)
        self._text.clear()
        if text.strip():
            raise KnowledgeError("K110", f"{text.strip()[:40]!r} is outside of a message", "send SSAP_message elements")

    def _on_start(self, name: str, attributes: dict[str, str]) -> None:
        name = name.lower()
        elements = self._elements
        if len(elements) == 1:
            self._check_between()
            if name != "ssap_message":
                raise KnowledgeError("K110", f"<{name[:40]}> is not a message", "send SSAP_message elements")
            self._message_start = self._parser.CurrentByteIndex
        if len(elements) > DEPTH_MAX or len(self._parser.intern) > NAMES_MAX:
            raise KnowledgeError("K111", "elements nest too deep, or have too many names", "send only SSAP elements")
        if name == "parameter":
            self._parameter = self._parameters[attributes.get("name", "").strip().lower()] = _Parameter(
                attributes.get("encoding", "").strip().lower()
            )
        elif name == "triple":
            self._parameter.triples.append({})
        self._text.clear()
        elements.append(name)
        self._attributes.append(attributes)

    def _on_end(self, _: str) -> None:
        elements = self._elements
        if len(elements) == 1:
            raise KnowledgeError("K110", "a closing tag has no opening tag", "send SSAP_message elements")
        name, attributes = elements.pop(), self._attributes.pop()
        parent = elements[-1]
        text = "".join(self._text)
        self._text.clear()
        if parent == "triple":
            self._parameter.triples[-1][name] = _Node(attributes.get("type", "").strip().lower(), text)
        elif parent == "connection":
            self._finish()
        elif name == "parameter":
            self._parameter.text = text
        elif parent == "ssap_message":
            self._fields[name] = text.strip()
        elif name == "node":
            kind = attributes.get("type", "").strip().lower()
            self._parameter.nodes[attributes.get("name", "node").strip().lower()] = _Node(kind, text)
        elif name == "path_expression":
            self._parameter.path = text

    def _finish(self) -> None:
        try:
            if self._parser.CurrentByteIndex - self._message_start > self.message_bytes_max:
                raise self._too_long()
            self._messages.append(_read_request(self._envelope(), self._fields, self._parameters))
        except KnowledgeError as error:
            self._refuse(error, is_fatal=False)
        self._fields, self._parameters = {}, {}

    def _refuse(self, error: KnowledgeError, *, is_fatal: bool) -> None:
        self._messages.append(Malformed(self._envelope(), error, is_fatal))

    def _envelope(self) -> Envelope:
        fields = self._fields
        return Envelope(
            fields.get("transaction_type", "").upper(),
            fields.get("transaction_id", ""),
            fields.get("space_id", ""),
            fields.get("node_id", ""),
        )


def status_of(error: TidegateError) -> Status:
    """Returns the SSAP status for an error."""
    if isinstance(error, Overloaded):
        return Status.OUT_OF_RESOURCES
    if isinstance(error, NotAllowed):
        return Status.ACCESS_DENIED
    default = Status.BAD_REQUEST if isinstance(error, KnowledgeError) else Status.ERROR
    return _STATUS_OF_CODE.get(error.code, default)


# Reading requests from elements.


def _read_request(envelope: Envelope, fields: Mapping[str, str], parameters: Mapping[str, _Parameter]) -> Request:
    for name in _FIELDS:
        if not fields.get(name):
            raise KnowledgeError("K113", f"the message has no {name}", f"send {', '.join(_FIELDS)}")
    if fields["message_type"].upper() != "REQUEST":
        raise KnowledgeError("K114", f"the message_type {fields['message_type'][:40]!r} is unknown", "send REQUEST")
    match envelope.transaction_type:
        case "JOIN":
            return Join(envelope, parameters["credentials"].text if "credentials" in parameters else "")
        case "LEAVE":
            return Leave(envelope)
        case "INSERT" | "REMOVE" | "UPDATE":
            return _read_change(envelope, parameters)
        case "QUERY":
            return Query(envelope, _read_question(parameters))
        case "SUBSCRIBE":
            return Subscribe(
                envelope,
                _read_question(parameters),
                parameters["subscription_id"].text.strip() if "subscription_id" in parameters else "",
                _read_sequence(parameters),
            )
        case "UNSUBSCRIBE":
            return Unsubscribe(envelope, _required(parameters, "subscription_id").text.strip())
    raise KnowledgeError(
        "K114",
        f"the transaction_type {envelope.transaction_type[:40]!r} is unknown",
        "use JOIN, LEAVE, INSERT, REMOVE, UPDATE, QUERY, SUBSCRIBE or UNSUBSCRIBE",
    )


def _required(parameters: Mapping[str, _Parameter], name: str) -> _Parameter:
    if name not in parameters:
        raise KnowledgeError("K113", f"the parameter {name!r} is missing", "send it with this transaction")
    return parameters[name]


def _read_sequence(parameters: Mapping[str, _Parameter]) -> int:
    text = parameters["ind_sequence"].text.strip() if "ind_sequence" in parameters else "0"
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise KnowledgeError(
            "K114", f"the ind_sequence {text[:40]!r} is invalid", "send the number of the last indication received"
        )
    return int(text)


def _read_change(envelope: Envelope, parameters: Mapping[str, _Parameter]) -> ChangeTriples | ChangeBySparql:
    wanted = {name: parameters[name] for name in _CHANGES[envelope.transaction_type] if name in parameters}
    if not wanted:
        _required(parameters, _CHANGES[envelope.transaction_type][-1])
    confirm = parameters["confirm"].text.strip().upper() if "confirm" in parameters else "TRUE"
    for parameter in wanted.values():
        if parameter.encoding == "sparql-update":
            return ChangeBySparql(envelope, parameter.text, confirm != "FALSE")
    removed = wanted.get("remove_graph")
    inserted = wanted.get("insert_graph")
    return ChangeTriples(
        envelope,
        () if removed is None else _read_masks(removed),
        () if inserted is None else _read_inserts(inserted),
        confirm != "FALSE",
    )


def _read_question(parameters: Mapping[str, _Parameter]) -> Question:
    kind, query = _required(parameters, "type").text.strip().lower(), _required(parameters, "query")
    if kind == "rdf-m3":
        return Masks(_read_masks(query))
    if kind == "sparql":
        return SparqlQuery(query.text)
    if kind in WQL_FORMS:
        nodes = {name: _read_node(node) for name, node in query.nodes.items()}
        return read_wql(kind, nodes, query.path)
    raise KnowledgeError(
        "K114", f"the query type {kind[:40]!r} is unknown", f"use RDF-M3, sparql or {', '.join(WQL_FORMS)}"
    )


def _read_inserts(parameter: _Parameter) -> tuple[NewTriple, ...]:
    if parameter.encoding == "rdf-xml":
        return tuple(read_rdf_xml(parameter.text))
    _check_encoding(parameter)
    return tuple(_read_triple(nodes) for nodes in parameter.triples)


def _read_masks(parameter: _Parameter) -> tuple[Mask, ...]:
    if parameter.encoding == "rdf-xml":
        return tuple(_mask_of(triple) for triple in read_rdf_xml(parameter.text))
    _check_encoding(parameter)
    return tuple(
        Mask(_read_uri(nodes, "subject"), _read_uri(nodes, "predicate"), _read_object_mask(_node(nodes, "object")))
        for nodes in parameter.triples
    )


def _check_encoding(parameter: _Parameter) -> None:
    if parameter.encoding not in ("", "rdf-m3"):
        raise KnowledgeError(
            "K114", f"the encoding {parameter.encoding[:40]!r} is unknown", "use RDF-M3, RDF-XML or SPARQL-UPDATE"
        )


def _mask_of(triple: NewTriple) -> Mask:
    """Returns the mask of a triple. A blank node has no name, so it becomes a wildcard."""
    subject = None if isinstance(triple.subject, Blank) else triple.subject
    return Mask(subject, triple.predicate, None if isinstance(triple.object, Blank) else triple.object)


def _node(nodes: Mapping[str, _Node], name: str) -> _Node:
    if name not in nodes:
        raise KnowledgeError("K113", f"a triple has no {name}", "send a subject, a predicate and an object")
    return nodes[name]


def _read_node(node: _Node) -> Uri | Literal:
    return Literal(node.text) if node.kind == "literal" else Uri(node.text.strip())


def _read_pattern(node: _Node) -> Uri | Literal | None:
    found = _read_node(node)
    return None if isinstance(found, Uri) and found.text in WILDCARDS else found


def _read_object_mask(node: _Node) -> Uri | Literal | None:
    """Reads the object of a mask. For a subscription to any literal, the Java library sends the wildcard as a literal;
    here it matches any object."""
    return None if node.text.strip() in WILDCARDS else _read_pattern(node)


def _read_uri(nodes: Mapping[str, _Node], name: str) -> Uri | None:
    found = _read_pattern(_node(nodes, name))
    if isinstance(found, Literal):
        raise KnowledgeError("K114", f"the {name} {found.text[:40]!r} is a literal", "only objects may be literals")
    return found


def _read_triple(nodes: Mapping[str, _Node]) -> NewTriple:
    subject, predicate = _read_uri(nodes, "subject"), _read_uri(nodes, "predicate")
    found = _read_pattern(_node(nodes, "object"))
    if subject is None or predicate is None or found is None:
        raise KnowledgeError("K114", "a wildcard cannot be inserted", "name the subject, the predicate and the object")
    return NewTriple(
        Blank(subject.text) if nodes["subject"].kind == "bnode" else subject,
        predicate,
        Blank(found.text) if nodes["object"].kind == "bnode" else found,
    )


# Writing answers.


def confirm(envelope: Envelope, status: Status, parameters: Mapping[str, str] | None = None) -> bytes:
    """Writes the answer to a request. The values of `parameters` are XML."""
    return (
        f"<SSAP_message><message_type>CONFIRM</message_type>"
        f"<transaction_type>{write_text(envelope.transaction_type)}</transaction_type>"
        f"<transaction_id>{write_text(envelope.transaction_id)}</transaction_id>"
        f"<space_id>{write_text(envelope.space_id)}</space_id><node_id>{write_text(envelope.node_id)}</node_id>"
        f'<parameter name="status">{status}</parameter>{_write_parameters(parameters or {})}</SSAP_message>'
    ).encode("ascii")


def indication(envelope: Envelope, parameters: Mapping[str, str]) -> bytes:
    """Writes an indication for a subscription; `envelope` is that of its SUBSCRIBE."""
    return (
        f"<SSAP_message><message_type>INDICATION</message_type>"
        f"<transaction_type>{write_text(envelope.transaction_type)}</transaction_type>"
        f"<space_id>{write_text(envelope.space_id)}</space_id><node_id>{write_text(envelope.node_id)}</node_id>"
        f"<transaction_id>{write_text(envelope.transaction_id)}</transaction_id>"
        f"{_write_parameters(parameters)}</SSAP_message>"
    ).encode("ascii")


def refusal(malformed: Malformed) -> bytes | None:
    """Writes the answer to an invalid message, or returns None if the message does not identify its transaction."""
    envelope = malformed.envelope
    if not (envelope.transaction_type and envelope.transaction_id and envelope.node_id):
        return None
    return confirm(envelope, status_of(malformed.error), {"error": write_text(str(malformed.error))})


def write_text(text: str) -> str:
    """Escapes text as ASCII that every XML parser reads back unchanged. Characters that XML does not allow become the
    replacement character."""
    if _NEEDS_ESCAPE.search(text) is None:
        return text
    text = NOT_IN_XML.sub("\ufffd", text)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "&#13;")
    return text if text.isascii() else text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def write_result(result: Result) -> str:
    """Writes the rows of a result, or of a change in a result."""
    rows: Any = result.rows
    match result.shape:
        case Shape.TRIPLES:
            return write_triples(rows)
        case Shape.SOLUTIONS:
            return write_solutions(result.variables, rows)
        case Shape.NODES:
            return write_nodes(rows)
        case Shape.WQL_TRUTH:
            return "".join("TRUE" if row else "FALSE" for row in rows)
    truth = "".join(f"<boolean>{str(row).lower()}</boolean>" for row in rows)
    return f'<sparql xmlns="{_NAMESPACE}"><head></head>{truth}</sparql>'


def write_solutions(variables: Iterable[str], rows: Iterable[tuple[Term | None, ...]]) -> str:
    names = [_quoted(variable) for variable in variables]
    head = "".join(f'<variable name="{name}"/>' for name in names)
    results = "".join(
        "<result>"
        + "".join(
            f'<binding name="{name}">{_write_value(term)}</binding>'
            for name, term in zip(names, row, strict=True)
            if term is not None
        )
        + "</result>"
        for row in rows
    )
    return f'<sparql xmlns="{_NAMESPACE}"><head>{head}</head><results>{results}</results></sparql>'


def write_triples(triples: Iterable[Triple | NewTriple]) -> str:
    return f"<triple_list>{''.join(map(_write_triple, triples))}</triple_list>"


def write_nodes(nodes: Iterable[Term]) -> str:
    """Writes the answer to WQL-VALUES and WQL-NODETYPES."""
    return f"<node_list>{''.join(map(_write_node, nodes))}</node_list>"


def write_named(named: Mapping[str, Uri]) -> str:
    """Writes the URI that each blank node of an INSERT has received."""
    uris = "".join(f'<uri tag="{_quoted(label)}">{write_text(uri.text)}</uri>' for label, uri in named.items())
    return f"<urilist>{uris}</urilist>"


def _write_parameters(parameters: Mapping[str, str]) -> str:
    return "".join([f'<parameter name="{name}">{xml}</parameter>' for name, xml in parameters.items()])


def _quoted(text: str) -> str:
    return write_text(text).replace('"', "&quot;").replace("\t", "&#9;").replace("\n", "&#10;")


def _write_triple(triple: Triple | NewTriple) -> str:
    subject, found = triple.subject, triple.object
    return (
        f'<triple><subject type="{_KINDS[type(subject)]}">{_write_name(subject)}</subject>'
        f"<predicate>{write_text(triple.predicate.text)}</predicate>"
        f'<object type="{_KINDS[type(found)]}">{_write_name(found)}</object></triple>'
    )


def _write_name(term: Term) -> str:
    return write_text(term.label if isinstance(term, Blank) else term.text)


def _write_node(term: Term) -> str:
    tag = "literal" if isinstance(term, Literal) else "uri"
    return f"<{tag}>{_write_name(term)}</{tag}>"


def _write_value(term: Term) -> str:
    if isinstance(term, Uri):
        return f"<uri>{write_text(term.text)}</uri>"
    if isinstance(term, Blank):
        return f"<bnode>{write_text(term.label)}</bnode>"
    if term.language:
        return f'<literal xml:lang="{_quoted(term.language)}">{write_text(term.text)}</literal>'
    datatype = f' datatype="{_quoted(term.datatype)}"' if term.datatype else ""
    return f"<literal{datatype}>{write_text(term.text)}</literal>"
