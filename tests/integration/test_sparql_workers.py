"""SPARQL in worker processes: the same answers as in one process, and no input from outside does harm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from seeds import in_tiers
from sparql_texts import PROLOGUE, SparqlTexts

from tidegate.errors import KnowledgeError, TidegateError, Unavailable
from tidegate.knowledge import sparql_workers
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.knowledge_base import AskJob, ChangeJob, Job, KnowledgeBase, Subscribed, SubscribeJob, UpdateJob
from tidegate.knowledge.question import Question, Result, SparqlQuery, ask
from tidegate.knowledge.request_pool import PoolSettings
from tidegate.knowledge.sparql import QUERY_CHARACTERS_MAX, UPDATE_CHARACTERS_MAX, is_update
from tidegate.knowledge.sparql_worker import GRACE_S
from tidegate.knowledge.sparql_workers import SparqlLimits
from tidegate.knowledge.terms import Literal, Mask, Masks, Triple, Uri

WAIT_S = 60
ENDLESS = "{ ?a ?b ?c . ?d ?e ?f . ?g ?h ?i . ?j ?k ?l }"
TRIPLES = 300  # enough to make ENDLESS never finish


class World:
    def __init__(self, directory: Path | None, limits: SparqlLimits | None, settings: PoolSettings | None) -> None:
        self.graph = Graph(directory)
        self.knowledge = KnowledgeBase(self.graph, settings, limits=limits)

    def submit(self, job: Job, kp: str = "KP") -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.knowledge.submit(kp, job, lambda answer, _: future.set_result(answer))
        return future

    async def do(self, job: Job) -> Any:
        async with asyncio.timeout(WAIT_S):
            answer = await self.submit(job)
        if isinstance(answer, TidegateError):
            raise answer
        return answer

    async def ask(self, text: str) -> Result:
        result = await self.do(AskJob(SparqlQuery(text)))
        assert isinstance(result, Result)
        return result

    async def insert(self, subject: str, value: str = "x") -> Delta:
        delta = await self.do(ChangeJob((), (triple(subject, value),)))
        assert isinstance(delta, Delta)
        return delta

    async def count(self) -> int:
        result = await self.ask("SELECT * { ?s ?p ?o }")
        return len(result.rows)


@contextlib.asynccontextmanager
async def running(
    directory: Path | None = None, limits: SparqlLimits | None = None, settings: PoolSettings | None = None
) -> AsyncIterator[World]:
    world = World(directory, limits, settings)
    try:
        yield world
    finally:
        await world.knowledge.stop()


def triple(subject: str, value: str = "x") -> Triple:
    return Triple(Uri(f"http://e/{subject}"), Uri("http://e/p"), Literal(value))


def worker_pids(parent: int | None = None) -> set[int]:
    """Returns the pids of the workers that this process, or another one, has started."""
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (directory / "cmdline").read_bytes()
            parent_pid = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if b"tidegate.knowledge.sparql_worker" in command and parent_pid == (parent or os.getpid()):
                found.add(int(directory.name))
    return found


async def fill(world: World, count: int = TRIPLES) -> None:
    await world.do(ChangeJob((), tuple(triple(f"s{number}", str(number)) for number in range(count))))


async def evaluated(world: World) -> None:
    """Waits until no open query is stale."""
    await until(lambda: world.knowledge.queries.statistics().stale == 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(params=["memory", "disk"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "graph" if request.param == "disk" else None


@pytest.mark.parametrize("seed", in_tiers(2, 6))
def test_answers_and_deltas_are_those_of_one_process(
    directory: Path | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With odd seeds, workers are ended frequently, because they are behind or idle."""
    if seed % 2:
        monkeypatch.setattr(sparql_workers, "UNSENT_BYTES", 500)
        monkeypatch.setattr(sparql_workers, "UNSENT_BYTES_MAX", 1500)
        monkeypatch.setattr(sparql_workers, "IDLE_CHANGES_MAX", 5)
    texts, rng, oracle = SparqlTexts(seed), random.Random(seed), Graph()

    async def run() -> None:
        async with running(directory) as world:
            for _ in range(60 if seed % 2 == 0 else 25):
                text = texts.update() if rng.random() < 0.5 else texts.query()
                wanted = in_one_process(oracle, text)
                got = await world.submit(UpdateJob(text) if is_update(text) else AskJob(SparqlQuery(text)))
                if "LIMIT" in text and isinstance(wanted, Result):  # it is undefined which rows remain
                    assert len(got.rows) == len(wanted.rows)
                else:
                    assert comparable(got) == comparable(wanted), text
            assert set(world.graph.triples([Mask()])) == set(oracle.triples([Mask()]))

    asyncio.run(run())


def in_one_process(graph: Graph, text: str) -> Delta | Result | KnowledgeError:
    try:
        return graph.update(text) if is_update(text) else ask(graph, SparqlQuery(text))
    except KnowledgeError as error:
        return error


def comparable(outcome: Delta | Result | KnowledgeError) -> object:
    match outcome:
        case Delta():
            return set(outcome.added), set(outcome.removed)
        case Result():
            return outcome.shape, outcome.variables, Counter(outcome.rows)
    return outcome.code


def test_an_answer_shows_every_change_that_was_confirmed_before(directory: Path | None) -> None:
    """This also holds if a worker's copy is made during changes, and if workers are killed meanwhile."""

    async def run() -> None:
        confirmed = 0

        async def write(world: World) -> None:
            nonlocal confirmed
            while confirmed < 400:
                await world.insert(f"s{confirmed}")
                confirmed += 1
                await asyncio.sleep(0.001)

        async def read(world: World) -> None:
            while confirmed < 400:
                await asyncio.sleep(0)  # a cached answer waits for nothing
                least = confirmed
                answer = await world.submit(AskJob(SparqlQuery("SELECT * { ?s ?p ?o }")))
                assert len(answer.rows) >= least if isinstance(answer, Result) else answer.code in ("K143", "K144")

        async with running(directory) as world, asyncio.TaskGroup() as group:
            group.create_task(write(world))
            for _ in range(3):
                group.create_task(read(world))
            while confirmed < 300:
                for pid in worker_pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(1.0)
        assert len(world.graph) == confirmed

    asyncio.run(run())


def test_a_query_that_never_ends_is_ended_and_holds_up_nobody(directory: Path | None) -> None:
    async def run() -> None:
        limits, settings = SparqlLimits(time_max_s=2.0), PoolSettings(query_workers=1)
        async with running(directory, limits, settings) as world:
            await fill(world)
            endless = world.submit(AskJob(SparqlQuery(f"SELECT (COUNT(*) AS ?n) {ENDLESS}")))
            await until(lambda: len(worker_pids()) == 1)
            (pid,) = worker_pids()
            while not endless.done():
                assert len((await world.do(AskJob(Masks((Mask(Uri("http://e/s1")),))))).rows) == 1
                await world.insert("more", str(random.random()))
                await asyncio.sleep(0.05)
            error = endless.result()
            assert isinstance(error, KnowledgeError)
            assert (error.code, "2 s" in error.message) == ("K140", True)
            await until(lambda: pid not in worker_pids())
            assert await world.count() == len(world.graph)
            assert world.knowledge.workers.statistics().killed == 1

    asyncio.run(run())


def test_a_worker_that_was_killed_while_nobody_asked_is_replaced_unnoticed(directory: Path | None) -> None:
    async def run() -> None:
        async with running(directory) as world:
            await fill(world)
            update = UpdateJob("DELETE { ?s ?p ?o } INSERT { ?s ?p 'changed' } WHERE { ?s ?p ?o FILTER(?o = '7') }")
            assert await world.count() == TRIPLES
            assert len((await world.do(update)).added) == 1
            for pid in worker_pids():
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.3)  # the event loop must not notice their end before it asks them
            result, delta = await asyncio.gather(
                world.do(AskJob(SparqlQuery("SELECT ?s { ?s ?p 'changed' }"))), world.do(update)
            )
            assert (len(result.rows), len(delta.added)) == (1, 0)
            assert world.knowledge.workers.statistics().killed == 0

    asyncio.run(run())


def test_what_ends_two_workers_is_refused() -> None:
    async def run() -> None:
        # On a busy machine, the time limit of a query may pass before its worker has had enough CPU time.
        async with running(limits=SparqlLimits(time_max_s=2 * WAIT_S)) as world:
            await fill(world)
            asked = world.submit(AskJob(SparqlQuery(f"SELECT (COUNT(*) AS ?n) {ENDLESS}")))
            for _ in range(2):
                await until(lambda: any(_has_begun(pid) for pid in worker_pids()))
                # Not both, because the query may move to the other worker in between, which would be the second crash.
                [busy] = [pid for pid in worker_pids() if _has_begun(pid)]
                os.kill(busy, signal.SIGKILL)
                await until(lambda: not any(_has_begun(pid) for pid in worker_pids()))
            assert (await asked).code == "K143"
            assert await world.count() == TRIPLES

    asyncio.run(run())


def _has_begun(pid: int) -> bool:
    """Returns whether a worker has used more CPU time than its start takes."""
    with contextlib.suppress(OSError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
        return ticks > 1.5 * os.sysconf("SC_CLK_TCK")
    return False


def test_limits_of_memory_rows_and_text(directory: Path | None) -> None:
    doubled = "".join(f"BIND(CONCAT(?x{n}, ?x{n}) AS ?x{n + 1}) " for n in range(1, 40))

    async def run() -> None:
        limits = SparqlLimits(WAIT_S, 1000, WAIT_S, 100, memory_max_bytes=100 << 20)
        async with running(directory, limits) as world:
            await fill(world)
            for text, code in (
                (f"SELECT ?x40 {{ BIND('{'x' * 1000}' AS ?x1) {doubled} }}", "K141"),
                ("SELECT * { ?a ?b ?c . ?d ?e ?f . ?g ?h ?i }", "K109"),
                ("CONSTRUCT { ?a ?b ?c , ?f, ?i } { ?a ?b ?c . ?d ?e ?f . ?g ?h ?i }", "K109"),
                ("SELECT * { FILTER(" + 5000 * "(" + "1" + 5000 * ")" + ") }", "K142"),
                (5000 * "[" + "]" * 5000, "K142"),
                ("SELECT * {} #" + QUERY_CHARACTERS_MAX * "x", "K142"),
            ):
                with pytest.raises(KnowledgeError) as caught:
                    await world.ask(text)
                assert caught.value.code == code, text[:80]
                with pytest.raises(KnowledgeError) as caught:
                    await world.do(SubscribeJob(SparqlQuery(text), lambda: None))
                assert caught.value.code == code, text[:80]
            assert world.knowledge.queries.statistics().subscriptions == 0
            with pytest.raises(KnowledgeError) as caught:
                await world.do(UpdateJob("INSERT DATA {} #" + UPDATE_CHARACTERS_MAX * "x"))
            assert caught.value.code == "K142"
            assert len((await world.ask("SELECT * { ?s ?p ?o }")).rows) == TRIPLES
            with pytest.raises(KnowledgeError, match="over 100 rows"):
                await world.do(SubscribeJob(SparqlQuery("SELECT * { ?s ?p ?o }"), lambda: None))

    asyncio.run(run())


def test_an_update_that_never_ends_changes_nothing(directory: Path | None) -> None:
    async def run() -> None:
        async with running(directory, SparqlLimits(time_max_s=1.0)) as world:
            await fill(world)
            before = set(world.graph.triples([Mask()]))
            for text in (
                f"INSERT {{ ?a ?b ?l }} WHERE {ENDLESS}",
                f"DELETE WHERE {{ <http://e/s1> ?p ?o }} ; INSERT {{ ?a ?b ?l }} WHERE {ENDLESS}",
                f"CREATE GRAPH <g> ; INSERT {{ GRAPH <g> {{ ?a ?b ?l }} }} WHERE {ENDLESS}",
            ):
                with pytest.raises(KnowledgeError) as caught:
                    await world.do(UpdateJob(text))
                assert caught.value.code == "K140"
                assert set(world.graph.triples([Mask()])) == before
                assert len(world.graph) == len(before)
            delta = await world.do(UpdateJob("DELETE { ?s ?p ?o } WHERE { ?s ?p ?o FILTER(?o = '7') }"))
            assert [found.object.text for found in delta.removed] == ["7"]
            assert await world.count() == TRIPLES - 1

    asyncio.run(run())


def test_a_large_result_comes_whole_and_lets_others_in_between() -> None:
    async def run() -> None:
        async with running(limits=SparqlLimits(time_max_s=WAIT_S)) as world:
            await fill(world, 300)
            large = world.submit(AskJob(SparqlQuery("SELECT * { ?a ?b ?c . ?d ?e ?f }")))
            asked = 0
            while not large.done():
                await world.do(AskJob(Masks((Mask(Uri(f"http://e/s{asked % 300}")),))))
                await asyncio.sleep(0)
                asked += 1
            result = large.result()
            assert isinstance(result, Result)
            assert len(set(result.rows)) == len(result.rows) == 300 * 300
            constructed = await world.ask("CONSTRUCT { ?a <http://e/q> ?f } { ?a ?b ?c . ?d ?e ?f }")
            assert len(set(constructed.rows)) == 300 * 300

    asyncio.run(run())


@pytest.mark.parametrize("is_busy", [False, True])
def test_workers_end_when_the_broker_is_killed(is_busy: bool, tmp_path: Path) -> None:
    text = f"SELECT (COUNT(*) AS ?n) {ENDLESS}" if is_busy else "SELECT * { ?s ?p ?o }"
    script = f"""
import asyncio
from tidegate.knowledge.graph import Graph
from tidegate.knowledge.knowledge_base import AskJob, KnowledgeBase
from tidegate.knowledge.question import SparqlQuery
from tidegate.knowledge.sparql_workers import SparqlLimits

async def run():
    graph = Graph({str(tmp_path / "graph")!r})
    graph.update("INSERT DATA {{ {" ".join(f"<a{n}> <b> <c> ." for n in range(TRIPLES))} }}")
    knowledge = KnowledgeBase(graph, limits=SparqlLimits(time_max_s=3600.0 if {not is_busy} else 4.0))
    knowledge.submit("KP", AskJob(SparqlQuery({text!r})), lambda answer, load: print("answered", flush=True))
    print("asked", flush=True)
    await asyncio.sleep(3600)

asyncio.run(run())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as broker:
        assert broker.stdout is not None
        try:
            assert broker.stdout.readline() == "asked\n"
            if not is_busy:
                assert broker.stdout.readline() == "answered\n"
            deadline_s = time.monotonic() + WAIT_S
            while not (workers := worker_pids(broker.pid)):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
        finally:
            broker.kill()
    assert GRACE_S + 4.0 < WAIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    Graph(tmp_path / "graph")
    assert not (tmp_path / "graph" / "copies").exists()


def test_a_tidy_stop_leaves_nothing_and_tells_who_waits(
    directory: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    async def run() -> None:
        async with running(directory, settings=PoolSettings(query_workers=1)) as world:
            await fill(world)
            await world.count()
            waiting = [world.submit(AskJob(SparqlQuery(f"SELECT ({n} AS ?n) {ENDLESS}"))) for n in range(3)]
            waiting.append(world.submit(UpdateJob(f"INSERT {{ ?a ?b ?l }} WHERE {ENDLESS}")))
            await asyncio.sleep(0.1)
        assert all(isinstance(future.result(), Unavailable) for future in waiting)
        with pytest.raises(Unavailable):
            await world.ask("ASK { <more> ?p ?o }")
        assert not worker_pids()
        assert not [*tmp_path.glob("graph/copies/*"), *tmp_path.glob("temporary/*")]

    asyncio.run(run())


def test_a_worker_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path / "graph") as world:
            (tmp_path / "graph" / "copies").write_text("in the way")
            with pytest.raises(Unavailable) as caught:
                await world.ask("SELECT * { ?s ?p ?o }")
            assert caught.value.code == "K144"
            (tmp_path / "graph" / "copies").unlink()
            assert await world.count() == 0

    asyncio.run(run())


def test_an_open_query_that_becomes_endless_is_ended_and_the_others_are_told(directory: Path | None) -> None:
    """One triple is enough, in a graph that has not grown otherwise."""
    slow = "SELECT (COUNT(*) AS ?n) { <http://e/on> ?p ?o . ?a ?b ?c . ?d ?e ?f . ?g ?h ?i . ?j ?k ?l }"

    async def run() -> None:
        async with running(directory, SparqlLimits(open_time_max_s=1.0)) as world:
            await fill(world)
            news: Counter[str] = Counter()

            async def subscribe(name: str, question: Question) -> str:
                subscribed = await world.do(SubscribeJob(question, lambda: news.update([name])))
                assert isinstance(subscribed, Subscribed)
                return subscribed.subscription_id

            ids = {
                name: await subscribe(name, question)
                for name, question in (
                    ("slow", SparqlQuery(slow)),
                    ("quick", SparqlQuery("SELECT ?o { <http://e/on> ?p ?o }")),
                    ("quicker", SparqlQuery("ASK { <http://e/on> ?p ?o }")),
                    ("mask", Masks((Mask(Uri("http://e/on")),))),
                )
            }
            for value in ("x", "y"):
                assert len((await world.insert("on", value)).added) == 1
                assert "slow" not in news, "a change is confirmed while the question is evaluated"
            while "slow" not in news:
                assert len((await world.do(AskJob(Masks((Mask(Uri("http://e/s1")),))))).rows) == 1
                await world.ask(f"SELECT ({random.random()} AS ?n) {{ ?s ?p 'x' }}")
            await evaluated(world)
            assert news["slow"] == 1
            with pytest.raises(KnowledgeError) as caught:
                world.knowledge.take(ids["slow"])
            assert caught.value.code == "K140"
            for name, rows in (("quick", 2), ("quicker", 1), ("mask", 2)):
                indication = world.knowledge.take(ids[name])
                assert indication is not None
                assert len(indication.difference.added) == rows, name
            with pytest.raises(KnowledgeError) as caught:
                await subscribe("slow", SparqlQuery(slow))
            assert caught.value.code == "K140"
            assert world.knowledge.queries.statistics().subscriptions == 3

    asyncio.run(run())


def test_a_subscriber_that_cannot_be_told_costs_the_others_nothing() -> None:
    def fail() -> None:
        raise ValueError("a mistake of its listener")

    async def run() -> None:
        async with running() as world:
            news: list[str] = []
            for question in (SparqlQuery("SELECT ?o { <http://e/s> ?p ?o }"), Masks((Mask(Uri("http://e/s")),))):
                await world.do(SubscribeJob(question, fail))
                await world.do(SubscribeJob(question, lambda: news.append("told")))
            for value in ("1", "2"):
                assert len((await world.insert("s", value)).added) == 1
                await evaluated(world)
            assert len(news) == 4

    asyncio.run(run())


@pytest.mark.parametrize("seed", in_tiers(2, 4))
def test_indications_compose_to_the_result_after_every_change(seed: int) -> None:
    """Some of the workers die. Then a query is ended, or its result is exact."""
    texts, rng = SparqlTexts(seed), random.Random(seed)

    async def run() -> None:
        async with running() as world:
            await world.do(UpdateJob(PROLOGUE + f"INSERT DATA {texts.data(12)}"))
            subscribers = [await Subscriber.of(world, texts) for _ in range(6)]
            for number in range(30):
                if number % 10 == 9:
                    for pid in worker_pids():
                        os.kill(pid, signal.SIGKILL)
                if rng.random() < 0.5:
                    answer = await world.submit(UpdateJob(texts.update(may_fail=False)))
                else:
                    answer = await world.submit(
                        ChangeJob((Mask(None, Uri("http://example.org/p")),), (triple(str(number)),))
                    )
                assert isinstance(answer, Delta) or answer.code == "K143"
                await evaluated(world)
                subscribers = [subscriber for subscriber in subscribers if subscriber.is_exact(world)]
            assert subscribers

    asyncio.run(run())


class Subscriber:
    """Keeps a result up to date from indications."""

    def __init__(self, question: SparqlQuery, subscribed: Subscribed) -> None:
        self.question, self.subscription_id = question, subscribed.subscription_id
        self.rows = Counter(subscribed.result.rows)

    @classmethod
    async def of(cls, world: World, texts: SparqlTexts) -> Subscriber:
        while "CONSTRUCT" in (text := texts.query()) or "LIMIT" in text:
            pass
        return cls(SparqlQuery(text), await world.do(SubscribeJob(SparqlQuery(text), lambda: None)))

    def is_exact(self, world: World) -> bool:
        """Checks that the result is exact. Returns False if the query has ended."""
        try:
            indication = world.knowledge.take(self.subscription_id)
        except KnowledgeError:
            return False
        if indication is not None:
            self.rows = self.rows - Counter(indication.difference.removed) + Counter(indication.difference.added)
        assert self.rows == Counter(ask(world.graph, self.question).rows), self.question.text
        return True


def test_service_kps_come_before_customers() -> None:
    order: list[str] = []

    async def call(knowledge: KnowledgeBase, kp: str) -> None:
        await knowledge.call(kp, AskJob(SparqlQuery(f"SELECT * {{ ?s <http://e/{kp}> ?o }}")))
        order.append(kp)

    async def scenario() -> None:
        knowledge = KnowledgeBase(Graph(), PoolSettings(query_workers=1), service_kps={"lights"})
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*(call(knowledge, kp) for kp in ["X/one", "X/two", "X/three", "X/lights"]))
        finally:
            await knowledge.stop()

    asyncio.run(scenario())
    assert order == ["X/one", "X/lights", "X/two", "X/three"]
