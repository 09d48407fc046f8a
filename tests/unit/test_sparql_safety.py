"""SPARQL from outside must not fetch from other servers, or use the time of a backtracking matcher."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import pyoxigraph
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import KnowledgeError
from tidegate.knowledge.graph import Graph, Solutions
from tidegate.knowledge.sparql import is_data, is_update
from tidegate.knowledge.terms import Literal

# Inserted between any two tokens, and in places that may confuse a tokenizer.
BLANKS = (" ", "\n", "\t", " # ' \" <\n", " #\r", "\n#SERVICE <a> {\n")
DISTRACTIONS = (
    "?s <http://e/p#> '#' .",
    '?s ?p "\'" .',
    "?s ?p '\\'' .",
    "?s ?p '''a\n'b''' .",
    '?s ?p """a"b""" .',
    "FILTER(1 <2 && 3> 2)",
    "FILTER(?o < ?p || ?p >?o)",
    "FILTER(?o<'x'||'y'>?o)",
    "BIND('\\\\' AS ?v{})",
    "?s <http://e/\\u0023> ?o .",
    "_:b1 ?p 1.5e3 .",
    "?s <http://e/a>/<http://e/b>? ?o .",
    "OPTIONAL { ?s ?p 'x'@en--ltr }",
)


class Elsewhere:
    """A server that counts fetches, and closes the connection."""

    def __init__(self) -> None:
        self.asked = 0
        self.server = socket.create_server(("127.0.0.1", 0))
        self.uri = f"<http://127.0.0.1:{self.server.getsockname()[1]}/sparql>"
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while True:
            connection, _ = self.server.accept()
            with connection:
                if connection.recv(1) == b"!":
                    return
                self.asked += 1

    def stop(self) -> None:
        with socket.create_connection(self.server.getsockname()) as connection:
            connection.sendall(b"!")
        self.thread.join()
        self.server.close()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    place = Elsewhere()
    yield place
    place.stop()


def in_any_case(rng: random.Random, word: str) -> str:
    return "".join(rng.choice((letter.lower(), letter.upper())) for letter in word)


def fetching(rng: random.Random, uri: str) -> str:
    """Returns a query or an update that fetches. It is well-formed unless a distraction has broken it."""

    def blank() -> str:
        return rng.choice(BLANKS)

    def distractions() -> str:
        return " ".join(rng.choice(DISTRACTIONS).replace("{}", str(number)) for number in range(rng.randint(0, 3)))

    silent = rng.choice(("", in_any_case(rng, "SILENT")))
    load = f"{in_any_case(rng, 'LOAD')}{blank()}{silent}{blank()}{uri}"
    service = f"{in_any_case(rng, 'SERVICE')}{blank()}{silent}{blank()}{uri}{blank()}{{ ?x ?y ?z }}"
    if rng.random() < 0.3:
        service = f"VALUES ?g {{ {uri} }} {in_any_case(rng, 'SERVICE')} {silent} ?g {{ ?x ?y ?z }}"
    group = f"{{ {distractions()}{blank()}{service}{blank()}{distractions()} }}"
    for _ in range(rng.randint(0, 2)):
        group = rng.choice(
            (
                f"{{ OPTIONAL {group} }}",
                f"{{ {{ SELECT * WHERE {group} }} }}",
                f"{{ {{ ?s ?p ?o }} UNION {group} }}",
                f"{{ ?s ?p ?o MINUS {group} }}",
                f"{{ FILTER NOT EXISTS {group} }}",
                f"{{ ?s ?p ?o FILTER(EXISTS {group} || true) }}",
            )
        )
    return blank() + rng.choice(
        (
            f"SELECT * WHERE {group}",
            f"ASK {group}",
            f"CONSTRUCT {{ ?x ?y ?z }} WHERE {group}",
            f"INSERT {{ ?x ?y ?z }} WHERE {group}",
            f"DELETE {{ ?x ?y ?z }} WHERE {group}",
            f"INSERT DATA {{ <a:a> <a:b> '{in_any_case(rng, 'load')}' }} ; INSERT {{ ?x ?y ?z }} WHERE {group}",
            load,
            f"{load} INTO GRAPH <http://e/g>",
            f"PREFIX a: <http://e/#> INSERT DATA {{ a:a a:b '#' }}{blank()};{blank()}{load}",
        )
    )


def test_nothing_is_fetched_however_it_is_written(elsewhere: Elsewhere) -> None:
    """The oracle is the store, which would fetch. A text that the graph accepts must not."""
    graph, rng, refused = Graph(), random.Random(1), 0
    graph.update("INSERT DATA { <http://e/s> <http://e/p> 'x', 'y' }")
    for _ in range(3000):
        text = fetching(rng, elsewhere.uri)
        try:
            graph.update(text) if is_update(text) else graph.query(text)
        except KnowledgeError as error:
            refused += error.code == "K103"
        assert not elsewhere.asked, text
    assert refused > 2900


@pytest.mark.parametrize("text", ["SELECT * {{ SERVICE {} {{ ?s ?p ?o }} }}", "LOAD {}"])
def test_the_store_itself_would_fetch(text: str, elsewhere: Elsewhere) -> None:
    store, text = pyoxigraph.Store(), text.format(elsewhere.uri)
    with contextlib.suppress(OSError):
        store.update(text) if is_update(text) else store.query(text)
    assert elsewhere.asked


PIECES = [*"<>'\"\\#\n\r{}?$ .;u0041eE", "SERVICE ", "LOAD ", "SELECT ", "INSERT DATA ", "'''", '"""']


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_is_answered_or_refused_by_a_code(text: str) -> None:
    graph = Graph()
    for method in (graph.query, graph.update, graph.masks_of):
        with contextlib.suppress(KnowledgeError):
            method(text)
    assert is_data(text) in (True, False)


@pytest.mark.parametrize(
    ("pattern", "text", "is_found"),
    [
        ("(a+)+$", "a" * 100_000 + "b", False),
        ("(a|aa)+$", "a" * 100_000 + "b", False),
        ("(a|a?)+c$", "a" * 100_000 + "b", False),
        ("(.*)(.*)(.*)(.*)(.*)(.*)[0-9]$", "a" * 20_000, False),
        ("^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 50_000, False),
        ("(a+)+$", "b" + "a" * 100_000, True),
    ],
)
def test_patterns_that_kill_backtracking_matchers_take_linear_time(pattern: str, text: str, is_found: bool) -> None:
    """A backtracking matcher would not finish before the test times out."""
    answer = Graph().query(
        f"SELECT (REGEX('{text}', '{pattern}') AS ?r) (REPLACE('{text}', '{pattern}', '') AS ?t) {{}}"
    )
    assert isinstance(answer, Solutions)
    ((found, rest),) = answer.rows
    assert isinstance(found, Literal)
    assert isinstance(rest, Literal)
    assert found.text == str(is_found).lower()
    assert (rest.text == text) != is_found


@pytest.mark.parametrize(
    "pattern", ["((((a{100}){100}){100}){100}){100}", "(?:\\\\w{1000}){1000}", "(a)\\\\1", "(?=a)b", "(" * 5000]
)
def test_patterns_that_grow_too_large_or_look_back_have_no_value(pattern: str) -> None:
    answer = Graph().query(f"SELECT (REGEX('aa', '{pattern}') AS ?r) (REPLACE('aa', '{pattern}', 'b') AS ?t) {{}}")
    assert isinstance(answer, Solutions)
    assert answer.rows == [(None, None)]
