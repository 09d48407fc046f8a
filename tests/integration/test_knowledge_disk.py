"""The knowledge base on a full, damaged or missing disk: confirmed changes are kept, and others are refused.

A limit on the file size simulates a full disk: it needs no privileges, and can be set for a running process.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from broker_process import BrokerProcess, clean_environment
from command import command_line, tidegate
from http_client import code_of, metrics, open_client
from ssap_world import Kp, graph_of, masks, sparql, status, text_of, triples_of

from tidegate.knowledge.graph import Graph
from tidegate.knowledge.store_identity import check_identity, record_of
from tidegate.knowledge.terms import Literal, Mask, Triple, Uri

ANY = "http://www.nokia.com/NRC/M3/sib#any"
EVERYTHING = masks((ANY, ANY, ANY))
SUCCESS = "m3:Success"
OUT_OF_RESOURCES = "m3:SIB.Failure.OutOfResources"
WAIT_S = 60
FILE_BYTES = 256 * 1024
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_full_disk_refuses_changes_and_nothing_else_until_there_is_room() -> None:
    with BrokerProcess(has_knowledge=True) as broker, open_client(broker) as client, Kp(broker) as kp:
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
        confirmed: set[str] = set()
        answer = None
        for number in range(10_000):
            answer = kp.ask("INSERT", graph_of("insert_graph", (f"s{number}", "p", "x" * 2000)))
            if status(answer) != SUCCESS:
                break
            confirmed.add(f"s{number}")
        assert answer is not None
        assert status(answer) == OUT_OF_RESOURCES
        assert "K131" in text_of(answer, "error")
        assert confirmed
        for update in ("INSERT DATA { <a> <b> 'c' }", "INSERT { <a> <b> ?p } WHERE { <s0> ?p ?o }"):
            assert code_of(client.post("/v1/sparql", data={"update": update})) == (507, "K131")
        assert code_of(client.get("/readyz")) == (503, "K131")
        assert client.get("/healthz").is_success
        counted = metrics(client)
        assert (counted["knowledge_writable"], counted["knowledge_store_failures_total"] >= 1) == (0, True)
        assert {s for s, _, _ in triples_of(kp.ask("QUERY", EVERYTHING), "results")} == confirmed
        assert status(kp.ask("QUERY", sparql("SELECT ?s { ?s <p> ?o }"))) == SUCCESS
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, UNLIMITED)
        until(lambda: client.get("/readyz").is_success)
        assert status(kp.ask("INSERT", graph_of("insert_graph", ("after", "p", "1")))) == SUCCESS
        assert metrics(client)["knowledge_writable"] == 1
        broker.kill()
        broker.start()
        with Kp(broker) as kp_again:
            kept = {s for s, _, _ in triples_of(kp_again.ask("QUERY", EVERYTHING), "results")}
        assert kept == confirmed | {"after"}


def test_a_store_on_a_full_disk_is_opened_for_reading(tmp_path: Path) -> None:
    """The log is longer than the file size limit, so it cannot be written as tables."""
    graph = Graph(tmp_path / "graph")
    graph.change((), (Triple(Uri(f"s{number}"), Uri("p"), Literal(f"{number}" + "x" * 500)) for number in range(2000)))
    del graph
    script = f"""
import resource
from tidegate.errors import TidegateError
from tidegate.knowledge.graph import Graph
from tidegate.knowledge.terms import Literal, Mask, Triple, Uri
resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES}, resource.RLIM_INFINITY))
graph = Graph({str(tmp_path / "graph")!r})
print(graph.failure.code, len(graph), len(graph.triples([Mask(Uri("s7"))])))
try:
    graph.change((), [Triple(Uri("a"), Uri("p"), Literal("1"))])
except TidegateError as error:
    print(error.code, len(graph))
graph.reopen()
print(graph.failure.code)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
graph.reopen()
print(graph.failure, len(graph.change((), [Triple(Uri("a"), Uri("p"), Literal("1"))]).added), len(graph))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.stdout.splitlines() == ["K131 2000 1", "K131 2000", "K131", "None 1 2001"], done.stderr


def kept_broker(data: Path) -> None:
    """Runs a broker once, and leaves its data directory behind."""
    serve(data, lambda: None)


def serve(data: Path, before_end: Callable[[], None]) -> None:
    with subprocess.Popen(
        command_line("serve", "--data", str(data), *ports()),
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline()
            before_end()
        finally:
            process.terminate()
        assert process.wait(WAIT_S) == 0


def ports() -> tuple[str, ...]:
    return "--native-port", "0", "--http-port", "0", "--ssap-port", "0"


def filled(directory: Path) -> None:
    graph = Graph(directory)
    graph.change((), (Triple(Uri(f"s{number}"), Uri("p"), Literal(f"{number}" + "x" * 100)) for number in range(3000)))
    graph.flush()


def spoil(file: Path) -> None:
    """Overwrites bytes in the middle of a file, in place."""
    size = file.stat().st_size
    with file.open("r+b") as written:
        written.seek(size // 3)
        written.write(os.urandom(min(2000, size // 3)))


def largest(directory: Path, pattern: str) -> Path:
    return max(directory.glob(pattern), key=lambda file: file.stat().st_size)


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "CURRENT is garbage": lambda directory: spoil(directory / "triples" / "CURRENT"),
    "CURRENT is missing": lambda directory: (directory / "triples" / "CURRENT").unlink(),
    "a manifest is missing": lambda directory: largest(directory, "triples/MANIFEST-*").unlink(),
    "a table is missing": lambda directory: largest(directory, "triples/*.sst").unlink(),
    "a table is cut": lambda directory: os.truncate(largest(directory, "triples/*.sst"), 1000),
    "the volume is not mounted": empty,
    "the directory is missing": shutil.rmtree,
    "the store is missing": lambda directory: shutil.rmtree(directory / "triples"),
}


def test_a_damaged_or_missing_knowledge_base_is_named_with_its_cure(tmp_path: Path) -> None:
    """The broker does not start, and the remedy it names is to restore a dump."""
    intact = tmp_path / "intact"
    filled(intact / "knowledge")
    kept_broker(intact)
    dump = tmp_path / "facts.nq"
    assert tidegate("knowledge", "dump", str(dump), "--data", str(intact)).code == 0
    for number, (name, damage) in enumerate(DAMAGES.items()):
        data = tmp_path / str(number)
        shutil.copytree(intact, data)
        damage(data / "knowledge")
        outcome = tidegate("serve", "--data", str(data), *ports())
        assert (outcome.code != 0, outcome.out) == (True, ""), name
        assert "K107" in outcome.err, name
        assert str(data / "knowledge") in outcome.err, name
        assert "tidegate knowledge restore" in outcome.err, name
        assert "Traceback" not in outcome.err, name
    shutil.rmtree(data / "knowledge", ignore_errors=True)
    assert tidegate("knowledge", "restore", str(dump), "--data", str(data)).code == 0
    check_identity(data / "knowledge")
    assert len(Graph(data / "knowledge")) == 3000


def test_a_knowledge_base_from_before_identities_gets_one_and_another_one_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "knowledge")
    assert not record_of(tmp_path / "knowledge").exists()
    kept_broker(tmp_path)
    assert record_of(tmp_path / "knowledge").exists()
    kept_broker(tmp_path / "other")
    shutil.rmtree(tmp_path / "knowledge")
    shutil.copytree(tmp_path / "other" / "knowledge", tmp_path / "knowledge")
    outcome = tidegate("serve", "--data", str(tmp_path), *ports())
    assert "K107" in outcome.err


@pytest.mark.parametrize("is_sparql", [False, True])
def test_damage_that_is_found_while_it_runs_is_an_answer(is_sparql: bool) -> None:
    with BrokerProcess(has_knowledge=True) as broker:
        broker.kill()
        directory = Path(broker.data) / "knowledge"
        shutil.rmtree(directory)
        record_of(directory).unlink()
        filled(directory)
        broker.start()
        spoil(largest(directory, "triples/*.sst"))
        with open_client(broker) as client, Kp(broker) as kp:
            if is_sparql:
                query = "SELECT ?s ?o { ?s <p> ?o }"
                assert code_of(client.get("/v1/sparql", params={"query": query})) == (503, "K130")
            else:
                answer = kp.ask("QUERY", EVERYTHING)
                assert status(answer) == "m3:SIB.Error"
                assert "K130" in text_of(answer, "error")
            assert client.get("/healthz").is_success
            assert metrics(client)["knowledge_store_damages_total"] >= 1
            assert status(kp.ask("JOIN")) == SUCCESS


@pytest.mark.parametrize(("durability", "is_synced"), [("fsync", True), ("os", False)])
def test_the_durability_of_changes_is_a_choice(durability: str, is_synced: bool) -> None:
    with (
        BrokerProcess("--knowledge-durability", durability, has_knowledge=True) as broker,
        open_client(broker) as client,
        Kp(broker) as kp,
    ):
        for number in range(5):
            assert status(kp.ask("INSERT", graph_of("insert_graph", ("s", "p", str(number))))) == SUCCESS
        # Each was confirmed before the next was sent, so none could share a sync.
        assert metrics(client)["knowledge_syncs_total"] == (5 if is_synced else 0)
        # The files right after the confirmation contain all five.
        copy = Path(broker.data) / "copy"
        shutil.copytree(Path(broker.data) / "knowledge", copy)
        assert len(Graph(copy).triples([Mask(Uri("s"))])) == 5
