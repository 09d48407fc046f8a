"""The broker's side of SPARQL workers: processes that are started when they are needed, fed with changes, and killed.

One worker serves the lane of changes: updates, and the queries that stay open, which are evaluated at every change that
concerns them. The others serve queries. So a query that takes long holds up no change. A worker begins as a copy of the
graph, made in a thread, and is told every change since then; a copy that has some of these changes already becomes the
same. Whatever is asked of it comes after all changes that were made before: no answer is older than its question.

The request at the head of a worker has until `time_max_s` from when the worker could begin with it. Then the process is
killed, and another one is started for those behind it. Nothing here blocks: copies are made, and processes reaped, in
threads.

A worker that somebody else has killed is found dead by the next request: whatever ends a process without having
reached a limit is asked again, once, of another one.

What may go wrong, each for the request at the head alone: it takes too long (K140) or too much memory (K141), ends its
process in another way twice (K143), or no worker can be started (K144); what the worker refuses. All requests: the
broker shuts down (U702).
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
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.question import Result, Row, Shape
from tidegate.knowledge.sparql_worker import (
    FRAME_HEAD_BYTES,
    OUT_OF_MEMORY,
    Answered,
    Ask,
    Change,
    Ready,
    Refused,
    Reply,
    Update,
    Updated,
    frame,
    read_reply,
)

log = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024
# Changes are sent when there are so many, or with the next request; a worker that is behind by more is given up.
UNSENT_BYTES: Final = 64 * 1024
UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024
START_MAX_S: Final = 120.0  # until a worker has read its copy
# A worker that nobody has asked anything for so many changes ends, as it costs more than it is worth.
CHANGES_UNASKED_MAX: Final = 100_000
ENDED: Final = "K143"

OnAnswer: TypeAlias = Callable[[Result | Delta | TidegateError], None]


@dataclass(frozen=True, slots=True)
class SparqlLimits:
    """Of a query or update from outside. A query that stays open has less, as changes wait for it, and its rows are
    compared on the event loop."""

    time_max_s: float = 5.0
    rows_max: int = 100_000
    open_time_max_s: float = 1.0
    open_rows_max: int = 10_000
    memory_max_bytes: int = 512 * 1024 * 1024  # beside the copy of the graph


@dataclass(frozen=True, slots=True)
class SparqlWorkersStatistics:
    processes: int
    started: int
    killed: int  # by a limit


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
    """To be used on the thread of an event loop. `on_answer` gets the answer or an error, later, unless it is stopped
    before; it must ask for at most `query_workers` queries at a time."""

    def __init__(self, graph: Graph, query_workers: int, limits: SparqlLimits | None = None) -> None:
        self._limits = limits or SparqlLimits()
        self._rows_max = min(self._limits.rows_max, graph.rows_max)
        self._open_rows_max = min(self._limits.open_rows_max, graph.rows_max)
        self._of_changes = SparqlWorker(graph, self._limits)
        self._of_queries = [SparqlWorker(graph, self._limits) for _ in range(query_workers)]
        self._all = [self._of_changes, *self._of_queries]

    def ask(self, text: str, on_answer: OnAnswer) -> None:
        idle = [worker for worker in self._of_queries if not worker.is_busy]
        worker = next((worker for worker in idle if worker.is_running), idle[0])
        worker.request(Ask(text, self._limits.time_max_s, self._rows_max), on_answer)

    def ask_open(self, text: str, on_answer: OnAnswer) -> None:
        """In the lane of changes: the answer is that of the graph as it is now."""
        self._of_changes.request(Ask(text, self._limits.open_time_max_s, self._open_rows_max), on_answer)

    def update(self, text: str, on_answer: OnAnswer) -> None:
        """The delta of an update. The worker has made it: unless the next change is just that, it is given up."""
        self._of_changes.request(Update(text, self._limits.time_max_s), on_answer)

    def on_change(self, delta: Delta) -> None:
        """To be told every change."""
        if any(worker.is_running for worker in self._all):
            change = frame(Change(delta.added, delta.removed))
            for worker in self._all:
                worker.on_change(change)

    async def stop(self) -> None:
        """Ends all processes; nothing is asked any more."""
        for worker in self._all:
            await worker.stop()

    def statistics(self) -> SparqlWorkersStatistics:
        return SparqlWorkersStatistics(
            processes=sum(worker.is_running for worker in self._all),
            started=sum(worker.started for worker in self._all),
            killed=sum(worker.killed for worker in self._all),
        )


class SparqlWorker:
    """The place of one process: there is one while it is needed, and another when it was killed."""

    def __init__(self, graph: Graph, limits: SparqlLimits) -> None:
        self._graph = graph
        self._limits = limits
        self._requests: deque[_Request] = deque()
        self._rows: list[Row] = []  # of the answer that is coming
        self._process: _Process | None = None
        self._starting: asyncio.Future[_Process] | None = None
        self._is_ready = False
        self._is_outdated = False
        self._is_stopped = False
        self._ahead = b""  # the change that it has made already, by an update that the graph has not
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._is_blocked = False  # the socket takes no more for now
        self._changes_unasked = 0
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._reaped: asyncio.Future[None] | None = None
        self.started = self.killed = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None or self._starting is not None

    @property
    def is_busy(self) -> bool:
        return bool(self._requests)

    def request(self, message: Ask | Update, on_answer: OnAnswer) -> None:
        assert not self._is_outdated, "one that is behind ends with its last request"
        if self._is_stopped:
            on_answer(_shutting_down())
            return
        if self._ahead:
            self._end()
        self._changes_unasked = 0
        self._requests.append(_Request(message, on_answer))
        if self.is_running:
            self._put(frame(message))
            self._flush()
            if len(self._requests) == 1:
                self._watch()
        else:
            self._start()

    def on_change(self, change: bytes) -> None:
        if self._ahead:
            if change != self._ahead:
                self._end()
            self._ahead = b""
        elif self.is_running and not self._is_outdated:
            self._put(change)
            self._changes_unasked += 1
            if self._unsent_bytes > UNSENT_BYTES and not self._is_blocked:
                self._flush()
            self._is_outdated = self._unsent_bytes > UNSENT_BYTES_MAX or self._changes_unasked > CHANGES_UNASKED_MAX
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

    # The life of a process.

    def _start(self) -> None:
        self.started += 1
        loop = asyncio.get_running_loop()
        self._starting = starting = loop.run_in_executor(None, _launch, self._graph, self._limits)
        self._timer = loop.call_later(START_MAX_S, self._on_late)
        for request in self._requests:
            self._put(frame(request.message))
        starting.add_done_callback(self._on_started)

    def _on_started(self, starting: asyncio.Future[_Process]) -> None:
        if starting is not self._starting:  # it was ended before it began
            if starting.exception() is None:
                self._reap(starting.result())
            return
        self._starting = None
        if (error := starting.exception()) is not None:
            log.error("a SPARQL worker cannot be started", exc_info=error)
            self._end()
            self._fail(_not_started(error))
            return
        self._process = starting.result()
        asyncio.get_running_loop().add_reader(self._process.connection, self._on_readable)
        self._flush()

    def _end(self) -> None:
        """Forgets the process, whatever it does; what was not answered is to be asked again."""
        self._is_ready = self._is_outdated = self._is_blocked = False
        self._ahead = b""
        self._unsent.clear()
        self._unsent_bytes = self._changes_unasked = 0
        self._rows = []
        self._received.clear()
        self._watch_no_more()
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
        """One that is too far behind answers what it was asked before, if it has begun with it."""
        if self._is_outdated and not (self._is_ready and self._requests):
            self._end()
            if self._requests:
                self._start()

    def _fail(self, error: TidegateError) -> None:
        """The process has ended, and this is the answer to the request at the head; the others are asked again."""
        if self._requests:
            failed = self._requests.popleft()
            if self._requests:
                self._start()
            failed.on_answer(error)

    def _on_death(self) -> None:
        assert self._process is not None
        code = self._process.popen.wait()  # at once: the kernel closes its sockets last
        error = self._reason(code) if self._is_ready else _not_started(f"it has ended with code {code}")
        self._end()
        if error.code == ENDED and self._requests and not self._requests[0].is_second_try:
            self._requests[0] = replace(self._requests[0], is_second_try=True)
            self._start()
            return
        self.killed += bool(self._requests)
        self._fail(error)

    def _reason(self, code: int) -> TidegateError:
        if code in (OUT_OF_MEMORY, -signal.SIGABRT):
            megabytes = self._limits.memory_max_bytes >> 20
            return KnowledgeError("K141", f"the SPARQL takes over {megabytes} MiB of memory", "ask for less at a time")
        if code == -signal.SIGALRM:
            return self._too_long()
        return KnowledgeError(ENDED, f"the SPARQL has ended its worker (code {code})", "ask in a simpler way")

    def _too_long(self) -> KnowledgeError:
        limit_s = self._requests[0].message.time_max_s
        return KnowledgeError("K140", f"the SPARQL takes over {limit_s:g} s", "bind more of its patterns, or use LIMIT")

    # The limit of time.

    def _watch(self) -> None:
        """From now on, for the request at the head; before the worker is ready it could not begin."""
        if self._is_ready:
            limit_s = self._requests[0].message.time_max_s
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._on_time)

    def _watch_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        self._end()
        self._fail(_not_started(f"it takes over {START_MAX_S:g} s"))

    def _on_time(self) -> None:
        self.killed += 1
        error = self._too_long()
        self._end()
        self._fail(error)

    # What is sent and received.

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
                return  # whoever reads sees its death
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
                self._watch_no_more()
                if self._requests:
                    self._watch()
            case Answered():
                rows, self._rows = self._rows, []
                self._answer(
                    Result(reply.shape, [reply.is_true] if reply.shape is Shape.TRUTH else rows, reply.variables)
                )
            case Updated():
                delta = Delta(reply.added, reply.removed, reply.named)
                self._ahead = frame(Change(delta.added, delta.removed)) if delta else b""
                self._answer(delta)
            case Refused():
                self._answer(KnowledgeError(reply.code, reply.message, reply.remedy))
            case _:
                self._rows += reply.rows

    def _answer(self, answer: Result | Delta | TidegateError) -> None:
        self._watch_no_more()
        answered = self._requests.popleft()
        if self._requests:
            self._watch()
        else:
            self._end_if_outdated()
        answered.on_answer(answer)


def _shutting_down() -> Unavailable:
    return Unavailable("U702", "the broker is shutting down", "connect again in a moment")


def _not_started(reason: object) -> Unavailable:
    return Unavailable("K144", f"no SPARQL worker can be started: {reason}", "look into the log of the broker")


def _launch(graph: Graph, limits: SparqlLimits) -> _Process:
    copy = graph.copy()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    command = [sys.executable, "-m", "tidegate.knowledge.sparql_worker"]
    arguments = [str(theirs.fileno()), str(copy), str(limits.memory_max_bytes)]
    try:
        with theirs:
            popen = subprocess.Popen(  # noqa: S603
                [*command, *arguments], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
    except OSError:
        ours.close()
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return _Process(popen, ours, copy)


def _clean_up(process: _Process) -> None:
    process.popen.wait()
    shutil.rmtree(process.copy, ignore_errors=True)
