"""`tidegate query`, `insert` and `knowledge`, from outside: their output, their changes, and their exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from broker_process import BrokerProcess
from command import Outcome, Running, tidegate

EVERYTHING = "SELECT ?s ?p ?o { ?s ?p ?o } ORDER BY ?s ?p ?o"


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(has_knowledge=True) as process:
        yield process


@pytest.fixture(autouse=True)
def _empty(broker: BrokerProcess) -> None:
    httpx.post(f"{broker.http}/v1/sparql", data={"update": "CLEAR ALL"}, trust_env=False, timeout=60).raise_for_status()


def insert(broker: BrokerProcess, *arguments: str) -> Outcome:
    return tidegate("insert", *arguments, "--http", broker.http)


def query(broker: BrokerProcess, *arguments: str) -> Outcome:
    return tidegate("query", *arguments, "--http", broker.http)


def csv(broker: BrokerProcess, text: str = EVERYTHING) -> list[str]:
    done = query(broker, text, "--format", "csv")
    assert done.code == 0, done.err
    return done.out.splitlines()[1:]


class TestInsert:
    @pytest.mark.parametrize(
        ("written", "stored"),
        [
            ("19.5", '"19.5"^^<http://www.w3.org/2001/XMLSchema#decimal>'),
            ("-3", '"-3"^^<http://www.w3.org/2001/XMLSchema#integer>'),
            ("true", '"true"^^<http://www.w3.org/2001/XMLSchema#boolean>'),
            ('"12"', '"12"'),
            ("<house>", "<house>"),
            ('it\'s "fine" \\ so', '"it\'s \\"fine\\" \\\\ so"'),
            ("3 rooms", '"3 rooms"'),
            ("", '""'),
        ],
    )
    def test_a_triple_is_stored_as_it_is_meant(self, broker: BrokerProcess, written: str, stored: str) -> None:
        done = insert(broker, "my hall", "<is>", written)
        assert (done.code, done.lines) == (0, [{"added": 1, "removed": 0}]), done.err
        assert "1 triples added" in done.err
        shown = query(broker, EVERYTHING, "--format", "tsv").out.splitlines()
        assert shown[1:] == [f"<my\\u0020hall>\t<is>\t{stored}"]

    def test_an_update_tells_what_it_has_changed(self, broker: BrokerProcess) -> None:
        insert(broker, "a", "b", "1")
        done = insert(broker, "--update", "DELETE { ?s ?p ?o } INSERT { ?s ?p 2, 3 } WHERE { ?s ?p ?o }")
        assert done.lines == [{"added": 2, "removed": 1}]

    def test_files_of_every_kind(self, broker: BrokerProcess, tmp_path: Path) -> None:
        documents = {
            "a.ttl": "@prefix e: <http://e/> . <Agent_X> a e:Agent ; e:knows [ e:name 'Y' ] .",
            "b.trig": "<garden> { <tree> <height> 3 }",
            "c.nt": "<http://e/s> <http://e/p> <http://e/o> .\n" * 2,
            "d.nq": '<tidegate-text:my%20tree> <tidegate-text:height> "4" <tidegate-text:garden> .\n',
        }
        for name, text in documents.items():
            (tmp_path / name).write_text(text)
        added = [insert(broker, "--file", str(tmp_path / name)).lines[0]["added"] for name in documents]
        assert added == [3, 1, 1, 1]
        assert csv(broker, "SELECT ?name { <Agent_X> <http://e/knows>/<http://e/name> ?name }") == ["Y"]
        heights = "SELECT ?s ?h { GRAPH <garden> { ?s <height> ?h } } ORDER BY ?h"
        assert csv(broker, heights) == ["tree,3", "my tree,4"]

    def test_a_long_file_of_lines_is_sent_in_parts(self, broker: BrokerProcess, tmp_path: Path) -> None:
        file = tmp_path / "many.nt"
        file.write_text("".join(f'<http://e/{n}> <http://e/p> "{n}" .\n' for n in range(40_000)))
        assert file.stat().st_size > 1024 * 1024
        assert insert(broker, "--file", str(file)).lines == [{"added": 40_000, "removed": 0}]
        assert csv(broker, "SELECT (COUNT(*) AS ?n) { ?s ?p ?o }") == ["40000"]

    @pytest.mark.parametrize(
        ("arguments", "code"),
        [
            ([], "C417"),
            (["s", "p"], "C417"),
            (["s", "p", "o", "--update", "CLEAR ALL"], "C417"),
            (["--update", "SELECT"], "K102"),
            (["--file", "/nonexistent.ttl"], "K123"),
            (["--file", "facts.doc"], "K120"),
        ],
    )
    def test_what_is_wrong_is_told(self, broker: BrokerProcess, arguments: list[str], code: str) -> None:
        done = insert(broker, *arguments)
        assert (done.code, done.out) == (2, "")
        assert code in done.err

    def test_a_document_that_is_malformed_changes_nothing(self, broker: BrokerProcess, tmp_path: Path) -> None:
        file = tmp_path / "bad.ttl"
        file.write_text("<a> <b> 1 . <a> <b>")
        done = insert(broker, "--file", str(file))
        assert "K123" in done.err
        assert csv(broker) == []


class TestQuery:
    def test_every_format(self, broker: BrokerProcess) -> None:
        insert(broker, "hall", "is", "warm")
        (answer,) = query(broker, EVERYTHING).lines
        assert answer["results"]["bindings"][0]["o"] == {"type": "literal", "value": "warm"}
        assert "<literal>warm</literal>" in query(broker, EVERYTHING, "--format", "xml").out
        assert csv(broker) == ["hall,is,warm"]
        construct = "CONSTRUCT { ?s ?p ?o } { ?s ?p ?o }"
        assert query(broker, construct).out == '<hall> <is> "warm" .\n'
        assert query(broker, construct, "--format", "ntriples").out == '<hall> <is> "warm" .\n'
        assert "K121" in query(broker, construct, "--format", "csv").err

    def test_a_table_for_people(self, broker: BrokerProcess) -> None:
        insert(broker, "hall", "is", "warm \x1b[31m")
        with Running("query", "SELECT ?s ?o { ?s ?p ?o }", "--http", broker.http, on_terminal=True) as running:
            shown = running.wait_for("hall")
            shown += running.finish().out
        assert shown.split()[:2] == ["s", "o"]
        assert "\x1b[31m" not in shown, "data cannot steer the terminal"

    def test_follow_tells_what_changes_and_goes_on_after_a_restart(self) -> None:
        with BrokerProcess(has_knowledge=True) as mortal:
            insert(mortal, "s", "p", "1")
            with Running("query", "SELECT ?o { <s> <p> ?o }", "--follow", "--http", mortal.http) as running:
                running.wait_for('"result":[{"o":')
                insert(mortal, "s", "p", "2")
                assert '"sequence":1' in running.wait_for('"merged":0')
                mortal.kill()
                mortal.start()
                assert '"value":"2"' in running.wait_for('"reset":true')
                insert(mortal, "s", "p", "3")
                running.wait_for('"value":"3"')
                running.interrupt()
                assert running.finish().code == 130

    def test_a_named_query_is_kept_listed_and_dropped(self, broker: BrokerProcess) -> None:
        text = "SELECT ?o { <s> <p> ?o }"
        with Running("query", text, "--follow", "--name", "board", "--http", broker.http) as running:
            running.wait_for('"result":[]')
            running.interrupt()
            assert running.finish().code == 130
        insert(broker, "s", "p", "1")
        with Running("query", "--follow", "--name", "board", "--http", broker.http) as running:
            # In the result or as an indication after it, because queries are evaluated concurrently with changes.
            running.wait_for('"value":"1"')
            insert(broker, "s", "p", "2")
            running.wait_for('"value":"2"')
            assert query(broker, "--list").lines == [{"name": "board", "query": text, "is_followed": True}]
            assert query(broker, "--drop", "board").code == 0
            ended = running.finish()
            assert (ended.code, "K127" in ended.err) == (2, True)
        assert query(broker, "--list").out == ""

    @pytest.mark.parametrize(
        ("arguments", "code"),
        [
            (["--drop", "nobody"], "K127"),
            (["--follow", "--name", "nobody"], "K127"),
            (["ASK {}", "--name", "x"], "C417"),
            (["ASK {}", "--list"], "C417"),
            ([], "C417"),
            (["SELECT"], "K102"),
            (["CLEAR ALL"], "K119"),
            (["ASK {}", "--follow", "--format", "csv"], "C417"),
            (["CONSTRUCT { ?s ?p 1 } { ?s ?p ?o }", "--follow"], "K116"),
        ],
    )
    def test_what_is_wrong_is_told(self, broker: BrokerProcess, arguments: list[str], code: str) -> None:
        done = query(broker, *arguments)
        assert (done.code, done.out) == (2, "")
        assert code in done.err

    def test_nobody_answers(self) -> None:
        for command in (["query", "ASK {}"], ["query", "ASK {}", "--follow"], ["insert", "s", "p", "o"]):
            done = tidegate(*command, "--http", "http://127.0.0.1:1")
            assert done.code == 2
            assert "U701" in done.err
        assert "C411" in tidegate("query", "ASK {}", "--http", "127.0.0.1:7271").err

    def test_a_token(self) -> None:
        token = {"TIDEGATE_TOKEN": "a-token-that-is-long-enough"}
        with BrokerProcess(environment=token, has_knowledge=True) as broker:
            assert "A501" in query(broker, "ASK {}").err
            assert tidegate("query", "ASK {}", "--http", broker.http, environment=token).lines[0]["boolean"] is True


def test_a_dump_restores_the_graph(tmp_path: Path) -> None:
    file = tmp_path / "facts.nq"
    with BrokerProcess(has_knowledge=True) as broker:
        insert(broker, "my hall", "is", "warm")
        insert(broker, "--update", "INSERT DATA { GRAPH <g> { <a> <b> 1 } }")
        refused = tidegate("knowledge", "dump", str(file), "--data", broker.data)
        assert "K107" in refused.err, "a broker is running"
        broker.terminate()
        assert tidegate("knowledge", "dump", str(file), "--data", broker.data).code == 0
        broker.start()
        insert(broker, "my hall", "is", "cold")
        insert(broker, "--update", "CLEAR GRAPH <g>")
        broker.terminate()
        restored = tidegate("knowledge", "restore", str(file), "--data", broker.data)
        assert "1 triples added, 1 removed, 2 in total" in restored.err
        broker.start()
        assert csv(broker) == ["my hall,is,warm"]
        assert csv(broker, "SELECT ?o { GRAPH <g> { ?s ?p ?o } }") == ["1"]


def test_a_dump_of_nothing_is_an_error(tmp_path: Path) -> None:
    done = tidegate("knowledge", "dump", str(tmp_path / "x.nq"), "--data", str(tmp_path / "nowhere"))
    assert done.code == 2
    assert "K107" in done.err
    assert not (tmp_path / "nowhere").exists()
