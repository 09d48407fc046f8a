"""The request pool: where requests to the knowledge base wait, and where a broker says no in time.

Requests wait in lanes by their type, first come first served, service KPs before customers; each lane has its workers.
A query that is the same as one that waits or runs joins it, and one that was answered since the last change that
touches it is answered at once: a thousand who ask the same cost one evaluation. A query never gets an answer from
before a change that was made before it was asked. Where a lane is full, or one KP has too much in it, the request is
refused at once, with the time after which to come back.

With every answer goes what the pool has measured (Table I of the papers on active control): the processing time T^proc
and the waiting time T^queue of this request, their sum D^br, the D^br up to which it holds itself for stable, and the
desirable interval, an appointment that no one else has, so that clients who keep it come one after another. `spread_s`
is the time over which those who fetch after one notification should spread. It reads no clock: whoever drives it says
what time it is, and runs what it starts.

What may go wrong: too many requests wait (L652), too many of one KP (L653).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from tidegate.errors import Overloaded
from tidegate.knowledge.graph import Delta
from tidegate.knowledge.mask_index import MaskIndex
from tidegate.knowledge.question import Result
from tidegate.knowledge.terms import Mask

# The share of its time that a lane gives away as appointments, and the least that notifications leave of it.
LOAD_WANTED: Final = 0.8
LOAD_LEFT_MIN: Final = 0.1
NOTIFYING_S: Final = 10.0  # over which the load of notifications is measured
SMOOTHING: Final = 0.05  # of the mean processing time
PROCESSING_S: Final = 0.001  # the mean, before anything was measured
RETRY_AFTER_MIN_S: Final = 0.1
STABLE_WAIT_S: Final = 0.05  # in a lane: who waits longer meets congestion


class Lane(StrEnum):
    """Changes go one after another, as the graph has one writer. SPARQL, which may take long, is not to hold up other
    queries, which run at once."""

    CHANGES = "changes"
    QUERIES = "queries"
    SPARQL = "sparql"
    SUBSCRIPTIONS = "subscriptions"


@dataclass(frozen=True, slots=True)
class PoolSettings:
    query_workers: int = 2
    requests_max: int = 10_000  # of a lane
    requests_per_kp_max: int = 1000
    answers_max: int = 4096
    answer_rows_max: int = 1_000_000  # of all answers that are kept


class PoolRequest(msgspec.Struct, frozen=True):
    """`key` makes equal queries one; None for what must not be shared. Masks tell which changes touch its answer."""

    ticket: int
    lane: Lane
    kp: str
    is_service: bool = False
    key: Hashable = None
    masks: tuple[Mask, ...] | None = None


class Load(msgspec.Struct, frozen=True):
    """What a client is told with an answer, for its active control."""

    processing_s: float
    waiting_s: float
    delay_s: float
    interval_s: float
    delay_s_max: float | None = None
    """Up to which the broker holds itself for stable; None of one that does not tell."""


class Answered(msgspec.Struct, frozen=True):
    ticket: int
    answer: Any
    load: Load


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    waiting: int
    running: int
    processing_s: float
    waiting_s: float
    delay_s: float
    interval_s: float  # after which whoever asks now would be asked to come back
    answered: int
    refused: int


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    lanes: dict[Lane, LaneStatistics]
    joined: int
    cached: int
    answers: int


@dataclass(slots=True, eq=False)
class _Work:
    """Something to run, for the request that brought it and all that have joined it since, with their arrivals."""

    request: PoolRequest
    arrivals: list[tuple[PoolRequest, float]] = field(default_factory=list)
    is_urgent: bool = False
    has_started: bool = False
    started_s: float = 0.0
    is_shared: bool = False  # others may still join it


@dataclass(slots=True, eq=False)
class _LaneState:
    """`requests` counts those without an answer, `waiting` the works that have not begun."""

    workers: int
    service: deque[_Work] = field(default_factory=deque)
    customers: deque[_Work] = field(default_factory=deque)
    requests: int = 0
    waiting: int = 0
    running: int = 0
    processing_s: float = PROCESSING_S
    waiting_s: float = 0.0
    next_slot_s: float = 0.0
    answered: int = 0
    refused: int = 0

    @property
    def backlog_s(self) -> float:
        return (self.waiting + self.running) * self.processing_s / self.workers

    def put(self, work: _Work) -> None:
        self.waiting += 1
        work.is_urgent = work.request.is_service
        (self.service if work.is_urgent else self.customers).append(work)

    def hurry(self, work: _Work) -> None:
        """A service KP wants what customers wait for: it stands in both queues until it begins."""
        if not work.is_urgent and not work.has_started:
            work.is_urgent = True
            self.service.append(work)

    def pop(self) -> _Work:
        while True:
            work = (self.service or self.customers).popleft()
            if not work.has_started:
                self.waiting -= 1
                return work


class _CachedAnswer(msgspec.Struct, frozen=True):
    answer: Any
    masks: tuple[Mask, ...] | None


class RequestPool:
    """Whoever drives it calls `on_request`, runs what `start` gives, and tells `on_done`; `on_change` after every
    change of the graph, before its request is done."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self._settings = settings or PoolSettings()
        workers = dict.fromkeys((Lane.QUERIES, Lane.SPARQL), self._settings.query_workers)
        self._lanes = {lane: _LaneState(workers.get(lane, 1)) for lane in Lane}
        self._shared: dict[Hashable, _Work] = {}
        self._running: dict[int, _Work] = {}
        self._requests_of_kp: dict[str, int] = {}
        self._answers = _Answers(self._settings.answers_max, self._settings.answer_rows_max)
        self._notifying_s = 0.0
        self._notified_s = 0.0
        self._joined = self._cached = 0

    def on_request(self, request: PoolRequest, now_s: float) -> Answered | None:
        """Takes a request in; its answer, when that is known already. Overloaded when there is no room."""
        lane = self._lanes[request.lane]
        if (cached := self._answers.find(request.key)) is not None:
            self._cached += 1
            lane.answered += 1
            return Answered(request.ticket, cached.answer, self._load(lane, 0.0, 0.0, now_s))
        self._check_room(lane, request)
        work = self._shared.get(request.key)
        if work is None:
            work = _Work(request)
            lane.put(work)
            self._share(work)
        else:
            self._joined += 1
            if request.is_service:
                lane.hurry(work)
        work.arrivals.append((request, now_s))
        lane.requests += 1
        self._requests_of_kp[request.kp] = self._requests_of_kp.get(request.kp, 0) + 1
        return None

    def start(self, now_s: float) -> list[PoolRequest]:
        """What is to run now, as far as there are workers."""
        started = []
        for lane in self._lanes.values():
            while lane.waiting and lane.running < lane.workers:
                work = lane.pop()
                work.has_started, work.started_s = True, now_s
                lane.running += 1
                self._running[work.request.ticket] = work
                started.append(work.request)
        return started

    def on_done(self, ticket: int, answer: Any, now_s: float) -> list[Answered]:
        """What `start` gave has run: the answers to its request and to all that have joined it."""
        work = self._running[ticket]
        if work.is_shared:
            self._answers.add(work.request.key, _CachedAnswer(answer, work.request.masks))
        return [
            Answered(request.ticket, answer, self._load(lane, processing_s, waiting_s, now_s))
            for request, lane, processing_s, waiting_s in self._finish(work, now_s)
        ]

    def on_failed(self, ticket: int, now_s: float) -> list[int]:
        """What `start` gave has run and has no answer: the tickets of all who wait for one."""
        return [request.ticket for request, *_ in self._finish(self._running[ticket], now_s)]

    def on_change(self, delta: Delta) -> None:
        """Forgets the answers that a change touches, and lets nobody join a query that began before it."""
        self._answers.on_change(delta)
        for work in self._running.values():
            if work.is_shared and _touches(delta, work.request.masks):
                self._stop_sharing(work)

    def on_notified(self, busy_s: float, now_s: float) -> None:
        """Notifications have taken so much time of a worker."""
        self._notifying_s = self._notifying_at(now_s) + busy_s
        self._notified_s = now_s

    def spread_s(self, fan_out: int, fetched_in: Lane) -> float:
        """Over which time those who are notified together should spread their fetches, which wait in that lane."""
        lane = self._lanes[fetched_in]
        return 0.0 if fan_out <= lane.workers else fan_out * lane.processing_s / (lane.workers * LOAD_WANTED)

    def count_refused(self, lane: Lane) -> None:
        """A request that was refused before it came here."""
        self._lanes[lane].refused += 1

    def statistics(self, now_s: float) -> PoolStatistics:
        return PoolStatistics(
            lanes={
                name: LaneStatistics(
                    lane.waiting,
                    lane.running,
                    lane.processing_s,
                    lane.waiting_s,
                    lane.processing_s + lane.waiting_s,
                    self._next_slot_s(lane, now_s) - now_s,
                    lane.answered,
                    lane.refused,
                )
                for name, lane in self._lanes.items()
            },
            joined=self._joined,
            cached=self._cached,
            answers=len(self._answers),
        )

    def _check_room(self, lane: _LaneState, request: PoolRequest) -> None:
        theirs = self._requests_of_kp.get(request.kp, 0)
        if lane.requests >= self._settings.requests_max:
            code, what, count = "L652", f"{lane.requests} {request.lane} wait already", lane.waiting + lane.running
        elif theirs >= self._settings.requests_per_kp_max:
            code, what, count = "L653", f"{theirs} requests of {request.kp[:40]!r} wait already", theirs
        else:
            return
        lane.refused += 1
        raise Overloaded(
            code,
            what,
            "ask less often: the interval comes with every answer",
            retry_after_s=max(RETRY_AFTER_MIN_S, count * lane.processing_s / lane.workers),
        )

    def _finish(self, work: _Work, now_s: float) -> Iterator[tuple[PoolRequest, _LaneState, float, float]]:
        """All who have waited for a work, with its processing time and their waiting times."""
        lane, processing_s = self._lanes[work.request.lane], now_s - work.started_s
        del self._running[work.request.ticket]
        if work.is_shared:
            self._stop_sharing(work)
        lane.running -= 1
        lane.processing_s += SMOOTHING * (processing_s - lane.processing_s)
        lane.requests -= len(work.arrivals)
        lane.answered += len(work.arrivals)
        for request, arrived_s in work.arrivals:
            self._requests_of_kp[request.kp] -= 1
            if not self._requests_of_kp[request.kp]:
                del self._requests_of_kp[request.kp]
            # Who joined while it ran has waited for no worker.
            waiting_s = max(0.0, work.started_s - arrived_s)
            lane.waiting_s += SMOOTHING * (waiting_s - lane.waiting_s)
            yield request, lane, processing_s, waiting_s

    def _share(self, work: _Work) -> None:
        if work.request.key is not None:
            work.is_shared = True
            self._shared[work.request.key] = work

    def _stop_sharing(self, work: _Work) -> None:
        work.is_shared = False
        del self._shared[work.request.key]

    def _load(self, lane: _LaneState, processing_s: float, waiting_s: float, now_s: float) -> Load:
        lane.next_slot_s = self._next_slot_s(lane, now_s)
        # A query that takes longer than others is no congestion.
        delay_s_max = max(processing_s, lane.processing_s) + STABLE_WAIT_S
        return Load(processing_s, waiting_s, processing_s + waiting_s, lane.next_slot_s - now_s, delay_s_max)

    def _next_slot_s(self, lane: _LaneState, now_s: float) -> float:
        notifying = self._notifying_at(now_s) / NOTIFYING_S
        gap_s = lane.processing_s / (lane.workers * max(LOAD_LEFT_MIN, LOAD_WANTED - notifying))
        return max(lane.next_slot_s, now_s + lane.backlog_s) + gap_s

    def _notifying_at(self, now_s: float) -> float:
        return self._notifying_s * math.exp((self._notified_s - now_s) / NOTIFYING_S)


class _Answers:
    """The latest answers, by their keys, until a change touches them. They are filed under their masks."""

    def __init__(self, answers_max: int, rows_max: int) -> None:
        self._answers_max = answers_max
        self._rows_max = rows_max
        self._rows = 0
        self._answers: OrderedDict[Hashable, _CachedAnswer] = OrderedDict()
        self._index = MaskIndex[Hashable]()

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, key: Hashable) -> _CachedAnswer | None:
        if key in self._answers:
            self._answers.move_to_end(key)
        return self._answers.get(key)

    def add(self, key: Hashable, answer: _CachedAnswer) -> None:
        assert key not in self._answers, key
        rows = _rows_in(answer)
        if rows > self._rows_max:
            return
        while len(self._answers) >= self._answers_max or self._rows + rows > self._rows_max:
            self._remove(next(iter(self._answers)))
        self._answers[key] = answer
        self._rows += rows
        self._index.add(key, answer.masks)

    def on_change(self, delta: Delta) -> None:
        for triple in (*delta.added, *delta.removed):
            for key in set(self._index.find(triple)):
                self._remove(key)

    def _remove(self, key: Hashable) -> None:
        answer = self._answers.pop(key)
        self._rows -= _rows_in(answer)
        self._index.remove(key, answer.masks)


def _rows_in(answer: _CachedAnswer) -> int:
    return len(answer.answer.rows) if isinstance(answer.answer, Result) else 1


def _touches(delta: Delta, masks: tuple[Mask, ...] | None) -> bool:
    if masks is None:
        return bool(delta)
    return any(mask.matches(triple) for triple in (*delta.added, *delta.removed) for mask in masks)
