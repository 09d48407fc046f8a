"""Load of knowledge processors on a small broker over SSAP: measures one run of one policy from outside.

Each processor is a persistent query on its own connection, paced by the state machines that every client has. As in the
papers, it accepts any state that arrives. An indication carries the new state or announces it, and a check requests it.
A seeded random share of the indications is dropped on arrival.

An updater changes the state, at the same times under every policy. Bystanders send other queries, each on its own
connection.

*Stale*, *age* and response times use the clock of this one process. If this process itself is late, the run is no
evidence about the broker: see `lag_s`. What may go wrong: the broker's process ends (U701).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

import msgspec
import numpy as np

from tidegate.broker.process import end_process
from tidegate.client.persistent_query import PersistentQuery
from tidegate.client.persistent_ssap import SsapTransport
from tidegate.client.persistent_transport import Checked, Heard, Indicated, PersistentLink, Refused, Row
from tidegate.errors import Unavailable
from tidegate_lab.control.request_pool import Case, Parameters
from tidegate_lab.control.small_broker import Counts
from tidegate_lab.processor_time import cpu_s

BROKER: Final = "tidegate_lab.control.small_broker"
STARTUP_S: Final = 60.0
QUESTION: Final = "SELECT ?v { <state> <version> ?v }"
BYSTANDER: Final = "SELECT ?p { <state> ?p ?v }"
BYSTANDERS: Final = 8
END: Final = b"</SSAP_message>"
OUT_OF_RESOURCES: Final = b"OutOfResources"
OPEN_S: Final = 60.0
OPENING_AT_ONCE: Final = 10
REQUEST_S: Final = 60.0
"""The timeout of processors that never give up: it ends long after the measurement."""
LAG_CHECK_S: Final = 0.01
SPAN_S: Final = 0.1
# A response is calm if it waited at the broker for less than the first, and congested if for more than the second.
CALM_WAIT_S: Final = 0.003
CONGESTED_WAIT_S: Final = 0.1


@dataclass(frozen=True)
class Measured:
    """The result of a run. Fields that the simulation has too have the same names."""

    stale_share: float
    age_s: float
    response_p50_s: float
    response_p99_s: float
    response_p999_s: float
    requests_per_minute: float
    refused_share: float
    timed_out_share: float
    wasted_share: float
    goodput_per_s: float
    notification_loss: float
    merged_share: float
    bystander_p50_s: float
    bystander_p99_s: float
    bystander_refused_share: float
    dispersion: float
    peak_requests: float
    false_alarm_share: float
    missed_share: float
    fairness: float
    broker_cpu_share: float
    lag_s: float
    """The 99th percentile of this process's own delay."""


@dataclass
class _Observed:
    """The events of a run, recorded while `is_on`."""

    is_on: bool = False
    asked_s: list[float] = field(default_factory=list)
    responses_s: list[float] = field(default_factory=list)
    refused: int = 0
    lost: int = 0
    bystanders_s: list[float] = field(default_factory=list)
    bystanders_refused: int = 0
    lags_s: list[float] = field(default_factory=list)
    calm: int = 0
    false_alarms: int = 0
    congested: int = 0
    missed: int = 0

    def detect(self, waiting_s: float, is_detected: bool) -> None:
        if waiting_s < CALM_WAIT_S:
            self.calm += 1
            self.false_alarms += is_detected
        elif waiting_s > CONGESTED_WAIT_S:
            self.congested += 1
            self.missed += not is_detected


@dataclass(frozen=True)
class Staleness:
    """The time for which each processor held an old version, and the age integrated over time, summed over all."""

    stale_s: tuple[float, ...]
    age_s2: float


class States:
    """Tracks the version that each processor holds, how long it was stale, and the age of its oldest unseen version."""

    def __init__(self, processors: int) -> None:
        self._published_s = [-math.inf]
        self._held = [0] * processors
        self._accounted_s = [0.0] * processors
        self._stale_s = [0.0] * processors
        self._age_s2 = 0.0

    def publish(self, now_s: float) -> int:
        """Returns a new version, which no processor holds yet."""
        self._published_s.append(now_s)
        return len(self._published_s) - 1

    def hold(self, processor: int, version: int, now_s: float) -> None:
        if version > self._held[processor]:
            self._account(processor, now_s)
            self._held[processor] = version

    def begin(self, now_s: float) -> None:
        """Resets the totals."""
        self._account_all(now_s)
        self._stale_s = [0.0] * len(self._held)
        self._age_s2 = 0.0

    def end(self, now_s: float) -> Staleness:
        """Returns the totals since `begin`. The processors may continue."""
        self._account_all(now_s)
        return Staleness(tuple(self._stale_s), self._age_s2)

    def _account_all(self, now_s: float) -> None:
        for processor in range(len(self._held)):
            self._account(processor, now_s)

    def _account(self, processor: int, now_s: float) -> None:
        unseen = self._held[processor] + 1
        if unseen < len(self._published_s):
            published_s = self._published_s[unseen]
            since_s = max(published_s, self._accounted_s[processor])
            self._stale_s[processor] += now_s - since_s
            self._age_s2 += 0.5 * ((now_s - published_s) ** 2 - (since_s - published_s) ** 2)
        self._accounted_s[processor] = now_s


class _Processor:
    """A transport and its link in one, between a persistent query and the broker. Records the states that arrive and
    the response times."""

    is_resumable = False  # every answer is the whole state, so there is nothing to resume

    def __init__(self, address: str, number: int, case: Case, states: States, observed: _Observed) -> None:
        self._transport = SsapTransport(address, QUESTION, "", None)
        self._number = number
        self._parameters = case.parameters
        self._rng = Random(f"{case.seed} {number}")  # noqa: S311
        self._states = states
        self._observed = observed
        self._asked_s: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self.query: PersistentQuery | None = None
        self._link: PersistentLink | None = None

    async def open(self, subscription: str, sequence: int) -> PersistentLink:
        self._link = await self._transport.open(subscription, sequence)
        self.opened = self._link.opened
        return self

    def ask(self, check: int) -> None:
        assert self._link is not None
        self._asked_s[check] = asked_s = time.perf_counter()
        if self._observed.is_on:
            self._observed.asked_s.append(asked_s)
        self._link.ask(check)

    async def read(self) -> Heard:
        assert self._link is not None
        while True:
            heard = await self._link.read()
            match heard:
                case Indicated():
                    if self._rng.random() < self._parameters.network_loss:
                        self._observed.lost += self._observed.is_on
                        continue
                    self._on_indicated(heard)
                case Checked():
                    self._on_checked(heard)
                case Refused():
                    del self._asked_s[heard.check]
                    self._observed.refused += self._observed.is_on
            return heard

    def close(self, *, is_final: bool) -> None:
        assert self._link is not None
        self._link.close(is_final=is_final)

    def _on_indicated(self, heard: Indicated) -> None:
        if self._parameters.is_fetched:
            assert self.query is not None
            # Later, because the query must have counted the indication first.
            self._loop.call_soon(self.query.check_within, heard.spread_s)
        else:
            self._hold(heard.added)

    def _on_checked(self, heard: Checked) -> None:
        response_s = time.perf_counter() - self._asked_s.pop(heard.check)
        is_late = response_s > self._parameters.timeout_s  # then the query ignores it
        if not is_late:
            self._hold(heard.result or [])
        if self._observed.is_on:
            self._observed.responses_s.append(response_s)
        if self._observed.is_on and not is_late:
            waiting_s = response_s - (heard.hints.processing_s or 0.0)
            self._loop.call_soon(self._note_detection, waiting_s, self._detections())

    def _hold(self, rows: list[Row]) -> None:
        if rows:
            self._states.hold(self._number, int(rows[-1]["v"]["value"]), time.perf_counter())

    def _note_detection(self, waiting_s: float, detections: int) -> None:
        self._observed.detect(waiting_s, self._detections() > detections)

    def _detections(self) -> int:
        assert self.query is not None
        return self.query.statistics().control.detections


class SmallBroker:
    """The handle of a small broker's process."""

    def __init__(self, address: str, process: asyncio.subprocess.Process) -> None:
        self.address = address
        self.pid = process.pid
        self._process = process

    async def counts(self) -> Counts:
        """Returns the broker's counters. The first call starts the time that its parameters refer to."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return msgspec.json.decode(await _line(self._process), type=Counts)


@contextlib.asynccontextmanager
async def small_broker(parameters: Parameters, seed: int) -> AsyncIterator[SmallBroker]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        BROKER,
        msgspec.msgpack.encode(parameters).hex(),
        str(seed),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield SmallBroker((await _line(process)).decode().strip(), process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await end_process(process)


async def measure(case: Case) -> Measured:
    """Measures one run, with its own broker and processors."""
    parameters = case.parameters
    observed, states = _Observed(), States(parameters.clients)
    async with small_broker(parameters, case.seed) as broker, asyncio.TaskGroup() as tasks:
        updater = _Asker(broker.address, "updater")
        await updater.ask("INSERT DATA { <state> <version> 0 }")
        queries = await _open_all(broker.address, case, states, observed, tasks)
        working = [tasks.create_task(_follow(query)) for query in queries]
        working += [
            tasks.create_task(_update(updater, states, parameters, Random(case.seed))),  # noqa: S311
            tasks.create_task(_send_probes(broker.address, observed, parameters.probes_per_s, tasks)),
            tasks.create_task(_measure_lag(observed)),
        ]
        with _without_garbage_collection():
            await broker.counts()
            await asyncio.sleep(parameters.warm_up_s)
            before, used_s, began_s = await broker.counts(), cpu_s(broker.pid), time.perf_counter()
            states.begin(began_s)
            observed.is_on = True
            await asyncio.sleep(began_s + parameters.measured_s - time.perf_counter())
            observed.is_on = False
            ended_s = time.perf_counter()
            staleness = states.end(ended_s)
            used_s = cpu_s(broker.pid) - used_s
            after = await broker.counts()
        for task in working:
            task.cancel()
        for query in queries:
            query.close()
        updater.close()
    return _measured(parameters, observed, staleness, before, after, began_s, ended_s, used_s)


async def _open_all(
    address: str, case: Case, states: States, observed: _Observed, tasks: asyncio.TaskGroup
) -> list[PersistentQuery]:
    queries = []
    timeout_s = min(REQUEST_S, case.parameters.timeout_s)
    for number in range(case.parameters.clients):
        processor = _Processor(address, number, case, states, observed)
        processor.query = PersistentQuery(processor, case.control, tasks, OPEN_S, timeout_s)
        queries.append(processor.query)
    between_s = case.parameters.join_within_s * OPENING_AT_ONCE / len(queries)
    for start in range(0, len(queries), OPENING_AT_ONCE):
        due_s = time.perf_counter() + between_s
        await asyncio.gather(*(query.__aenter__() for query in queries[start : start + OPENING_AT_ONCE]))
        await asyncio.sleep(due_s - time.perf_counter())
    return queries


def _measured(
    parameters: Parameters,
    observed: _Observed,
    staleness: Staleness,
    before: Counts,
    after: Counts,
    began_s: float,
    ended_s: float,
    used_s: float,
) -> Measured:
    seconds = ended_s - began_s
    client_s = seconds * parameters.clients
    asked, answered = len(observed.asked_s), len(observed.responses_s)
    responses_s = [response_s for response_s in observed.responses_s if response_s <= parameters.timeout_s]
    in_time = len(responses_s)
    decided = after.decided - before.decided
    spans = np.histogram(np.array(observed.asked_s) - began_s, round(seconds / SPAN_S), (0.0, seconds))[0]
    stale_s = np.array(staleness.stale_s)
    bystanders = len(observed.bystanders_s) + observed.bystanders_refused
    return Measured(
        stale_share=float(stale_s.sum()) / client_s,
        age_s=staleness.age_s2 / client_s,
        response_p50_s=_percentile(responses_s, 50),
        response_p99_s=_percentile(responses_s, 99),
        response_p999_s=_percentile(responses_s, 99.9),
        requests_per_minute=60.0 * asked / client_s,
        refused_share=_share(observed.refused, asked),
        timed_out_share=_share(max(0, asked - observed.refused - in_time), asked)
        if parameters.timeout_s < math.inf
        else 0.0,
        wasted_share=_share(answered - in_time, answered),
        goodput_per_s=in_time / seconds,
        notification_loss=_share(after.dropped - before.dropped + observed.lost, decided),
        merged_share=_share(after.merged - before.merged, decided),
        bystander_p50_s=_percentile(observed.bystanders_s, 50),
        bystander_p99_s=_percentile(observed.bystanders_s, 99),
        bystander_refused_share=_share(observed.bystanders_refused, bystanders),
        dispersion=float(spans.var() / spans.mean()) if spans.any() else math.nan,
        peak_requests=float(spans.max()) if spans.any() else math.nan,
        false_alarm_share=_share(observed.false_alarms, observed.calm),
        missed_share=_share(observed.missed, observed.congested),
        fairness=float(stale_s.sum() ** 2 / (stale_s.size * (stale_s**2).sum())) if stale_s.any() else math.nan,
        broker_cpu_share=used_s / seconds,
        lag_s=_percentile(observed.lags_s, 99),
    )


async def _follow(query: PersistentQuery) -> None:
    """Consumes the changes, which the processor has recorded already."""
    async for _ in query:
        pass


async def _update(updater: _Asker, states: States, parameters: Parameters, rng: Random) -> None:
    due_s = time.perf_counter()
    while True:
        factor = rng.expovariate(1.0) if parameters.is_update_random else 1.0
        due_s += parameters.update_every_s * factor
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        version = states.publish(time.perf_counter())
        await updater.ask(
            f"DELETE DATA {{ <state> <version> {version - 1} }} ; INSERT DATA {{ <state> <version> {version} }}"
        )


async def _send_probes(address: str, observed: _Observed, probes_per_s: float, tasks: asyncio.TaskGroup) -> None:
    """Sends probes at a fixed rate, however long the answers take."""
    number, asking = 0, set[asyncio.Task[None]]()
    try:
        while True:
            await asyncio.sleep(1.0 / probes_per_s)
            number = (number + 1) % BYSTANDERS
            probe = tasks.create_task(_probe(address, f"bystander-{number}", observed))
            asking.add(probe)
            probe.add_done_callback(asking.discard)
    finally:
        for probe in asking:
            probe.cancel()


async def _probe(address: str, node: str, observed: _Observed) -> None:
    began_s = time.perf_counter()
    asker = _Asker(address, node)
    try:
        answer = await asker.ask(BYSTANDER)
    finally:
        asker.close()
    if not observed.is_on:
        return
    if OUT_OF_RESOURCES in answer:
        observed.bystanders_refused += 1
    else:
        observed.bystanders_s.append(time.perf_counter() - began_s)


async def _measure_lag(observed: _Observed) -> None:
    while True:
        asleep_s = time.perf_counter()
        await asyncio.sleep(LAG_CHECK_S)
        if observed.is_on:
            observed.lags_s.append(max(0.0, time.perf_counter() - asleep_s - LAG_CHECK_S))


class _Asker:
    """Sends SPARQL queries and updates as QUERY requests over SSAP, one after another."""

    def __init__(self, address: str, node: str) -> None:
        self._host, port = address.removeprefix("ssap://").split(":")
        self._port = int(port)
        self._node = node
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, text: str) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(
            f"<SSAP_message><node_id>{self._node}</node_id><space_id>X</space_id>"
            "<transaction_type>QUERY</transaction_type><message_type>REQUEST</message_type>"
            '<transaction_id>1</transaction_id><parameter name="type">sparql</parameter>'
            f'<parameter name="query"><![CDATA[{text}]]></parameter></SSAP_message>'.encode()
        )
        return await reader.readuntil(END)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    async with asyncio.timeout(STARTUP_S):
        line = await process.stdout.readline()
    if not line:
        raise Unavailable("U701", "the small broker has ended unexpectedly", "see its message above")
    return line


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disables garbage collection, whose pauses would be measured. A run creates little garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else math.nan
