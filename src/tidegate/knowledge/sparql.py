"""Reads the text of a SPARQL query or update, as far as the broker must understand it. The store parses the rest.

This module distinguishes queries from updates, replaces every URI by the IRI that the store uses for it, and splits an
update into its operations. It refuses operations that would fetch from elsewhere (SERVICE, LOAD).

It also finds the masks of a query: a change that matches none of them cannot change the result. For a query that it
cannot analyse it returns `ANY_CHANGE`: every change counts. A superfluous mask costs an evaluation; a missing mask
would lose an indication.

What may go wrong: SERVICE or LOAD (K103); triples within triples, which SSAP cannot express (K105); a text that is too
long, or nests too deep (K142). The store reports other syntax errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from tidegate.errors import KnowledgeError
from tidegate.knowledge.terms import ANY_CHANGE, RDF, Literal, Mask, Masks, Uri, text_of

TEXTS_REMEMBERED: Final = 256
CHARACTERS_REMEMBERED_MAX: Final = 16 * 1024
QUERY_CHARACTERS_MAX: Final = 1 << 16
UPDATE_CHARACTERS_MAX: Final = 1 << 20
# The store's parser is recursive: a few thousand nested brackets would exhaust the stack of the process.
NESTING_MAX: Final = 64
# An update that contains only data, up to this length, runs on the event loop: it takes at most milliseconds.
DATA_CHARACTERS_MAX: Final = 1 << 14

_NAME: Final = "[A-Za-z0-9_\u00b7-\U000effff]"
_TOKEN: Final = re.compile(
    rf"""
      (?P<blank>[\x20\t\r\n]+|\#[^\r\n]*)
    | <(?P<iri>(?:[^\x00-\x20<>"{{}}|^`\\]|\\u[0-9A-Fa-f]{{4}}|\\U[0-9A-Fa-f]{{8}})*)>
    | (?P<string>\"\"\"(?:"?"?(?:[^"\\]|\\.))*+\"\"\" | '''(?:'?'?(?:[^'\\]|\\.))*+'''
        | "(?:[^"\\\r\n]|\\.)*+" | '(?:[^'\\\r\n]|\\.)*+')
    | (?P<variable>[?$]{_NAME}+)
    | (?P<node>_:{_NAME}(?:(?:{_NAME}|[.\-])*(?:{_NAME}|-))?)
    | (?P<language>@[A-Za-z]+(?:--?[A-Za-z0-9]+)*)
    | (?P<number>[+\-]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?(?!{_NAME}|:))
    | (?P<name>(?:{_NAME}(?:(?:{_NAME}|[.\-])*(?:{_NAME}|-))?)?:
        (?:(?:{_NAME}|:|%[0-9A-Fa-f]{{2}}|\\.)(?:(?:{_NAME}|[.:\-]|%[0-9A-Fa-f]{{2}}|\\.)*
            (?:{_NAME}|[:\-]|%[0-9A-Fa-f]{{2}}|\\.))?)?)
    | (?P<word>[A-Za-z_]{_NAME}*)
    | (?P<sign>\^\^|&&|\|\||[<>!]=|<<|>>|\{{\||\|\}}|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_PLAIN_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "b": "\b", "f": "\f"}
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")

_QUERIES: Final = frozenset({"SELECT", "ASK", "CONSTRUCT", "DESCRIBE"})
# Queries with these words have no masks: they use named graphs, relative names, or follow blank nodes (DESCRIBE).
_UNSUPPORTED: Final = frozenset({"BASE", "DESCRIBE", "FROM", "GRAPH"})
_NONDETERMINISTIC: Final = frozenset({"BNODE", "NOW", "RAND", "STRUUID", "UUID"})
_JOINING: Final = frozenset({"WHERE", "OPTIONAL", "UNION", "MINUS", "NOT", "EXISTS"})
_CLOSING: Final = frozenset({"GROUP", "HAVING", "ORDER", "LIMIT", "OFFSET"})


class Token(NamedTuple):
    """A token of SPARQL. `value` is a keyword in capitals, the text between < and >, or the token as written."""

    kind: str
    value: str
    start: int
    end: int

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.value in words


class Operation(NamedTuple):
    """One operation on the default graph. The blocks include their braces. If `where` is empty, they are data."""

    prologue: str
    deleted: str
    inserted: str
    where: str


def tokens_of(text: str) -> tuple[Token, ...]:
    """Returns the tokens of a text. They are cached unless the text is long, because every function here needs them."""
    return _remembered_tokens(text) if len(text) <= CHARACTERS_REMEMBERED_MAX else tuple(_tokens(text))


def is_update(text: str) -> bool:
    """Reports whether a text is an update. A text that is neither a query nor an update counts as an update.

    It reads only as far as it must, because the text may have any length.
    """
    tokens = _tokens(text)
    for token in tokens:
        if token.is_word("PREFIX", "BASE"):
            for _ in range(2 if token.value == "PREFIX" else 1):
                next(tokens, None)
        else:
            return token.value not in _QUERIES
    return True


def check_length(text: str, characters_max: int) -> None:
    if len(text) > characters_max:
        raise KnowledgeError(
            "K142",
            f"the SPARQL has {len(text)} characters; the maximum is {characters_max}",
            "split it into several requests",
        )


def is_data(text: str) -> bool:
    """Reports whether an update is short and contains only INSERT DATA and DELETE DATA, and so is cheap."""
    if len(text) > DATA_CHARACTERS_MAX:
        return False
    operations = filter(None, map(_after_prologue, _split(tokens_of(text))))
    return all(
        operation[0].is_word("INSERT", "DELETE") and len(operation) > 1 and operation[1].is_word("DATA")
        for operation in operations
    )


def is_repeatable(text: str) -> bool:
    """Reports whether a query always has the same answer on the same graph."""
    return not any(token.is_word(*_NONDETERMINISTIC) for token in tokens_of(text))


def with_iris(text: str, iri_of: Callable[[str], str]) -> str:
    """Returns the text with each URI replaced by its IRI, for the store. The store resolves relative URIs after a
    BASE."""
    parts, at, has_base, depth = [], 0, False, 0
    for token in tokens_of(text):
        if token.kind == "sign":
            depth += (token.value in "([{") - (token.value in ")]}")
            if depth > NESTING_MAX:
                raise KnowledgeError(
                    "K142", f"the SPARQL nests over {NESTING_MAX} brackets", "split it into several requests"
                )
        if token.is_word("SERVICE", "LOAD"):
            raise KnowledgeError(
                "K103", f"{token.value} would fetch data from elsewhere", "insert those triples here, and query them"
            )
        if (token.kind == "sign" and token.value in ("<<", "{|")) or token.is_word("TRIPLE"):
            raise KnowledgeError(
                "K105", f"{token.value} creates a triple within a triple", "give the statement a URI of its own"
            )
        has_base = has_base or token.is_word("BASE")
        if token.kind == "iri":
            uri = _unescape(token.value)
            if not has_base or _SCHEME.match(uri):
                parts += [text[at : token.start], "<", iri_of(uri), ">"]
                at = token.end
    return "".join([*parts, text[at:]])


def operations_of(text: str) -> list[Operation] | None:
    """Returns the operations of an update, or None if one of them names a graph or changes whole graphs."""
    operations, prologue = [], ""
    for tokens in _split(tokens_of(text)):
        rest = _after_prologue(tokens)
        declared = tokens[: len(tokens) - len(rest)]
        prologue += "".join(text[token.start : token.end] + " " for token in declared)
        if not rest:
            continue
        operation = _read_operation(text, prologue, rest)
        if operation is None:
            return None
        operations.append(operation)
    return operations


def masks_of(text: str) -> Masks:
    """Returns the masks of a query whose URIs `with_iris` has replaced. A change that matches no mask cannot change the
    result. Returns `ANY_CHANGE` if any change may."""
    tokens = tokens_of(text)
    if any(token.is_word(*_UNSUPPORTED) for token in tokens):
        return ANY_CHANGE
    try:
        return Masks(tuple(dict.fromkeys(_MaskReader(tokens).read())))
    except _UnsupportedError:
        return ANY_CHANGE


@lru_cache(TEXTS_REMEMBERED)
def _remembered_tokens(text: str) -> tuple[Token, ...]:
    """Returns the tokens of a text, from the cache if possible."""
    return tuple(_tokens(text))


def _tokens(text: str) -> Iterator[Token]:
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup
        assert kind is not None
        if kind != "blank":
            value = found[kind]
            yield Token(kind, value.upper() if kind == "word" and value != "a" else value, *found.span())


def _after_prologue(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    at = 0
    while at < len(tokens) and tokens[at].is_word("PREFIX", "BASE"):
        at += 3 if tokens[at].value == "PREFIX" else 2
    return tokens[at:]


def _split(tokens: tuple[Token, ...]) -> Iterator[tuple[Token, ...]]:
    """Splits the tokens of an update into its operations, at each semicolon outside of braces."""
    depth, start = 0, 0
    for at, token in enumerate(tokens):
        if token.kind == "sign":
            depth += (token.value == "{") - (token.value == "}")
            if token.value == ";" and depth == 0:
                yield tokens[start:at]
                start = at + 1
    yield tokens[start:]


def _read_operation(text: str, prologue: str, tokens: tuple[Token, ...]) -> Operation | None:
    heads, blocks = _blocks(text, tokens)
    match heads:
        case ["INSERT DATA"]:
            return Operation(prologue, "", blocks[0], "")
        case ["DELETE DATA"]:
            return Operation(prologue, blocks[0], "", "")
    # The last block is the WHERE, which may read named graphs. DELETE WHERE has only that block, and it is a template.
    if any(_names_graph(block) for block in blocks[:-1] or blocks):
        return None
    match heads:
        case ["DELETE WHERE"]:
            return Operation(prologue, blocks[0], "", blocks[0])
        case ["DELETE", "WHERE"]:
            return Operation(prologue, blocks[0], "", blocks[1])
        case ["INSERT", "WHERE"]:
            return Operation(prologue, "", blocks[0], blocks[1])
        case ["DELETE", "INSERT", "WHERE"]:
            return Operation(prologue, *blocks)
    return None


def _blocks(text: str, tokens: tuple[Token, ...]) -> tuple[list[str], list[str]]:
    """Returns the words before each block in braces, and the blocks."""
    heads: list[str] = []
    blocks: list[str] = []
    words: list[str] = []
    depth, start = 0, 0
    for token in tokens:
        is_sign = token.kind == "sign"
        if is_sign and token.value == "{":
            if depth == 0:
                heads.append(" ".join(words))
                words, start = [], token.start
            depth += 1
        elif is_sign and token.value == "}":
            depth -= 1
            if depth == 0:
                blocks.append(text[start : token.end])
        elif depth == 0:
            words.append(token.value)
    return ([*heads, " ".join(words)] if words else heads), blocks


def _names_graph(block: str) -> bool:
    return any(token.is_word("GRAPH") for token in tokens_of(block))


def _unescape(text: str) -> str:
    return _ESCAPE.sub(_unescaped, text) if "\\" in text else text


def _unescaped(found: re.Match[str]) -> str:
    digits = found[1] or found[2]
    if digits is None:
        return _PLAIN_ESCAPES.get(found[3], found[3])
    return chr(int(digits, 16)) if int(digits, 16) < 0x110000 else "\ufffd"


class _UnsupportedError(Exception):
    """The query uses syntax that `_MaskReader` does not understand."""


class _MaskReader:
    """Collects the masks of a query in one pass over its tokens.

    It does not build a tree of groups: every triple pattern yields a mask, also inside OPTIONAL, MINUS, EXISTS or a
    subquery. It need not detect syntax errors, because the store refuses malformed queries.
    """

    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self._prefixes: dict[str, str] = {}
        self._masks: list[Mask] = []
        rest = _after_prologue(tokens)
        declared = iter(tokens[: len(tokens) - len(rest)])
        for _, name, iri in zip(declared, declared, declared, strict=False):
            self._prefixes[name.value] = iri.value
        self._tokens = [*rest, Token("end", "", 0, 0)]
        self._at = 0

    def read(self) -> list[Mask]:
        if self._take("CONSTRUCT") and self._peek().value == "{":
            self._skip_block()
        while self._peek().kind != "end":
            self._element()
        return self._masks

    def _peek(self) -> Token:
        return self._tokens[self._at]

    def _next(self) -> Token:
        token = self._tokens[self._at]
        if token.kind == "end":
            raise _UnsupportedError
        self._at += 1
        return token

    def _take(self, *values: str) -> bool:
        token = self._peek()
        if token.kind in ("word", "sign") and token.value in values:
            self._at += 1
            return True
        return False

    def _expect(self, value: str) -> None:
        if not self._take(value):
            raise _UnsupportedError

    def _element(self) -> None:
        """Reads one element of a group. It passes over braces and joining words, and skips expressions and data."""
        if self._take("{", "}", ".", *_JOINING):
            return
        if self._take("FILTER", "BIND"):
            self._expression()
        elif self._take("SELECT", "ASK"):
            self._skip_until("{", "WHERE")
        elif self._take("VALUES"):
            while self._peek().value != "{":
                self._next()
            self._skip_block()
        elif self._take(*_CLOSING):
            self._skip_until("}", "VALUES")
        else:
            self._triples()

    def _expression(self) -> None:
        """Skips `FILTER (…)` or `FILTER f(…)`. It leaves the group of `FILTER NOT EXISTS {…}` to `_element`."""
        if self._peek().value not in ("NOT", "EXISTS", "("):
            self._next()
        if self._take("("):
            self._parenthesis()

    def _parenthesis(self) -> None:
        """Skips to the closing parenthesis, but reads groups in it, which belong to EXISTS."""
        while not self._take(")"):
            if self._take("("):
                self._parenthesis()
            elif self._take("{"):
                self._group()
            else:
                self._next()

    def _group(self) -> None:
        depth = 1
        while depth:
            token = self._peek()
            if token.kind == "end":
                raise _UnsupportedError
            if token.kind == "sign":
                depth += (token.value == "{") - (token.value == "}")
            self._element()

    def _skip_until(self, *values: str) -> None:
        while self._peek().kind != "end" and not (
            self._peek().kind in ("word", "sign") and self._peek().value in values
        ):
            if self._take("("):
                self._parenthesis()
            else:
                self._next()

    def _skip_block(self) -> None:
        depth = 0
        while True:
            token = self._next()
            if token.kind == "sign":
                depth += (token.value == "{") - (token.value == "}")
                if depth == 0:
                    return

    def _triples(self) -> None:
        is_property_list = self._peek().value == "["
        subject = self._node()
        if isinstance(subject, Literal):
            raise _UnsupportedError
        if is_property_list and self._peek().value in (".", "}"):
            return
        self._properties(subject)

    def _properties(self, subject: Uri | None) -> None:
        while True:
            path = self._verb()
            while True:
                found = self._node()
                if isinstance(path, list):
                    self._masks += [Mask(None, predicate, None) for predicate in path]
                else:
                    self._masks.append(Mask(subject, path, found))
                if not self._take(","):
                    break
            if not self._take(";"):
                return
            while self._take(";"):
                pass
            if self._peek().value in (".", "}", "]") or self._peek().kind == "end":
                return

    def _verb(self) -> Uri | list[Uri] | None:
        """Returns a predicate, None for a variable, or all predicates of a path."""
        if self._peek().kind == "variable":
            self._next()
            return None
        start = self._at
        path = self._path()
        return path[0] if self._at == start + 1 else path

    def _path(self) -> list[Uri]:
        predicates: list[Uri] = []
        while True:
            while self._take("^"):
                pass
            if self._take("("):
                predicates += self._path()
                self._expect(")")
            else:
                predicates.append(self._uri(self._next()))
            if self._take("*", "?", "!"):  # a path of zero steps matches every node, whatever its predicates
                raise _UnsupportedError
            self._take("+")
            if not self._take("/", "|"):
                return predicates

    def _node(self) -> Uri | Literal | None:
        """Returns a constant of a triple pattern, or None if it may match several terms."""
        if self._take("["):
            if not self._take("]"):
                self._properties(None)
                self._expect("]")
            return None
        token = self._next()
        if token.kind in ("variable", "node", "number") or token.value in ("TRUE", "FALSE"):
            return None
        if token.kind == "string":
            return self._literal(token.value)
        return self._uri(token)

    def _literal(self, written: str) -> Literal | None:
        if self._take("^^"):  # compared by value: "01" may be stored as "1"
            self._next()
            return None
        if self._peek().kind == "language":
            self._next()
        marks = 3 if written.startswith(('"""', "'''")) else 1
        return Literal(_unescape(written[marks:-marks]))

    def _uri(self, token: Token) -> Uri:
        if token.kind == "iri":
            return Uri(text_of(token.value))
        if token.is_word("a"):
            return Uri(RDF + "type")
        if token.kind == "name":
            prefix, local = token.value.split(":", 1)
            if (start := self._prefixes.get(prefix + ":")) is not None:
                return Uri(text_of(start + re.sub(r"\\(.)", r"\1", local)))
        raise _UnsupportedError
