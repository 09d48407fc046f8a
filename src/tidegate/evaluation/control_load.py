"""Knowledge processors against a real broker over SSAP: one run of one way to pace them, and what is measured of it.

Each has a persistent query over its own connection and checks by asking the question again, as in the papers; the
question takes a known time, and its answers are never used twice. The broker loses nothing by itself: a share of the
indications is dropped when it has arrived, at random and seeded. One more program changes the state now and then, and
another one, a bystander, asks something small.

*Stale* is the share of time in which a processor does not hold the newest state, by the clock of this one process. A
run in which this process itself was late says nothing of the broker: `lag_s` tells.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidegate.broker_process import RunningBroker
from tidegate.client import connect
from tidegate.client.control import NO_HINTS, Control
from tidegate.client.knowledge import Knowledge
from tidegate.client.persistent_query import PersistentQuery
from tidegate.client.persistent_ssap import SsapTransport
from tidegate.client.persistent_transport import Checked, Heard, Indicated, PersistentLink, Refused
from tidegate.evaluation.queues_load import cpu_s

CSV: Final = "text/csv"
# Both the pairs that make it slow and the chance that makes its answers fresh leave the result as it is.
QUESTION: Final = (
    "SELECT ?v { <state> <version> ?v FILTER(RAND() >= 0) "
    "FILTER NOT EXISTS { ?a <weight> ?x . ?b <weight> ?y FILTER(?x + ?y < 0) } }"
)
BYSTANDER: Final = "SELECT ?o { <state> <version> ?o FILTER(RAND() >= 0) }"
BYSTANDER_S: Final = 0.1
LAG_LOOK_S: Final = 0.01
IDLE_LOOK_S: Final = 0.1
TRIAL_WEIGHTS: Final = 150
TRIALS: Final = 5
OPEN_S: Final = 60.0
OPENING_AT_ONCE: Final = 10


@dataclass(frozen=True)
class Workload:
    """`overload` is what checks every `interval_s` would take of the broker, as a share of what it can serve."""

    name: str
    processors: int
    overload: float
    interval_s: float
    updates_per_s: float
    loss: float
    request_timeout_s: float = 10.0

    @property
    def query_s(self) -> float:
        """How long a check must take, on each of the broker's two workers."""
        return 2.0 * self.overload * self.interval_s / self.processors


@dataclass(frozen=True)
class Times:
    warm_up_s: float
    measured_s: float


@dataclass(frozen=True)
class Measured:
    stale_share: float
    requests_per_minute: float
    """Of one processor."""
    answered_per_s: float
    response_p50_s: float
    response_p99_s: float
    refused_share: float
    late_share: float
    """Checks that were not answered in time, or not before the run ended."""
    bystander_p99_s: float
    broker_cpu_share: float
    lag_s: float
    """The 99th percentile of how late this process was."""


@dataclass
class _Counts:
    """What is counted while `is_on`."""

    is_on: bool = False
    requests: int = 0
    refused: int = 0
    responses_s: list[float] = field(default_factory=list)
    bystander_s: list[float] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)


class States:
    """Which version each processor holds, and for how long it has not been the newest."""

    def __init__(self, processors: int) -> None:
        self._newest = 0
        self._held = np.zeros(processors, np.int64)
        self._stale_since_s: NDArray[np.float64] = np.full(processors, np.nan)
        self._stale_s = np.zeros(processors)

    def publish(self, version: int, now_s: float) -> None:
        self._newest = version
        become = np.isnan(self._stale_since_s) & (self._held < version)
        self._stale_since_s[become] = now_s

    def hold(self, processor: int, version: int, now_s: float) -> None:
        self._held[processor] = version
        if version >= self._newest and not np.isnan(self._stale_since_s[processor]):
            self._stale_s[processor] += now_s - self._stale_since_s[processor]
            self._stale_since_s[processor] = np.nan

    def total_s(self, now_s: float) -> float:
        """Of all, up to now."""
        return float(self._stale_s.sum() + np.nansum(now_s - self._stale_since_s))


class _LossyTransport:
    """SSAP, of which a share of the indications does not arrive; and no hints, unless they are listened to."""

    is_resumable = True

    def __init__(self, transport: SsapTransport, loss: float, rng: Random, is_hinted: bool, counts: _Counts) -> None:
        self._transport = transport
        self._loss = loss
        self._rng = rng
        self._is_hinted = is_hinted
        self._counts = counts

    async def open(self, subscription: str, sequence: int) -> _LossyLink:
        link = await self._transport.open(subscription, sequence)
        return _LossyLink(link, self._loss, self._rng, self._is_hinted, self._counts)


class _LossyLink:
    def __init__(self, link: PersistentLink, loss: float, rng: Random, is_hinted: bool, counts: _Counts) -> None:
        self._link = link
        self._loss = loss
        self._rng = rng
        self._is_hinted = is_hinted
        self._counts = counts
        self._asked_s = 0.0
        first = link.opened
        self.opened = first if is_hinted else replace(first, hints=NO_HINTS)

    def ask(self, check: int) -> None:
        self._asked_s = time.perf_counter()
        self._counts.requests += self._counts.is_on
        self._link.ask(check)

    async def read(self) -> Heard:
        while True:
            heard = await self._link.read()
            match heard:
                case Indicated():
                    if self._rng.random() < self._loss:
                        continue
                    if not self._is_hinted:
                        return replace(heard, spread_s=None)
                case Checked():
                    self._note(time.perf_counter() - self._asked_s)
                    if not self._is_hinted:
                        return replace(heard, hints=NO_HINTS)
                case Refused():
                    self._counts.refused += self._counts.is_on
            return heard

    def close(self, *, is_for_good: bool) -> None:
        self._link.close(is_for_good=is_for_good)

    def _note(self, response_s: float) -> None:
        if self._counts.is_on:
            self._counts.responses_s.append(response_s)


def prepare(broker: RunningBroker, query_s: float) -> float:
    """Fills the graph so that a check takes about so long alone; returns how long it does take."""
    knowledge = Knowledge(broker.http)
    knowledge.update("CLEAR ALL ; INSERT DATA { <state> <version> 0 }")
    call_s = _alone_s(knowledge, BYSTANDER)
    _weigh(knowledge, TRIAL_WEIGHTS)
    trial_s = _alone_s(knowledge, QUESTION) - call_s
    knowledge.update("DELETE WHERE { ?a <weight> ?x }")
    _weigh(knowledge, max(2, round(TRIAL_WEIGHTS * (query_s / trial_s) ** 0.5)))
    return _alone_s(knowledge, QUESTION) - call_s


async def measure(
    broker: RunningBroker, control: Control, is_hinted: bool, workload: Workload, times: Times, seed: int
) -> Measured:
    """One run, with processors of its own."""
    counts, states = _Counts(), States(workload.processors)
    knowledge = Knowledge(broker.http)
    await _wait_until_idle(broker.address)
    version = await _version(knowledge)
    states.publish(version, time.perf_counter())
    async with asyncio.TaskGroup() as tasks:
        queries = [
            PersistentQuery(
                _LossyTransport(
                    SsapTransport(broker.ssap, QUESTION, "", None),
                    workload.loss,
                    Random(f"{seed} {number}"),  # noqa: S311
                    is_hinted,
                    counts,
                ),
                control,
                tasks,
                OPEN_S,
                workload.request_timeout_s,
            )
            for number in range(workload.processors)
        ]
        for start in range(0, len(queries), OPENING_AT_ONCE):
            await asyncio.gather(*(query.__aenter__() for query in queries[start : start + OPENING_AT_ONCE]))
            # They begin as they would have gone on: not all at once.
            await asyncio.sleep(workload.interval_s * OPENING_AT_ONCE / workload.processors)
        working = [tasks.create_task(_follow(query, number, states)) for number, query in enumerate(queries)]
        working += [
            tasks.create_task(_update(knowledge, version, states, workload, Random(seed))),  # noqa: S311
            tasks.create_task(_stand_by(broker.http, counts)),
            tasks.create_task(_look_at_lag(counts)),
        ]
        await asyncio.sleep(times.warm_up_s)
        counts.is_on = True
        began_s, stale_s, used_s = time.perf_counter(), states.total_s(time.perf_counter()), cpu_s(broker.pid)
        await asyncio.sleep(times.measured_s)
        counts.is_on = False
        ended_s = time.perf_counter()
        stale_s, used_s = states.total_s(ended_s) - stale_s, cpu_s(broker.pid) - used_s
        for task in working:
            task.cancel()
        for query in queries:
            query.close()
    return _measured(counts, workload, ended_s - began_s, stale_s, used_s)


def _measured(counts: _Counts, workload: Workload, seconds: float, stale_s: float, used_s: float) -> Measured:
    answered = len(counts.responses_s)
    late = sum(response_s > workload.request_timeout_s for response_s in counts.responses_s)
    asked = max(1, counts.requests)
    return Measured(
        stale_share=stale_s / (seconds * workload.processors),
        requests_per_minute=60.0 * counts.requests / (seconds * workload.processors),
        answered_per_s=(answered - late) / seconds,
        response_p50_s=_percentile(counts.responses_s, 50),
        response_p99_s=_percentile(counts.responses_s, 99),
        refused_share=counts.refused / asked,
        late_share=max(0, counts.requests - counts.refused - answered + late) / asked,
        bystander_p99_s=_percentile(counts.bystander_s, 99),
        broker_cpu_share=used_s / seconds,
        lag_s=_percentile(counts.lags_s, 99),
    )


async def _follow(query: PersistentQuery, processor: int, states: States) -> None:
    async for change in query:
        if change.added:
            states.hold(processor, int(change.added[-1]["v"]["value"]), time.perf_counter())


async def _update(knowledge: Knowledge, version: int, states: States, workload: Workload, rng: Random) -> None:
    while True:
        await asyncio.sleep(rng.expovariate(workload.updates_per_s))
        version += 1
        triple = "<state> <version>"
        text = f"DELETE {{ {triple} ?v }} INSERT {{ {triple} {version} }} WHERE {{ {triple} ?v }}"
        # From here on the old one counts as stale: a processor may see the new one before this program does.
        states.publish(version, time.perf_counter())
        await asyncio.to_thread(knowledge.update, text)


async def _stand_by(http: str, counts: _Counts) -> None:
    knowledge = Knowledge(http)
    while True:
        asked_s = time.perf_counter()
        await asyncio.to_thread(knowledge.query, BYSTANDER, CSV)
        if counts.is_on:
            counts.bystander_s.append(time.perf_counter() - asked_s)
        await asyncio.sleep(BYSTANDER_S)


async def _look_at_lag(counts: _Counts) -> None:
    while True:
        asleep_s = time.perf_counter()
        await asyncio.sleep(LAG_LOOK_S)
        if counts.is_on:
            counts.lags_s.append(max(0.0, time.perf_counter() - asleep_s - LAG_LOOK_S))


async def _wait_until_idle(address: str) -> None:
    """What processors of another run have asked, and do not wait for any more, is still answered."""
    async with connect(address) as connection:
        while True:
            lane = (await connection.status())["knowledge"]["pool"]["lanes"]["queries"]
            if lane["waiting"] + lane["running"] == 0:
                return
            await asyncio.sleep(IDLE_LOOK_S)


async def _version(knowledge: Knowledge) -> int:
    written = await asyncio.to_thread(knowledge.query, "SELECT ?v { <state> <version> ?v }", CSV)
    return int(written.body.split()[1])


def _weigh(knowledge: Knowledge, weights: int) -> None:
    knowledge.update(f"INSERT DATA {{ {' '.join(f'<w{number}> <weight> 1 .' for number in range(weights))} }}")


def _alone_s(knowledge: Knowledge, question: str) -> float:
    """The least of some, as the machine may do something else beside."""
    took_s = []
    for _ in range(TRIALS):
        began_s = time.perf_counter()
        knowledge.query(question, CSV)
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")
