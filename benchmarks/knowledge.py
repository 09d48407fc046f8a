"""The knowledge base: SPARQL in workers and in the broker's own process, and the cost of changes and triples.

Measured:

* a quick query and an update, with a worker and without, on an unchanged graph and with a change before each;
* a change with 10,000 mask subscriptions and with none;
* inserts that are pipelined on one SSAP connection;
* a graph of a million triples: its memory, and the time to reopen it and to start its first worker.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import pyoxigraph

from benchmarks.job import QUICK, Effort, show_progress
from benchmarks.knowledge_clients import PIPELINED, pipeline
from benchmarks.processes import Line, Worker, cpu_s, resident_bytes, tree_cpu_s
from benchmarks.tables import ratio, write_table
from tidegate.knowledge import question as questions
from tidegate.knowledge.graph import Graph
from tidegate.knowledge.knowledge_base import AskJob, ChangeJob, Job, KnowledgeBase, UpdateJob
from tidegate.knowledge.persistent_query import PersistentQueries
from tidegate.knowledge.question import SparqlQuery
from tidegate.knowledge.store_opening import DUMP, GRAPHS, KINDS, TRIPLES
from tidegate.knowledge.terms import Literal, Mask, Masks, Triple, Uri
from tidegate.listeners.ssap import SsapListener

SUBJECTS: Final = 1000
SUBSCRIPTIONS: Final = 10_000
TRIPLES_MANY: Final = 1_000_000
TRIPLES_QUICK: Final = 100_000
CLIENTS: Final = 4
_ROUNDS_MAX: Final = 3
_P: Final = Uri("http://example.org/p0")
_NOTES: Final = (
    "medians of {rounds} interleaved rounds; every query has a different text, so that the cache answers none",
    "in the process: the graph alone, without a request pool; wall clock, one request after another",
    "masks: CPU of the graph and the persistent queries; the subscriptions are to other subjects",
)


def run(effort: Effort) -> str:
    rounds = min(effort.rounds, _ROUNDS_MAX)
    told = [note.format(rounds=rounds) for note in _NOTES]
    return "\n".join(
        [
            _workers_table(rounds, 300 if effort == QUICK else 1000, told),
            _masks_table(rounds, 1000 if effort == QUICK else 3000),
            _ssap_table(rounds),
            _million_table(TRIPLES_QUICK if effort == QUICK else TRIPLES_MANY),
        ]
    )


# SPARQL with a worker and without.


def _workers_table(rounds: int, count: int, notes: list[str]) -> str:
    runs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds):
        for store in ("memory", "disk"):
            show_progress(f"round {number + 1}  workers, {store}")
            with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as made:
                measured = asyncio.run(_compare(Path(made) / "graph" if store == "disk" else None, count))
            for what, figures in measured.items():
                runs.setdefault((store, what), []).append(figures)
    rows = []
    for (store, what), pairs in runs.items():
        here, there = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
        rows.append([f"{what}, {store}", f"{here:.0f}", f"{there:.0f}", ratio(there, here), f"{1e6 / there:,.0f}"])
    head = ("request", "in the process us", "with a worker us", "worker / process", "with workers/s")
    return write_table("SPARQL in workers", head, rows, notes)


async def _compare(directory: Path | None, count: int) -> dict[str, tuple[float, float]]:
    graph = Graph(directory)
    graph.change((), [_triple(number) for number in range(SUBJECTS)])
    knowledge = KnowledgeBase(graph)
    texts = _texts()

    async def do(job: Job) -> None:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        knowledge.submit("KP", job, lambda answer, _: future.set_result(answer))
        answer = await future
        if isinstance(answer, Exception):
            raise answer

    async def ask() -> None:
        await do(AskJob(SparqlQuery(next(texts))))

    async def ask_all(of: int) -> None:
        for _ in range(of):
            await ask()

    async def change_and_ask(number: int) -> None:
        await do(ChangeJob((Mask(_subject(number), _P),), (_triple(number, str(next(numbers))),)))
        await ask()

    def change_and_ask_here(number: int) -> None:
        graph.change((Mask(_subject(number), _P),), (_triple(number, str(next(numbers))),))
        questions.ask(graph, SparqlQuery(next(texts)))

    numbers = iter(range(10**9))
    try:
        await asyncio.gather(*(ask_all(1) for _ in range(CLIENTS)))  # starts the workers
        measured = {
            "query": (
                _each_us(lambda _: questions.ask(graph, SparqlQuery(next(texts))), count),
                await _each_later_us(lambda _: ask(), count),
            )
        }
        began_s = time.perf_counter()
        await asyncio.gather(*(ask_all(count // CLIENTS) for _ in range(CLIENTS)))
        spent_us = (time.perf_counter() - began_s) / (count // CLIENTS * CLIENTS) * 1e6
        measured[f"query, {CLIENTS} clients"] = (measured["query"][0], spent_us)
        later_us = await _each_later_us(change_and_ask, count)
        await knowledge.stop()
        knowledge = KnowledgeBase(graph)
        measured["change and query"] = (_each_us(change_and_ask_here, count), later_us)
        await do(UpdateJob(_update(0, "again")))
        later_us = await _each_later_us(lambda number: do(UpdateJob(_update(number, f"{number}x"))), count)
        here_us = _each_us(lambda number: graph.update(_update(number, f"{number}y")), count)
        measured["update with WHERE"] = (here_us, later_us)
    finally:
        await knowledge.stop()
    return measured


def _each_us(act: Callable[[int], object], count: int) -> float:
    began_s = time.perf_counter()
    for number in range(count):
        act(number)
    return (time.perf_counter() - began_s) / count * 1e6


async def _each_later_us(act: Callable[[int], Awaitable[None]], count: int) -> float:
    began_s = time.perf_counter()
    for number in range(count):
        await act(number)
    return (time.perf_counter() - began_s) / count * 1e6


def _subject(number: int) -> Uri:
    return Uri(f"http://example.org/s{number % SUBJECTS}")


def _triple(number: int, value: str = "x") -> Triple:
    return Triple(_subject(number), _P, Literal(value))


def _texts() -> Iterator[str]:
    number = 0
    while True:
        yield f"SELECT ?o {{ <{_subject(number).text}> <{_P.text}> ?o . BIND({number} AS ?n) }}"
        number += 1


def _update(number: int, value: str) -> str:
    about = f"<{_subject(number).text}> <{_P.text}>"
    return f"DELETE {{ {about} ?o }} INSERT {{ {about} '{value}' }} WHERE {{ {about} ?o }}"


# Changes with mask subscriptions.


def _masks_table(rounds: int, count: int) -> str:
    graph = Graph()
    runs: dict[int, list[float]] = {}
    worlds = {subscriptions: _subscribed(graph, subscriptions) for subscriptions in (0, SUBSCRIPTIONS)}
    numbers = iter(range(10**9))
    for number in range(rounds + 1):  # the first is a warm-up
        for subscriptions, queries in worlds.items():
            show_progress(f"round {number}  {subscriptions:,} mask subscriptions")
            began_s = time.process_time()
            for _ in range(count):
                value = next(numbers)
                queries.on_change(graph.change((Mask(_subject(value), _P),), (_triple(value, str(value)),)))
            if number:
                runs.setdefault(subscriptions, []).append((time.process_time() - began_s) / count * 1e6)
    none_us = median(runs[0])
    rows = [[f"{each:,}", f"{median(figures):.1f}", ratio(median(figures), none_us)] for each, figures in runs.items()]
    return write_table("A change that replaces a triple", ("mask subscriptions", "CPU us", "this / none"), rows)


def _subscribed(graph: Graph, subscriptions: int) -> PersistentQueries:
    queries = PersistentQueries(
        lambda question: questions.ask(graph, question), lambda question: questions.masks_of(graph, question)
    )
    for number in range(subscriptions):
        mask = Mask(Uri(f"http://example.org/other{number}"), _P)
        queries.subscribe(str(number), f"owner {number % 100}", Masks((mask,)))
    return queries


# SSAP.


def _ssap_table(rounds: int) -> str:
    rates, used_us = [], []
    with Worker(_serve_ssap) as server:
        port = server.wait_ready()
        pipeline(port, "insert", "warm")
        for number in range(rounds):
            show_progress(f"round {number + 1}  pipelined inserts")
            before_s = cpu_s(server.pid)
            rates.append(pipeline(port, "insert", str(number)))
            used_us.append((cpu_s(server.pid) - before_s) / PIPELINED * 1e6)
        server.kill()
    row = [f"{PIPELINED:,}", f"{median(rates):,.0f}", f"{median(used_us):.0f}"]
    return write_table(
        "Inserts, pipelined on one SSAP connection, in memory and without a broker",
        ("inserts", "inserts/s", "server CPU us"),
        [row],
    )


def _serve_ssap(line: Line) -> None:
    async def serve() -> None:
        line.ready(await SsapListener(KnowledgeBase(Graph())).start("127.0.0.1", 0))
        await asyncio.Event().wait()

    asyncio.run(serve())


# Many triples.


def _million_table(count: int) -> str:
    rows = []
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as made:
        for store in ("memory", "disk"):
            show_progress(f"{count:,} triples, {store}")
            directory = Path(made) / store
            with Worker(_make, directory, store, count) as maker:
                maker.result()
            with Worker(_open, directory, store) as opened:
                opened_s, first_s, next_s, bytes_used, bytes_of_worker = opened.result()
            rows.append(
                [
                    store,
                    f"{count:,}",
                    f"{opened_s:.2f}",
                    f"{bytes_used / 1e6:.0f}",
                    f"{bytes_of_worker / 1e6:.0f}",
                    f"{first_s:.2f}",
                    f"{next_s * 1e3:.1f}",
                ]
            )
    head = ("store", "triples", "opened in s", "MB", "MB of a worker", "first SPARQL s", "next ms")
    notes = ["a graph in memory is opened by reading a dump; the first SPARQL includes the start of a worker"]
    return write_table("Many triples", head, rows, notes)


def _make(_: Line, directory: Path, store: str, count: int) -> None:
    """Writes the triples as a broker does: a dump with its literal kinds, or a store that was opened once."""
    directory.mkdir()
    lines = b"".join(
        f"<http://example.org/s{number // 10}> <http://example.org/p{number % 10}> "
        f'"{number * 7919 % 100_003}" .\n'.encode()
        for number in range(count)
    )
    if store == "memory":
        (directory / DUMP).write_bytes(lines)
        (directory / KINDS).write_bytes(msgspec.json.encode([("", "")]))
        (directory / GRAPHS).write_bytes(b"[]")
    else:
        pyoxigraph.Store(directory / TRIPLES).bulk_load(lines, pyoxigraph.RdfFormat.N_TRIPLES)
        Graph(directory)


def _open(_: Line, directory: Path, store: str) -> tuple[float, float, float, int, int]:
    began_s = time.perf_counter()
    graph = Graph.open_copy(directory) if store == "memory" else Graph(directory)
    opened_s = time.perf_counter() - began_s

    async def ask(knowledge: KnowledgeBase, text: str) -> float:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        began_s = time.perf_counter()
        knowledge.submit("KP", AskJob(SparqlQuery(text)), lambda answer, _: future.set_result(answer))
        assert len((await future).rows) == 1
        return time.perf_counter() - began_s

    async def run_queries() -> tuple[float, float, int, int]:
        knowledge, texts = KnowledgeBase(graph), _texts()
        try:
            first_s = await ask(knowledge, next(texts))
            next_s = median([await ask(knowledge, next(texts)) for _ in range(100)])
            (worker,) = tree_cpu_s(os.getpid()).keys() - {os.getpid()}
            return first_s, next_s, resident_bytes(os.getpid()), resident_bytes(worker)
        finally:
            await knowledge.stop()

    return opened_s, *asyncio.run(run_queries())
