"""A SPARQL worker: a process with a copy of the graph, which evaluates what came from outside and may be killed for it.

The broker hands it a socket and the directory of a copy. On the socket come the changes that the broker has made, in
their order, and between them queries and updates: each sees all changes before it. An update is made on the copy and
answered with its delta; whether it is made on the graph is for the broker to decide, which kills this process if not.
Frames are a length of four bytes and a message of MessagePack. Rows come in parts, so that whoever reads them has time
for others in between.

An evaluation has a limit of time and one of memory. The broker looks at its clock too; here an alarm of the kernel ends
the process if the broker did not, as it cannot when it was killed itself. Without memory the process ends. So does it
when the socket is closed, and then it removes its copy.

What may go wrong: what `Graph` refuses, which is the answer; everything else ends the process, and the broker names the
reason.
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
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from tidegate.errors import KnowledgeError
from tidegate.knowledge import question as questions
from tidegate.knowledge.graph import Delta, Graph, NewTriple
from tidegate.knowledge.question import Shape, SparqlQuery
from tidegate.knowledge.terms import Term, Triple, Uri

FRAME_HEAD_BYTES: Final = 4
ROWS_PART: Final = 1000
SEND_BYTES: Final = 64 * 1024
GRACE_S: Final = 1.0  # for the broker to end this process before it does so itself
OUT_OF_MEMORY: Final = 12  # the exit code, when Python finds no memory; the store aborts the process

_PAGE_BYTES: Final = resource.getpagesize()


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Change(_Message, frozen=True):
    added: tuple[Triple, ...]
    removed: tuple[Triple, ...]


class Ask(_Message, frozen=True):
    text: str
    time_max_s: float
    rows_max: int


class Update(_Message, frozen=True):
    text: str
    time_max_s: float


class Ready(_Message, frozen=True):
    """The copy is read."""


class SolutionsPart(_Message, frozen=True):
    rows: list[tuple[Term | None, ...]]


class TriplesPart(_Message, frozen=True):
    rows: list[NewTriple]


class Answered(_Message, frozen=True):
    """The end of an answer; its rows came before, but for a yes or no."""

    shape: Shape
    variables: tuple[str, ...]
    is_true: bool


class Updated(_Message, frozen=True):
    added: tuple[Triple, ...]
    removed: tuple[Triple, ...]
    named: dict[str, Uri]


class Refused(_Message, frozen=True):
    code: str
    message: str
    remedy: str


Reply: TypeAlias = Ready | SolutionsPart | TriplesPart | Answered | Updated | Refused

_encode = msgspec.msgpack.Encoder().encode
_read_request = msgspec.msgpack.Decoder(Change | Ask | Update).decode
read_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Any) -> bytes:
    packed = _encode(message)
    return len(packed).to_bytes(FRAME_HEAD_BYTES) + packed


def main() -> None:
    descriptor, directory, memory_max_bytes = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the broker, which then closes the socket
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    copy, code = Path(directory), 0
    connection = socket.socket(fileno=int(descriptor))
    try:
        _serve(connection, copy, int(memory_max_bytes))
    except MemoryError:
        code = OUT_OF_MEMORY
    except ConnectionError:
        pass  # the broker has ended in the middle of an answer
    except BaseException:  # a panic of the store is no Exception
        traceback.print_exc()
        code = 1
    shutil.rmtree(copy, ignore_errors=True)
    os._exit(code)  # at once: the broker, which sees the socket closed by this, waits for it


def _serve(connection: socket.socket, copy: Path, memory_max_bytes: int) -> None:
    graph = Graph.open_copy(copy)
    connection.sendall(frame(Ready()))
    with connection.makefile("rb") as stream, open("/proc/self/statm", "rb", buffering=0) as size:
        while len(head := stream.read(FRAME_HEAD_BYTES)) == FRAME_HEAD_BYTES:
            request = _read_request(stream.read(int.from_bytes(head)))
            if isinstance(request, Change):
                graph.apply(Delta(request.added, request.removed))
            else:
                with _limited(request.time_max_s, _size_bytes(size) + memory_max_bytes):
                    _send(connection, _replies(graph, request))


def _send(connection: socket.socket, replies: Iterator[Reply]) -> None:
    """A short answer in one piece."""
    unsent = b""
    for reply in replies:
        unsent += frame(reply)
        if len(unsent) > SEND_BYTES:
            connection.sendall(unsent)
            unsent = b""
    connection.sendall(unsent)


def _replies(graph: Graph, request: Ask | Update) -> Iterator[Reply]:
    try:
        if isinstance(request, Update):
            delta = graph.update(request.text)
            yield Updated(delta.added, delta.removed, delta.named)
            return
        graph.rows_max = request.rows_max
        result = questions.ask(graph, SparqlQuery(request.text))
    except KnowledgeError as error:
        yield Refused(error.code, error.message, error.remedy)
        return
    rows: list[Any] = result.rows
    if result.shape is not Shape.TRUTH:
        part_type = TriplesPart if result.shape is Shape.TRIPLES else SolutionsPart
        for start in range(0, len(rows), ROWS_PART):
            yield part_type(rows[start : start + ROWS_PART])
    yield Answered(result.shape, result.variables, result.shape is Shape.TRUTH and rows[0])


@contextlib.contextmanager
def _limited(time_max_s: float, memory_max_bytes: int) -> Iterator[None]:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounded = memory_max_bytes if hard == resource.RLIM_INFINITY else min(memory_max_bytes, hard)
    signal.setitimer(signal.ITIMER_REAL, time_max_s + GRACE_S)
    resource.setrlimit(resource.RLIMIT_AS, (bounded, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _size_bytes(statm: io.FileIO) -> int:
    """What the process takes by now, with its copy: an evaluation may take so much more."""
    statm.seek(0)
    return int(statm.read(64).split()[0]) * _PAGE_BYTES


if __name__ == "__main__":
    main()
