"""A SPARQL worker: a process with a copy of the graph that evaluates clients' queries and may be killed for them.

It evaluates SPARQL, and the WQL of questions that stay open.

The broker passes it a socket and the directory of a copy. On the socket the broker sends all its changes in order, and
queries and updates between them. Each query sees all changes before it. The worker executes an update on its copy and
returns the delta. The broker decides whether to apply the delta to the graph; if not, it kills this process. A frame is
a length of four bytes and a MessagePack message. Rows are sent in parts, so that the broker can serve others between
them.

Each evaluation has a limit of time and of memory. An open question is also limited by processor time, so that a busy
machine does not end it. The broker enforces the time limit as well; an alarm of the kernel is the backup, in case the
broker itself was killed. The process exits when it runs out of memory, and when the socket is closed. It then removes
its copy.

What may go wrong: `Graph` refuses a request, and its error is the answer. Any other failure ends the process, and the
broker reports the reason.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from tidegate.errors import TidegateError
from tidegate.knowledge import question as questions
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.question import Shape, SparqlQuery
from tidegate.knowledge.terms import Literal, NewTriple, Term, Triple, Uri
from tidegate.knowledge.wql import WqlQuery, unpacked_path

FRAME_HEAD_BYTES: Final = 4
ROWS_PART: Final = 1000
SEND_BYTES: Final = 64 * 1024
GRACE_S: Final = 1.0  # the broker's head start to kill this process, before the alarm of the kernel does
WALL_TIME_FACTOR_MAX: Final = 10  # an open question's limit of time, as a multiple of its processor time
OUT_OF_MEMORY: Final = 12  # the exit code when Python runs out of memory; the store instead aborts the process

_PAGE_BYTES: Final = resource.getpagesize()


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Change(_Message, frozen=True):
    added: tuple[Triple, ...]
    removed: tuple[Triple, ...]


class Ask(_Message, frozen=True):
    """A query in SPARQL or WQL. A WQL path is encoded without its type, and decoded by `unpacked_path`.

    A query with a limit of processor time is an open question: the worker sends `Begun` when its evaluation starts,
    after it has applied all earlier changes.
    """

    text: str
    time_max_s: float
    rows_max: int
    processor_max_s: float = 0.0
    start: Uri | Literal | None = None
    path: Any = None
    end: Uri | Literal | None = None

    @classmethod
    def of(cls, question: SparqlQuery | WqlQuery, processor_max_s: float, rows_max: int) -> Ask:
        """Returns the request for a question that stays open."""
        time_max_s = WALL_TIME_FACTOR_MAX * processor_max_s
        if isinstance(question, SparqlQuery):
            return cls(question.text, time_max_s, rows_max, processor_max_s)
        return cls("", time_max_s, rows_max, processor_max_s, question.start, question.path, question.end)

    @property
    def is_open(self) -> bool:
        return self.processor_max_s > 0

    @property
    def question(self) -> SparqlQuery | WqlQuery:
        if self.start is None:
            return SparqlQuery(self.text)
        return WqlQuery(self.start, unpacked_path(self.path), self.end)


class Update(_Message, frozen=True):
    text: str
    time_max_s: float


class Ready(_Message, frozen=True):
    """The worker has read its copy of the graph."""


class Begun(_Message, frozen=True):
    """The evaluation of an open question starts."""


class NodesPart(_Message, frozen=True):
    rows: list[Uri | Literal]


class SolutionsPart(_Message, frozen=True):
    rows: list[tuple[Term | None, ...]]


class TriplesPart(_Message, frozen=True):
    rows: list[NewTriple]


class Answered(_Message, frozen=True):
    """The end of an answer. Its rows were sent before; a truth value is in `is_true`. `took_s` is processor time."""

    shape: Shape
    variables: tuple[str, ...]
    is_true: bool
    took_s: float


class Updated(_Message, frozen=True):
    added: tuple[Triple, ...]
    removed: tuple[Triple, ...]
    named: dict[str, Uri]


class Refused(_Message, frozen=True):
    code: str
    message: str
    remedy: str
    took_s: float


Reply: TypeAlias = Ready | Begun | NodesPart | SolutionsPart | TriplesPart | Answered | Updated | Refused

_PARTS: Final[dict[Shape, Any]] = {
    Shape.TRIPLES: TriplesPart,
    Shape.SOLUTIONS: SolutionsPart,
    Shape.NODES: NodesPart,
}

_encode = msgspec.msgpack.Encoder().encode
_read_request = msgspec.msgpack.Decoder(Change | Ask | Update).decode
read_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Any) -> bytes:
    packed = _encode(message)
    return len(packed).to_bytes(FRAME_HEAD_BYTES) + packed


def main() -> None:
    descriptor, directory, memory_max_bytes = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the broker, which then closes the socket
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    copy, code = Path(directory), 0
    connection = socket.socket(fileno=int(descriptor))
    try:
        _serve(connection, copy, int(memory_max_bytes))
    except MemoryError:
        code = OUT_OF_MEMORY
    except ConnectionError:
        pass  # the broker ended in the middle of an answer
    except BaseException:  # a panic of the store is not an Exception
        traceback.print_exc()
        code = 1
    shutil.rmtree(copy, ignore_errors=True)
    os._exit(code)  # skips all cleanup: the broker sees the socket close and blocks until this process has exited


def _serve(connection: socket.socket, copy: Path, memory_max_bytes: int) -> None:
    graph = Graph.open_copy(copy)
    connection.sendall(frame(Ready()))
    with connection.makefile("rb") as stream, open("/proc/self/statm", "rb", buffering=0) as size:
        while len(head := stream.read(FRAME_HEAD_BYTES)) == FRAME_HEAD_BYTES:
            request = _read_request(stream.read(int.from_bytes(head)))
            if isinstance(request, Change):
                graph.apply(Delta(request.added, request.removed))
            else:
                processor_max_s = request.processor_max_s if isinstance(request, Ask) else 0.0
                if processor_max_s:
                    connection.sendall(frame(Begun()))
                with _limited(request.time_max_s, processor_max_s, _size_bytes(size) + memory_max_bytes):
                    _send(connection, _replies(graph, request))


def _send(connection: socket.socket, replies: Iterator[Reply]) -> None:
    """Sends the replies. It joins small frames, so that a short answer is sent in one piece."""
    unsent = b""
    for reply in replies:
        unsent += frame(reply)
        if len(unsent) > SEND_BYTES:
            connection.sendall(unsent)
            unsent = b""
    connection.sendall(unsent)


def _replies(graph: Graph, request: Ask | Update) -> Iterator[Reply]:
    began_s = time.process_time()
    try:
        if isinstance(request, Update):
            delta = graph.update(request.text)
            yield Updated(delta.added, delta.removed, delta.named)
            return
        graph.rows_max = request.rows_max
        result = questions.ask(graph, request.question)
    except TidegateError as error:
        yield Refused(error.code, error.message, error.remedy, time.process_time() - began_s)
        return
    rows: list[Any] = result.rows
    if (part_type := _PARTS.get(result.shape)) is not None:
        for start in range(0, len(rows), ROWS_PART):
            yield part_type(rows[start : start + ROWS_PART])
    is_true = part_type is None and rows[0]
    yield Answered(result.shape, result.variables, is_true, time.process_time() - began_s)


@contextlib.contextmanager
def _limited(time_max_s: float, processor_max_s: float, memory_max_bytes: int) -> Iterator[None]:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounded = memory_max_bytes if hard == resource.RLIM_INFINITY else min(memory_max_bytes, hard)
    signal.setitimer(signal.ITIMER_REAL, time_max_s + GRACE_S)
    signal.setitimer(signal.ITIMER_PROF, processor_max_s)  # 0 means no limit
    resource.setrlimit(resource.RLIMIT_AS, (bounded, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _size_bytes(statm: io.FileIO) -> int:
    """Returns the current size of the process, including its copy. The memory limit of an evaluation is added to
    it."""
    statm.seek(0)
    return int(statm.read(64).split()[0]) * _PAGE_BYTES


if __name__ == "__main__":
    main()
