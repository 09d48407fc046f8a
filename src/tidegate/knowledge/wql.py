"""WQL, the query language of the first Smart-M3 brokers: five kinds of questions about the nodes reachable from a node.

`WQL-VALUES` asks for the nodes at the end of a path, and `WQL-RELATED` whether a given node is among them.
`WQL-NODETYPES`, `WQL-ISTYPE` and `WQL-ISSUBTYPE` are such questions with predefined paths.

A path is a predicate or a list, as in `["seq", "rdf:type", ["rep*", "rdfs:subClassOf"]]`; the kind of brackets, quotes
and commas does not matter. `seq` follows steps one after another, `or` lists alternatives, `inv` goes backwards,
`rep*` repeats any number of times, and `rep+` at least once. The prefixes rdf: and rdfs: match both the full namespace
and the prefix as plain text, because clients insert either form. Literals are equal if their texts are, as in masks.

What may go wrong: a path that is malformed or too deep (K115), or that visits too many triples (K128); a missing node
(K113).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from tidegate.errors import KnowledgeError
from tidegate.knowledge.terms import RDF, RDFS, Literal, Mask, Masks, Triple, Uri

WQL_FORMS: Final = ("wql-values", "wql-related", "wql-nodetypes", "wql-istype", "wql-issubtype")
PATH_CHARACTERS_MAX: Final = 4096
PATH_DEPTH_MAX: Final = 32

Node: TypeAlias = Uri | Literal
Path: TypeAlias = "Uri | tuple[str, tuple[Path, ...]]"
FindTriples: TypeAlias = Callable[[Iterable[Mask]], list[Triple]]

_OPERATORS: Final = ("seq", "or", "inv", "rep*", "rep+")
_URI_TAG: Final = Uri.__struct_config__.tag
_TOKEN: Final = re.compile(r"""\s*(?:([\[(])|([\])])|"([^"]*)"|'([^']*)'|([^\s\[\](),"']+))\s*,?\s*""")
_TYPE: Final = Uri("rdf:type")
_SUBCLASSES: Final = ("rep*", (Uri("rdfs:subClassOf"),))


class WqlQuery(msgspec.Struct, frozen=True):
    """A question about the nodes that `path` leads to from `start`: all of them, or whether `end` is among them."""

    start: Node
    path: Path
    end: Node | None = None
    masks: Masks = Masks()


def read_wql(form: str, nodes: Mapping[str, Node], path: str) -> WqlQuery:
    """Returns the query of one of the five forms, built from its named nodes and its path."""
    match form:
        case "wql-values":
            return _query(_required(nodes, "start"), read_path(path))
        case "wql-related":
            return _query(_required(nodes, "start"), read_path(path), _required(nodes, "end"))
        case "wql-nodetypes":
            return _query(_required(nodes, "node"), ("seq", (_TYPE, _SUBCLASSES)))
        case "wql-istype":
            return _query(_required(nodes, "node"), ("seq", (_TYPE, _SUBCLASSES)), _required(nodes, "type"))
    assert form == "wql-issubtype", form
    return _query(_required(nodes, "subtype"), _SUBCLASSES, _required(nodes, "supertype"))


def evaluate(query: WqlQuery, find: FindTriples, triples_max: int) -> list[Node] | bool:
    """Returns the nodes that the path leads to, or whether `end` is among them."""
    reached = _walk(query.path, {query.start}, _bounded(find, triples_max), is_backwards=False)
    if query.end is None:
        return sorted(reached, key=lambda node: (isinstance(node, Literal), node.text))
    return any(type(node) is type(query.end) and node.text == query.end.text for node in reached)


def read_path(text: str) -> Path:
    if len(text) > PATH_CHARACTERS_MAX:
        raise _bad_path(text, f"has over {PATH_CHARACTERS_MAX} characters")
    tokens = _tokens(text)
    path, rest = _read(text, tokens, 0)
    if rest != len(tokens):
        raise _bad_path(text, "continues after its end")
    return path


def unpacked_path(packed: Any) -> Path:
    """Restores a path from the nested lists that MessagePack decodes it to."""
    head, rest = packed
    return Uri(rest) if head == _URI_TAG else (head, tuple(map(unpacked_path, rest)))


def _query(start: Node, path: Path, end: Node | None = None) -> WqlQuery:
    masks = (Mask(predicate=name) for predicate in _predicates(path) for name in _names(predicate))
    return WqlQuery(start, path, end, Masks(tuple(dict.fromkeys(masks))))


def _required(nodes: Mapping[str, Node], name: str) -> Node:
    if name not in nodes:
        raise KnowledgeError("K113", f"the WQL query has no node {name!r}", "send it in the wql_query")
    return nodes[name]


def _tokens(text: str) -> list[tuple[str, str]]:
    """Returns the tokens of a path: ("(" or ")", "") for brackets, ("name", …) for everything else."""
    tokens, at = [], 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _bad_path(text, f"cannot be read from column {at + 1} on")
        opening, closing, double, single, bare = found.groups()
        name = next((part for part in (double, single, bare) if part is not None), "")
        tokens.append(("(" if opening else ")" if closing else "name", name))
        at = found.end()
    return tokens


def _read(text: str, tokens: list[tuple[str, str]], at: int, depth: int = 0) -> tuple[Path, int]:
    if at == len(tokens) or tokens[at][0] == ")" or depth > PATH_DEPTH_MAX:
        raise _bad_path(text, "ends too early or nests too deep")
    kind, name = tokens[at]
    if kind == "name":
        return Uri(name.removeprefix("!")), at + 1
    operator = tokens[at + 1][1].removeprefix(":").lower() if at + 1 < len(tokens) else ""
    if operator not in _OPERATORS:
        raise _bad_path(text, f"has the unknown operator {operator[:40]!r}")
    steps: list[Path] = []
    at += 2
    while at < len(tokens) and tokens[at][0] != ")":
        step, at = _read(text, tokens, at, depth + 1)
        steps.append(step)
    if at == len(tokens) or not steps or (operator in ("inv", "rep*", "rep+") and len(steps) > 1):
        raise _bad_path(text, f"has no closing bracket for {operator}, or a wrong number of steps")
    return (operator, tuple(steps)), at + 1


def _predicates(path: Path) -> list[Uri]:
    return [path] if isinstance(path, Uri) else [found for step in path[1] for found in _predicates(step)]


def _names(predicate: Uri) -> list[Uri]:
    for prefix, namespace in (("rdf:", RDF), ("rdfs:", RDFS)):
        if predicate.text.startswith(prefix):
            return [predicate, Uri(namespace + predicate.text.removeprefix(prefix))]
        if predicate.text.startswith(namespace):
            return [predicate, Uri(prefix + predicate.text.removeprefix(namespace))]
    return [predicate]


def _walk(path: Path, nodes: set[Node], find: FindTriples, *, is_backwards: bool) -> set[Node]:
    if isinstance(path, Uri):
        return _step(path, nodes, find, is_backwards)
    operator, steps = path
    match operator:
        case "seq":
            for step in reversed(steps) if is_backwards else steps:
                nodes = _walk(step, nodes, find, is_backwards=is_backwards)
            return nodes
        case "or":
            return {node for step in steps for node in _walk(step, nodes, find, is_backwards=is_backwards)}
        case "inv":
            return _walk(steps[0], nodes, find, is_backwards=not is_backwards)
    reached: set[Node] = set(nodes) if operator == "rep*" else set()
    latest = nodes
    # Only newly reached nodes are followed, so that cycles end.
    while latest := _walk(steps[0], latest, find, is_backwards=is_backwards) - reached:
        reached |= latest
    return reached


def _bounded(find: FindTriples, triples_max: int) -> FindTriples:
    visited = 0

    def find_some(masks: Iterable[Mask]) -> list[Triple]:
        nonlocal visited
        found = find(masks)
        visited += len(found)
        if visited > triples_max:
            raise KnowledgeError(
                "K128", f"the path visits more than {triples_max} triples", "use a shorter path, or SPARQL"
            )
        return found

    return find_some


def _step(predicate: Uri, nodes: set[Node], find: FindTriples, is_backwards: bool) -> set[Node]:
    names = _names(predicate)
    if is_backwards:
        return {triple.subject for triple in find(Mask(None, name, node) for name in names for node in nodes)}
    subjects = [node for node in nodes if isinstance(node, Uri)]
    return {triple.object for triple in find(Mask(subject, name) for name in names for subject in subjects)}


def _bad_path(text: str, reason: str) -> KnowledgeError:
    return KnowledgeError("K115", f"the path {text[:60]!r} {reason}", 'write it like ["seq", "a", ["inv", "b"]]')
