"""The request pool: requests to the knowledge base wait here, and are refused here when there are too many.

Requests wait in lanes by type, first come first served, with service KPs before customers. Each lane has its own
workers. A query joins an equal query that waits or runs. If its answer is cached and no change has affected it since,
it is answered immediately. A thousand clients with the same query thus cost one evaluation. An answer always includes
all changes made before its query arrived. If a lane is full, or one KP has too many requests waiting, a request is
refused immediately. The refusal says when to retry.

Every answer carries the pool's measurements (Table I of the papers on active control): the processing time T^proc and
the waiting time T^queue of this request, their sum D^br, the largest D^br that the broker considers healthy, and the
desirable interval. The interval is an appointment that no other client has, so clients that keep it arrive one after
another. `spread_s` is the time over which the clients that fetch after one notification should spread their requests.
The pool has no clock: its driver passes in the time, and runs the requests that it starts.

What may go wrong: too many requests wait (L652), or too many of one KP (L653).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from tidegate.errors import Overloaded
from tidegate.knowledge.graph import Delta
from tidegate.knowledge.mask_index import MaskIndex
from tidegate.knowledge.pace import (
    LOAD_WANTED,
    NOTIFYING_S,
    SMOOTHING,
    fade_load,
    learn_mean_s,
    next_slot_at_s,
    serve_all_s,
)
from tidegate.knowledge.question import Result
from tidegate.knowledge.terms import ANY_CHANGE, Masks

PROCESSING_S: Final = 0.001  # the assumed mean processing time before the first measurement
RETRY_AFTER_MIN_S: Final = 0.1
STABLE_WAIT_S: Final = 0.05  # a longer wait in a lane indicates congestion


class Lane(StrEnum):
    """The type of a request. Changes run one after another, because the graph has one writer. SPARQL may take long, so
    it has a lane of its own and never delays other queries, which run immediately."""

    CHANGES = "changes"
    QUERIES = "queries"
    SPARQL = "sparql"
    SUBSCRIPTIONS = "subscriptions"


@dataclass(frozen=True, slots=True)
class PoolSettings:
    query_workers: int = 2
    requests_max: int = 10_000  # per lane
    requests_per_kp_max: int = 1000
    requests_bytes_max: int = 256 * 1024 * 1024  # per lane
    requests_per_kp_bytes_max: int = 64 * 1024 * 1024
    answers_max: int = 4096
    answer_rows_max: int = 1_000_000  # in all cached answers together


class PoolRequest(msgspec.Struct, frozen=True):
    """A request to run in a lane.

    Requests with an equal `key` share one evaluation; None means that the request must not be shared. `masks` determine
    which changes affect its answer. `size_bytes` is the memory that it occupies until it is answered.
    """

    ticket: int
    lane: Lane
    kp: str
    is_service: bool = False
    key: Hashable = None
    masks: Masks = ANY_CHANGE
    size_bytes: int = 0


class Load(msgspec.Struct, frozen=True):
    """The load of the broker, sent with each answer for the client's active control."""

    processing_s: float
    waiting_s: float
    delay_s: float
    interval_s: float
    delay_s_max: float | None = None
    """The largest delay that the broker considers healthy; None if the broker does not report it."""


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
    interval_s: float  # the interval that a client would be given now
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
    """One evaluation, for the request that started it and all that joined it, with their arrival times."""

    request: PoolRequest
    arrivals: list[tuple[PoolRequest, float]] = field(default_factory=list)
    is_urgent: bool = False
    has_started: bool = False
    started_s: float = 0.0
    is_shared: bool = False  # other requests may still join it


@dataclass(slots=True, eq=False)
class _LaneState:
    """The state of one lane. `requests` counts unanswered requests; `waiting` counts works that have not started."""

    workers: int
    service: deque[_Work] = field(default_factory=deque)
    customers: deque[_Work] = field(default_factory=deque)
    requests: int = 0
    size_bytes: int = 0
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

    def make_urgent(self, work: _Work) -> None:
        """Moves a customers' work ahead because a service KP joined it. It stays in both queues until it starts; `pop`
        skips the second entry."""
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
    masks: Masks


class RequestPool:
    """The state machine of the pool.

    Its driver calls `on_request`, runs the requests that `start` returns, and then calls `on_done` or `on_failed`. It
    must call `on_change` after every change of the graph, before `on_done` of that change.
    """

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self._settings = settings or PoolSettings()
        workers = dict.fromkeys((Lane.QUERIES, Lane.SPARQL), self._settings.query_workers)
        self._lanes = {lane: _LaneState(workers.get(lane, 1)) for lane in Lane}
        self._shared: dict[Hashable, _Work] = {}
        self._running: dict[int, _Work] = {}
        self._requests_of_kp: dict[str, int] = {}
        self._bytes_of_kp: dict[str, int] = {}
        self._answers = _Answers(self._settings.answers_max, self._settings.answer_rows_max)
        self._notifying_s = 0.0
        self._notified_s = 0.0
        self._joined = self._cached = 0

    def on_request(self, request: PoolRequest, now_s: float) -> Answered | None:
        """Adds a request. Returns its answer if it is cached, otherwise None. Raises Overloaded when there is no
        room."""
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
                lane.make_urgent(work)
        work.arrivals.append((request, now_s))
        lane.requests += 1
        lane.size_bytes += request.size_bytes
        self._requests_of_kp[request.kp] = self._requests_of_kp.get(request.kp, 0) + 1
        self._bytes_of_kp[request.kp] = self._bytes_of_kp.get(request.kp, 0) + request.size_bytes
        return None

    def start(self, now_s: float) -> list[PoolRequest]:
        """Returns the requests to run now, as many as there are idle workers."""
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
        """Ends a request that `start` returned. Returns the answers to it and to all requests that joined it."""
        work = self._running[ticket]
        if work.is_shared:
            self._answers.add(work.request.key, _CachedAnswer(answer, work.request.masks))
        return [
            Answered(request.ticket, answer, self._load(lane, processing_s, waiting_s, now_s))
            for request, lane, processing_s, waiting_s in self._finish(work, now_s)
        ]

    def on_failed(self, ticket: int, now_s: float) -> list[int]:
        """Ends a request that `start` returned and that failed. Returns its ticket and those of all that joined it."""
        return [request.ticket for request, *_ in self._finish(self._running[ticket], now_s)]

    def on_change(self, delta: Delta) -> None:
        """Drops the cached answers that a change affects. Later requests no longer join queries that it affects and
        that started before it."""
        self._answers.on_change(delta)
        for work in self._running.values():
            if work.is_shared and _touches(delta, work.request.masks):
                self._stop_sharing(work)

    def on_notified(self, busy_s: float, now_s: float) -> None:
        """Records the time that a worker has spent on notifications."""
        self._notifying_s = self._notifying_at(now_s) + busy_s
        self._notified_s = now_s

    def spread_s(self, fan_out: int, fetched_in: Lane) -> float:
        """Returns the time over which `fan_out` clients, notified together, should spread their fetches in a lane."""
        lane = self._lanes[fetched_in]
        if fan_out <= lane.workers:
            return 0.0
        return serve_all_s(fan_out, lane.processing_s, lane.workers, LOAD_WANTED)

    def count_refused(self, lane: Lane) -> None:
        """Counts a request that was refused before it reached the pool."""
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
        """Raises Overloaded when the lane or the KP has too many requests.

        A request that is larger than a whole budget is accepted when no other waits; its own size is bounded elsewhere.
        """
        settings, size_bytes = self._settings, request.size_bytes
        theirs, their_bytes = self._requests_of_kp.get(request.kp, 0), self._bytes_of_kp.get(request.kp, 0)
        is_lane_full = lane.requests > 0 and lane.size_bytes + size_bytes > settings.requests_bytes_max
        is_theirs_full = theirs > 0 and their_bytes + size_bytes > settings.requests_per_kp_bytes_max
        if lane.requests >= settings.requests_max or is_lane_full:
            code, count = "L652", lane.waiting + lane.running
            what = f"{lane.requests} requests with {lane.size_bytes} bytes are already waiting in lane {request.lane}"
        elif theirs >= settings.requests_per_kp_max or is_theirs_full:
            code, count = "L653", theirs
            what = f"{request.kp[:40]!r} already has {theirs} requests with {their_bytes} bytes waiting"
        else:
            return
        lane.refused += 1
        raise Overloaded(
            code,
            what,
            "send requests less often: every answer suggests an interval",
            retry_after_s=max(RETRY_AFTER_MIN_S, count * lane.processing_s / lane.workers),
        )

    def _finish(self, work: _Work, now_s: float) -> Iterator[tuple[PoolRequest, _LaneState, float, float]]:
        """Ends a work. Yields all its requests, with its processing time and their waiting times."""
        lane, processing_s = self._lanes[work.request.lane], now_s - work.started_s
        del self._running[work.request.ticket]
        if work.is_shared:
            self._stop_sharing(work)
        lane.running -= 1
        lane.processing_s = learn_mean_s(lane.processing_s, processing_s, SMOOTHING)
        lane.requests -= len(work.arrivals)
        lane.answered += len(work.arrivals)
        for request, arrived_s in work.arrivals:
            lane.size_bytes -= request.size_bytes
            self._requests_of_kp[request.kp] -= 1
            self._bytes_of_kp[request.kp] -= request.size_bytes
            if not self._requests_of_kp[request.kp]:
                del self._requests_of_kp[request.kp], self._bytes_of_kp[request.kp]
            # A request that joined a running work has not waited for a worker.
            waiting_s = max(0.0, work.started_s - arrived_s)
            lane.waiting_s = learn_mean_s(lane.waiting_s, waiting_s, SMOOTHING)
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
        # A query that takes longer than others does not indicate congestion.
        delay_s_max = max(processing_s, lane.processing_s) + STABLE_WAIT_S
        return Load(processing_s, waiting_s, processing_s + waiting_s, lane.next_slot_s - now_s, delay_s_max)

    def _next_slot_s(self, lane: _LaneState, now_s: float) -> float:
        notify_load = self._notifying_at(now_s) / NOTIFYING_S
        return next_slot_at_s(
            lane.next_slot_s, now_s, lane.backlog_s, lane.processing_s, lane.workers, LOAD_WANTED, notify_load
        )

    def _notifying_at(self, now_s: float) -> float:
        return fade_load(self._notifying_s, now_s - self._notified_s, NOTIFYING_S)


class _Answers:
    """A cache of the latest answers by key. An index of their masks finds the answers that a change invalidates."""

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


def _touches(delta: Delta, masks: Masks) -> bool:
    return any(masks.match(triple) for triple in (*delta.added, *delta.removed))
