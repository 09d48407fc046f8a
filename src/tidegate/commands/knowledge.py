"""`tidegate query` and `insert` query and change the knowledge base of a broker; `tidegate knowledge` copies it.

`query` and `insert` use HTTP. `knowledge dump` and `restore` work on the data directory of a broker that is not
running.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from tidegate import config as settings
from tidegate.client.knowledge import DEFAULT_HTTP, Knowledge
from tidegate.commands import terminal
from tidegate.commands.command_line import add_command, add_token_file, seconds
from tidegate.errors import ConfigError, KnowledgeError
from tidegate.knowledge import DIRECTORY
from tidegate.knowledge.store_identity import check_identity, write_identity
from tidegate.knowledge.terms import Literal, Uri, write_term

FORMATS: Final = {
    "json": "application/sparql-results+json",
    "xml": "application/sparql-results+xml",
    "csv": "text/csv",
    "tsv": "text/tab-separated-values",
    "turtle": "text/turtle",
    "ntriples": "application/n-triples",
    "rdfxml": "application/rdf+xml",
}
# Turtle is for CONSTRUCT and DESCRIBE, whose results are not tables.
TABLE: Final = f"{FORMATS['json']}, {FORMATS['turtle']};q=0.9"
DOCUMENTS: Final = {
    ".ttl": "text/turtle",
    ".trig": "application/trig",
    ".nt": "application/n-triples",
    ".nq": "application/n-quads",
    ".rdf": "application/rdf+xml",
    ".owl": "application/rdf+xml",
}
# Formats with one triple per line: a file longer than a request can be sent in parts.
LINES: Final = (".nt", ".nq")
REQUEST_BYTES: Final = 1024 * 1024
WAIT_S: Final = 10.0

_BARE_OBJECT: Final = re.compile(r"[+-]?(?:[0-9]+|[0-9]*\.[0-9]+|[0-9]+(?:\.[0-9]*)?[eE][+-]?[0-9]+)|true|false")


def add_query(commands: Any) -> None:
    parser = add_command(
        commands,
        "query",
        _query,
        "Query the knowledge base in SPARQL.",
        "tidegate query 'SELECT ?room ?t { ?room <temperature> ?t }'\n"
        "tidegate query 'SELECT ?room ?t { ?room <temperature> ?t }' --follow\n"
        "tidegate query 'SELECT ?t { ?room <temperature> ?t }' --follow --name rooms   # then --follow --name rooms\n"
        "tidegate query --list\n"
        "tidegate query --drop rooms\n"
        "tidegate query 'CONSTRUCT { ?s ?p ?o } { ?s ?p ?o }' --format ntriples > facts.nt\n\n"
        "docs/knowledge.md explains the knowledge base.",
    )
    parser.add_argument("text", nargs="?", default="", metavar="SPARQL", help="SELECT, ASK, CONSTRUCT or DESCRIBE")
    parser.add_argument(
        "--format",
        choices=("table", *FORMATS),
        help="format of the result (default: a table on a terminal, json or turtle in a pipe)",
    )
    parser.add_argument("--follow", action="store_true", help="show the result and then its changes, until Ctrl-C")
    parser.add_argument(
        "--name", default="", help="with --follow: store the query under this name, or continue a stored one"
    )
    parser.add_argument("--list", action="store_true", help="list the stored queries")
    parser.add_argument("--drop", metavar="NAME", help="delete the stored query with this name")
    _add_http_options(parser)


def _query(options: argparse.Namespace) -> int:
    _check_query(options)
    knowledge = _knowledge(options)
    if options.list:
        for kept in knowledge.named():
            terminal.print_json(kept)
        return 0
    if options.drop is not None:
        knowledge.drop(options.drop)
        return 0
    if options.follow:
        _follow(knowledge.follow(options.text, options.name, wait_s=options.wait))
    wanted = options.format or ("table" if terminal.is_for_people() else None)
    accepted = TABLE if wanted in (None, "table") else FORMATS[wanted]
    result = knowledge.query(options.text, accepted, wait_s=options.wait)
    if wanted == "table" and result.media_type == FORMATS["json"]:
        terminal.show_result(msgspec.json.decode(result.body))
    else:
        terminal.print_text(result.body.decode())
    return 0


def _check_query(options: argparse.Namespace) -> None:
    wanted = [options.text or options.name, options.list, options.drop is not None]
    if sum(map(bool, wanted)) != 1:
        raise ConfigError(
            "C417", "nothing to do, or several things at once", "give either a SPARQL query, --list or --drop NAME"
        )
    if options.name and not options.follow:
        raise ConfigError("C417", "--name works only with --follow", "add --follow")
    if options.follow and options.format is not None:
        raise ConfigError("C417", "--follow cannot be combined with --format", "leave --format out")


def _follow(messages: Iterator[dict[str, Any]]) -> NoReturn:
    terminal.show_change_of_result(next(messages))
    terminal.note("following changes; press Ctrl-C to stop")
    while True:
        terminal.show_change_of_result(next(messages))


def add_insert(commands: Any) -> None:
    parser = add_command(
        commands,
        "insert",
        _insert,
        "Insert a triple or a file of triples into the knowledge base, or run a SPARQL update.",
        "tidegate insert hall temperature 19.5\n"
        "tidegate insert hall partOf '<house>'      # <…> marks a URI; subjects and predicates are always URIs\n"
        "tidegate insert hall number '\"12\"'         # quotes make it a text, not a number\n"
        "tidegate insert --file facts.ttl\n"
        "tidegate insert --update 'DELETE WHERE { <hall> ?p ?o }'",
    )
    parser.add_argument("triple", nargs="*", metavar="S P O", help="subject, predicate and object")
    parser.add_argument("--file", type=Path, help=f"a file of triples: {', '.join(DOCUMENTS)}")
    parser.add_argument("--update", metavar="SPARQL", help="an update: INSERT DATA, DELETE … INSERT … WHERE, …")
    _add_http_options(parser)


def _insert(options: argparse.Namespace) -> int:
    given = [options.triple or None, options.file, options.update]
    if sum(each is not None for each in given) != 1 or len(options.triple) not in (0, 3):
        raise ConfigError("C417", "no change, or several at once", "give either S P O, --file or --update")
    knowledge, wait_s = _knowledge(options), options.wait
    if options.file is not None:
        changes = [
            knowledge.insert(part, DOCUMENTS[options.file.suffix], wait_s=wait_s) for part in _parts(options.file)
        ]
    elif options.update is not None:
        changes = [knowledge.update(options.update, wait_s=wait_s)]
    else:
        changes = [knowledge.update(f"INSERT DATA {{ {_written(*options.triple)} }}", wait_s=wait_s)]
    added, removed = (sum(change[name] for change in changes) for name in ("added", "removed"))
    terminal.note(f"{added} triples added, {removed} removed")
    if not terminal.is_for_people():
        terminal.print_json({"added": added, "removed": removed})
    return 0


def add_knowledge(commands: Any) -> None:
    text = "Dump or restore the knowledge base of a broker that is not running."
    parser = commands.add_parser("knowledge", help=text, description=text)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, text, example in (
        ("dump", _dump, "Write all triples to a file.", "tidegate knowledge dump facts.nq"),
        (
            "restore",
            _restore,
            "Replace the knowledge base with the triples of a file.",
            "tidegate knowledge restore facts.nq",
        ),
    ):
        action = add_command(actions, name, run, text, example)
        action.add_argument("file", type=Path, metavar="FILE", help="file in N-Quads format")
        default = os.environ.get("TIDEGATE_DATA", settings.Config().data)
        action.add_argument("--data", default=default, help=f"the broker's data directory (default: {default})")


def _dump(options: argparse.Namespace) -> int:
    directory = Path(options.data) / DIRECTORY
    if not directory.exists():
        raise KnowledgeError(
            "K107", f"there is no graph in {str(directory)!r}", "give the broker's data directory with --data"
        )
    check_identity(directory)
    graph = _open_graph(options.data)
    graph.dump(options.file)
    terminal.note(f"wrote {len(graph)} triples to {options.file}")
    return 0


def _restore(options: argparse.Namespace) -> int:
    directory = Path(options.data) / DIRECTORY
    graph = _open_graph(options.data)
    delta = graph.restore(options.file)
    graph.flush()
    write_identity(directory)
    terminal.note(f"{len(delta.added)} triples added, {len(delta.removed)} removed, {len(graph)} in total")
    return 0


def _open_graph(data: str) -> Any:
    try:
        from tidegate.knowledge.graph import Graph
    except ImportError as error:
        raise ConfigError(
            "C412", f"the knowledge base needs {error.name}, which is not installed", "pip install 'tidegate[server]'"
        ) from error
    return Graph(Path(data) / DIRECTORY)


def _add_http_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--http",
        default=os.environ.get("TIDEGATE_HTTP", DEFAULT_HTTP),
        help=f"HTTP address of the broker (default: $TIDEGATE_HTTP, or {DEFAULT_HTTP})",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=WAIT_S,
        metavar="SECONDS",
        help=f"how long to retry while the broker is overloaded (default: {WAIT_S:g})",
    )
    add_token_file(parser)


def _knowledge(options: argparse.Namespace) -> Knowledge:
    chosen = settings.Config(token_file=str(options.token_file or ""))
    return Knowledge(options.http, settings.read_token(chosen, os.environ))


def _written(subject: str, predicate: str, found: str) -> str:
    """Returns a triple as people type it, written in SPARQL."""
    names = " ".join(write_term(Uri(_bare(text))) for text in (subject, predicate))
    if found.startswith("<") and found.endswith(">"):
        return f"{names} {write_term(Uri(_bare(found)))}"
    if _BARE_OBJECT.fullmatch(found):
        return f"{names} {found}"
    is_quoted = len(found) >= 2 and found[0] == found[-1] == '"'
    return f"{names} {write_term(Literal(found[1:-1] if is_quoted else found))}"


def _bare(text: str) -> str:
    return text[1:-1] if text.startswith("<") and text.endswith(">") else text


def _parts(file: Path) -> Iterator[bytes]:
    """Yields what is sent in one request: whole lines if the format has one triple per line, otherwise the whole
    file."""
    if file.suffix not in DOCUMENTS:
        raise KnowledgeError(
            "K120", f"{file} has an unknown file type", f"use a name that ends with {', '.join(DOCUMENTS)}"
        )
    try:
        with file.open("rb") as lines:
            if file.suffix not in LINES:
                yield lines.read()
                return
            while part := lines.readlines(REQUEST_BYTES):
                yield b"".join(part)
    except OSError as error:
        raise KnowledgeError("K123", f"{file} cannot be read: {error}", "name a readable file") from error
