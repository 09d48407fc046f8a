"""The broker's side of SPARQL workers: starts the processes on demand, sends them changes and requests, kills them.

One worker executes updates, some answer queries, and two evaluate open questions, one for quick and one for slow ones.
So no query and no open question delays a change. A worker starts from a copy of the graph, made in a thread, and
receives every change since then. Changes that the copy already contains have no effect. Each request is sent after all
earlier changes, so no answer is older than its question.

The first request of a worker must finish within `time_max_s` after the worker could start it. Otherwise the process is
killed, and a new one is started for the requests behind it. For an open question, the time starts when the worker has
applied all earlier changes, which may be many. Nothing here blocks: threads make the copies and reap the processes.

If a process ends without reaching a limit, for example because someone else killed it, its first request is retried
once in a new process. The same applies to an open question that a worker does not start in time.

What may go wrong, for the first request only: it takes too long (K140) or too much memory (K141), ends its process in
another way twice (K143), no worker can be started (K144), or the worker refuses it. For all requests: the broker is
shutting down (U702).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from tidegate.errors import KnowledgeError, TidegateError, Unavailable
from tidegate.knowledge.evaluation_schedule import Pace
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.question import Result, Row, Shape, SparqlQuery
from tidegate.knowledge.sparql_worker import (
    FRAME_HEAD_BYTES,
    OUT_OF_MEMORY,
    Answered,
    Ask,
    Begun,
    Change,
    Ready,
    Refused,
    Reply,
    Update,
    Updated,
    frame,
    read_reply,
)
from tidegate.knowledge.store_files import DAMAGED, Damaged
from tidegate.knowledge.wql import WqlQuery
from tidegate.security.credentials import without_secrets

log = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024
# Changes are sent once there are this many bytes, or with the next request. A worker that falls behind by more than
# the maximum is replaced.
UNSENT_BYTES: Final = 64 * 1024
UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024
START_MAX_S: Final = 120.0  # for a worker to read its copy
CATCH_UP_MAX_S: Final = 30.0  # for a worker to apply the changes before an open question
# A worker without a request for this many changes ends, because keeping it up to date costs more than it is worth.
IDLE_CHANGES_MAX: Final = 100_000
ENDED: Final = "K143"

OnAnswer: TypeAlias = Callable[[Result | Delta | TidegateError], None]
# Receives the answer, and the seconds that the evaluation took.
OnEvaluated: TypeAlias = Callable[[Result | Delta | TidegateError, float], None]


@dataclass(frozen=True, slots=True)
class SparqlLimits:
    """Limits of a client's query or update.

    An open question has lower limits, because others wait for its evaluator and its rows are compared on the event
    loop. Its time is processor time.
    """

    time_max_s: float = 5.0
    rows_max: int = 100_000
    open_time_max_s: float = 1.0
    open_rows_max: int = 10_000
    memory_max_bytes: int = 512 * 1024 * 1024  # in addition to the copy of the graph


@dataclass(frozen=True, slots=True)
class SparqlWorkersStatistics:
    processes: int
    started: int
    killed: int  # processes that ended by a limit, or by a failure that was not retried


@dataclass(frozen=True, slots=True)
class _Request:
    message: Ask | Update
    on_answer: OnAnswer
    is_second_try: bool = False


@dataclass(frozen=True, slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    connection: socket.socket
    copy: Path


class SparqlWorkers:
    """All workers of a knowledge base. Use it on the thread of an event loop.

    `on_answer` is called later with the answer or an error; after `stop`, it is called immediately. The caller must not
    run more than `query_workers` queries at a time.
    """

    def __init__(self, graph: Graph, query_workers: int, limits: SparqlLimits | None = None) -> None:
        self._limits = limits or SparqlLimits()
        self._rows_max = min(self._limits.rows_max, graph.rows_max)
        self._open_rows_max = min(self._limits.open_rows_max, graph.rows_max)
        self._wql_triples_max = graph.rows_max
        self._update_worker = SparqlWorker(graph, self._limits)
        self._query_workers = [SparqlWorker(graph, self._limits) for _ in range(query_workers)]
        self._evaluators = {pace: SparqlWorker(graph, self._limits) for pace in Pace}
        self._all = [self._update_worker, *self._query_workers, *self._evaluators.values()]

    def ask(self, text: str, on_answer: OnAnswer) -> None:
        self._idle_worker().request(Ask(text, self._limits.time_max_s, self._rows_max), on_answer)

    def ask_first(self, question: SparqlQuery | WqlQuery, on_first: OnEvaluated) -> None:
        """Evaluates a new open question for the first time, on a query worker but with the limits of open questions."""
        worker = self._idle_worker()
        worker.request(self._open_ask(question), lambda answer: on_first(answer, worker.took_s))

    def evaluate(self, question: SparqlQuery | WqlQuery, pace: Pace, on_evaluated: OnEvaluated) -> None:
        """Evaluates an open question on the current graph. Each pace has one evaluation at a time."""
        worker = self._evaluators[pace]
        assert not worker.is_busy, "one evaluation at a time"
        worker.request(self._open_ask(question), lambda answer: on_evaluated(answer, worker.took_s))

    def _idle_worker(self) -> SparqlWorker:
        idle = [worker for worker in self._query_workers if not worker.is_busy]
        return next((worker for worker in idle if worker.is_running), idle[0])

    def _open_ask(self, question: SparqlQuery | WqlQuery) -> Ask:
        is_sparql = isinstance(question, SparqlQuery)
        rows_max = self._open_rows_max if is_sparql else self._wql_triples_max
        return Ask.of(question, self._limits.open_time_max_s, rows_max)

    def update(self, text: str, on_answer: OnAnswer) -> None:
        """Computes the delta of an update. The worker has then already applied it to its copy. Unless the next change
        is this delta, the worker is replaced."""
        self._update_worker.request(Update(text, self._limits.time_max_s), on_answer)

    def on_change(self, delta: Delta) -> None:
        """Sends a change to all running workers. The caller must pass every change of the graph."""
        if any(worker.is_running for worker in self._all):
            change = frame(Change(delta.added, delta.removed))
            for worker in self._all:
                worker.on_change(change)

    async def stop(self) -> None:
        """Ends all processes. Later requests are refused."""
        for worker in self._all:
            await worker.stop()

    def statistics(self) -> SparqlWorkersStatistics:
        return SparqlWorkersStatistics(
            processes=sum(worker.is_running for worker in self._all),
            started=sum(worker.started for worker in self._all),
            killed=sum(worker.killed for worker in self._all),
        )


class SparqlWorker:
    """One worker: at most one process at a time, started on demand and replaced after it was killed.

    Requests are answered in order. Changes and requests share one queue to the process, which keeps them in sequence.
    """

    def __init__(self, graph: Graph, limits: SparqlLimits) -> None:
        self._graph = graph
        self._limits = limits
        self._requests: deque[_Request] = deque()
        self._rows: list[Row] = []  # the parts of the current answer received so far
        self._process: _Process | None = None
        self._starting: asyncio.Future[_Process] | None = None
        self._is_ready = False
        self._is_outdated = False
        self._is_stopped = False
        self._applied_update = b""  # the delta of an update that the worker has applied, but the graph has not yet
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._is_blocked = False  # the socket's send buffer is full
        self._idle_changes = 0
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._reaped: asyncio.Future[None] | None = None
        self.started = self.killed = 0
        self.took_s = 0.0  # the duration of the last answered request

    @property
    def is_running(self) -> bool:
        return self._process is not None or self._starting is not None

    @property
    def is_busy(self) -> bool:
        return bool(self._requests)

    def request(self, message: Ask | Update, on_answer: OnAnswer) -> None:
        assert not self._is_outdated, "an outdated worker ends with its last request"
        if self._is_stopped:
            on_answer(_shutting_down())
            return
        if self._applied_update:  # the graph refused the last update, so the worker's copy differs from the graph
            self._end()
        self._idle_changes = 0
        self._requests.append(_Request(message, on_answer))
        if self.is_running:
            self._put(frame(message))
            self._flush()
            if len(self._requests) == 1:
                self._start_timer()
        else:
            self._start()

    def on_change(self, change: bytes) -> None:
        if self._applied_update:
            if change != self._applied_update:
                self._end()
            self._applied_update = b""
        elif self.is_running and not self._is_outdated:
            self._put(change)
            self._idle_changes += 1
            if self._unsent_bytes > UNSENT_BYTES and not self._is_blocked:
                self._flush()
            self._is_outdated = self._unsent_bytes > UNSENT_BYTES_MAX or self._idle_changes > IDLE_CHANGES_MAX
            self._end_if_outdated()

    async def stop(self) -> None:
        self._is_stopped = True
        starting = self._starting
        self._end()
        while self._requests:
            self._requests.popleft().on_answer(_shutting_down())
        if starting is not None:
            await asyncio.wait([starting])
        if self._reaped is not None:
            await self._reaped

    # Starting and ending the process.

    def _start(self) -> None:
        self.started += 1
        loop = asyncio.get_running_loop()
        self._starting = starting = loop.run_in_executor(None, _launch, self._graph, self._limits)
        self._timer = loop.call_later(START_MAX_S, self._on_start_timeout)
        for request in self._requests:
            self._put(frame(request.message))
        starting.add_done_callback(self._on_started)

    def _on_started(self, starting: asyncio.Future[_Process]) -> None:
        if starting is not self._starting:  # `_end` was called while the process was starting
            if starting.exception() is None:
                self._reap(starting.result())
            return
        self._starting = None
        if (error := starting.exception()) is not None:
            log.error("cannot start a SPARQL worker", exc_info=error)
            self._end()
            self._fail(_not_started(error))
            return
        self._process = starting.result()
        asyncio.get_running_loop().add_reader(self._process.connection, self._on_readable)
        self._flush()

    def _end(self) -> None:
        """Kills the process and resets its state. Unanswered requests stay queued, for the next process."""
        self._is_ready = self._is_outdated = self._is_blocked = False
        self._applied_update = b""
        self._unsent.clear()
        self._unsent_bytes = self._idle_changes = 0
        self._rows = []
        self._received.clear()
        self._stop_timer()
        self._starting = None
        if (process := self._process) is not None:
            self._process = None
            loop = asyncio.get_running_loop()
            loop.remove_reader(process.connection)
            loop.remove_writer(process.connection)
            self._reap(process)

    def _reap(self, process: _Process) -> None:
        process.connection.close()
        process.popen.kill()
        self._reaped = asyncio.get_running_loop().run_in_executor(None, _clean_up, process)

    def _end_if_outdated(self) -> None:
        """Ends a worker that is too far behind, once it has answered the requests that it has already received.

        If it has not even read its copy, it ends immediately, and a new process answers them.
        """
        if self._is_outdated and not (self._is_ready and self._requests):
            self._end()
            if self._requests:
                self._start()

    def _fail(self, error: TidegateError) -> None:
        """Answers the first request with the error that ended the process, and starts a new one for the others."""
        if self._requests:
            failed = self._requests.popleft()
            self.took_s = 0.0 if isinstance(error, Unavailable) else _time_used_s(failed.message)
            if self._requests:
                self._start()
            failed.on_answer(error)

    def _on_death(self) -> None:
        assert self._process is not None
        code = self._process.popen.wait()  # does not block: the kernel closes the sockets of a process last
        error = self._reason(code) if self._is_ready else _not_started(f"it exited with code {code}")
        self._end()
        if error.code == ENDED and self._requests and not self._requests[0].is_second_try:
            self._requests[0] = replace(self._requests[0], is_second_try=True)
            self._start()
            return
        # A request that has ended two processes fails. Otherwise one bad query would crash workers forever.
        self.killed += bool(self._requests)
        self._fail(error)

    def _reason(self, code: int) -> TidegateError:
        if code in (OUT_OF_MEMORY, -signal.SIGABRT):
            megabytes = self._limits.memory_max_bytes >> 20
            return KnowledgeError("K141", f"the SPARQL needs over {megabytes} MiB of memory", "narrow its patterns")
        if code in (-signal.SIGALRM, -signal.SIGPROF):
            return self._too_long()
        return KnowledgeError(ENDED, f"the SPARQL crashed its worker (exit code {code})", "simplify it")

    def _too_long(self) -> KnowledgeError:
        limit_s = _time_used_s(self._requests[0].message)
        return KnowledgeError("K140", f"the SPARQL takes over {limit_s:g} s", "use narrower patterns, or LIMIT")

    # Time limits.

    def _start_timer(self) -> None:
        """Starts the timer of the first request. Before the worker is ready there is none, as it cannot start yet."""
        if not self._is_ready:
            return
        loop, message = asyncio.get_running_loop(), self._requests[0].message
        if isinstance(message, Ask) and message.is_open:
            self._timer = loop.call_later(CATCH_UP_MAX_S, self._on_catch_up_timeout)
        else:
            self._timer = loop.call_later(message.time_max_s, self._on_timeout)

    def _on_begun(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._requests[0].message.time_max_s, self._on_timeout)

    def _on_catch_up_timeout(self) -> None:
        self._end()
        if self._requests[0].is_second_try:
            self._fail(_not_started(f"it took over {CATCH_UP_MAX_S:g} s to apply earlier changes"))
        else:
            self._requests[0] = replace(self._requests[0], is_second_try=True)
            self._start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_start_timeout(self) -> None:
        self._end()
        self._fail(_not_started(f"it took over {START_MAX_S:g} s to start"))

    def _on_timeout(self) -> None:
        self.killed += 1
        error = self._too_long()
        self._end()
        self._fail(error)

    # Sending and receiving.

    def _put(self, message: bytes) -> None:
        self._unsent.append(message)
        self._unsent_bytes += len(message)

    def _flush(self) -> None:
        if self._process is None:
            return
        loop, connection = asyncio.get_running_loop(), self._process.connection
        while self._unsent:
            piece = self._next_piece()
            try:
                sent = connection.send(piece)
            except BlockingIOError:
                sent = 0
            except ConnectionError:
                return  # `_on_readable` detects that the process has ended
            self._unsent_bytes -= sent
            if sent < len(piece):
                self._unsent.appendleft(piece[sent:])
                self._is_blocked = True
                loop.add_writer(connection, self._flush)
                return
        if self._is_blocked:
            self._is_blocked = False
            loop.remove_writer(connection)

    def _next_piece(self) -> bytes:
        pieces, size = [self._unsent.popleft()], 0
        while self._unsent and (size := size + len(pieces[-1])) < UNSENT_BYTES:
            pieces.append(self._unsent.popleft())
        return b"".join(pieces)

    def _on_readable(self) -> None:
        assert self._process is not None
        try:
            received = self._process.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        if not received:
            self._on_death()
            return
        self._received += received
        process = self._process
        for reply in self._replies():
            self._on_reply(reply)
            if self._process is not process:
                return

    def _replies(self) -> Iterator[Reply]:
        while len(self._received) >= FRAME_HEAD_BYTES:
            end = FRAME_HEAD_BYTES + int.from_bytes(self._received[:FRAME_HEAD_BYTES])
            if len(self._received) < end:
                return
            message = bytes(self._received[FRAME_HEAD_BYTES:end])
            del self._received[:end]
            yield read_reply(message)

    def _on_reply(self, reply: Reply) -> None:
        match reply:
            case Ready():
                self._is_ready = True
                self._stop_timer()
                if self._requests:
                    self._start_timer()
            case Begun():
                self._on_begun()
            case Answered():
                rows, self._rows = self._rows, []
                self.took_s = reply.took_s
                is_truth = reply.shape in (Shape.TRUTH, Shape.WQL_TRUTH)
                self._answer(Result(reply.shape, [reply.is_true] if is_truth else rows, reply.variables))
            case Updated():
                delta = Delta(reply.added, reply.removed, reply.named)
                self._applied_update = frame(Change(delta.added, delta.removed)) if delta else b""
                self._answer(delta)
            case Refused():
                self.took_s = reply.took_s
                self._answer(self._error(reply))
            case _:
                self._rows += reply.rows

    def _error(self, reply: Refused) -> TidegateError:
        if reply.code != DAMAGED:
            return KnowledgeError(reply.code, reply.message, reply.remedy)
        self._graph.damages += 1  # the copy links to the graph's own files, so those are damaged too
        return Damaged(reply.code, reply.message, reply.remedy)

    def _answer(self, answer: Result | Delta | TidegateError) -> None:
        self._stop_timer()
        answered = self._requests.popleft()
        if self._requests:
            self._start_timer()
        else:
            self._end_if_outdated()
        answered.on_answer(answer)


def _time_used_s(message: Ask | Update) -> float:
    """Returns the time that is charged for a request that reached a limit."""
    return message.processor_max_s if isinstance(message, Ask) and message.is_open else message.time_max_s


def _shutting_down() -> Unavailable:
    return Unavailable("U702", "the broker is shutting down", "connect again in a moment")


def _not_started(reason: object) -> Unavailable:
    return Unavailable("K144", f"the broker cannot start a SPARQL worker: {reason}", "see the broker's log")


def _launch(graph: Graph, limits: SparqlLimits) -> _Process:
    copy = graph.copy()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    command = [sys.executable, "-m", "tidegate.knowledge.sparql_worker"]
    arguments = [str(theirs.fileno()), str(copy), str(limits.memory_max_bytes)]
    try:
        with theirs:
            popen = subprocess.Popen(  # noqa: S603
                [*command, *arguments],
                # The worker evaluates untrusted queries, so it gets one socket and no secrets.
                env=without_secrets(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
    except OSError:
        ours.close()
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return _Process(popen, ours, copy)


def _clean_up(process: _Process) -> None:
    process.popen.wait()
    shutil.rmtree(process.copy, ignore_errors=True)
