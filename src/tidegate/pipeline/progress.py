"""Waits for streaming queries: shows a progress line, stops them in order, and turns failures into useful errors.

Spark wraps a failure in an executor into a long text that includes Python's traceback. The user needs to see only the
Tidegate error in that text.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from tidegate import errors
from tidegate.errors import TidegateError, Unavailable

LOOK_EVERY_S: Final = 0.5
# The last line of a Python traceback.
_RAISED: Final = re.compile(r"^  .*\n(\w[\w.]*: .+)$", re.MULTILINE)
_OURS: Final = re.compile(r"(?:^|\s)(\w+) ([A-Z]\d{3}): ([^\n]*); ([^\n;]*)")


def follow(
    queries: Sequence[StreamingQuery],
    *,
    show: Callable[[str], None] | None = None,
    on_progress: Callable[[Sequence[StreamingQuery]], None] | None = None,
) -> None:
    """Waits until all queries have ended. If one fails, stops the others and raises its failure.

    On Ctrl-C it stops the queries in the order given, then raises KeyboardInterrupt. `on_progress` is called with the
    queries twice a second, and at the end."""
    display = show if show is not None else show_line if sys.stderr.isatty() else None
    with _interrupts() as interrupted:
        try:
            while any(query.isActive for query in queries) and not interrupted.is_set():
                _raise_failure(queries)
                if display is not None:
                    display(progress_line(queries))
                if on_progress is not None:
                    on_progress(queries)
                interrupted.wait(LOOK_EVERY_S)
            _raise_failure(queries)
            if on_progress is not None:
                on_progress(queries)
        finally:
            if display is show_line:
                print(file=sys.stderr)
            for query in queries:
                if query.isActive:
                    query.stop()
    if interrupted.is_set():
        raise KeyboardInterrupt


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Records the first Ctrl-C instead of raising it at an arbitrary point; the second one is raised at once.

    Each thread has one connection to Java. An exception between a call and its answer would leave the answer unread,
    and the next call would take it for its own. Queries would then seem to have stopped while they run, or fail without
    a reason."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def progress_line(queries: Sequence[StreamingQuery]) -> str:
    """Returns `readings: batch 12, 40,211 rows/s, 3,000 behind, 412 ms a batch` for each query."""
    return " | ".join(_describe(query) for query in queries)


def lag(progress: Any) -> int:
    """Returns how many rows wait in the queues of a query, as of its last batch."""
    behind = 0
    for source in progress.sources:
        latest, end = _sequences(source.latestOffset), _sequences(source.endOffset)
        behind += sum(max(0, newest - done) for newest, done in zip(latest, end, strict=False))
    return behind


def to_error(failure: Exception) -> TidegateError:
    """Returns the Tidegate error in a failure of Spark, or one with Spark's own reason."""
    text = str(failure)
    found = _OURS.findall(text)
    for name, code, message, remedy in reversed(found):
        shape = getattr(errors, name, None)
        if isinstance(shape, type) and issubclass(shape, TidegateError):
            return shape(code, message, remedy)
    raised = _RAISED.findall(text)
    reason = raised[-1] if raised else next((line.strip() for line in text.splitlines() if line.strip()), "no reason")
    return Unavailable("U711", f"Spark failed: {reason}", "see the messages above, then start again: nothing is lost")


@contextmanager
def spark_failures_as_errors() -> Iterator[None]:
    """Turns failures of Spark jobs into Tidegate errors without a cause.

    `foreachBatch` depends on this. Spark searches what Python raises for interruptions, with a regular expression that
    overflows the stack on a Java stack trace. The query would then end without an error."""
    try:
        yield
    except (PySparkException, Py4JError) as failure:
        raise to_error(failure) from None


def _raise_failure(queries: Sequence[StreamingQuery]) -> None:
    for query in queries:
        failure = query.exception()
        if failure is not None:
            raise to_error(failure) from failure


def _describe(query: StreamingQuery) -> str:
    progress: Any = query.lastProgress
    name = query.name or "query"
    if progress is None:
        return f"{name}: starting"
    rate = progress.processedRowsPerSecond or 0.0
    duration = progress.durationMs.get("triggerExecution", 0)
    return f"{name}: batch {progress.batchId}, {rate:,.0f} rows/s, {lag(progress):,} behind, {duration:,} ms a batch"


def _sequences(offset: str | None) -> list[int]:
    """Returns the sequences of an offset of our own source; the lag of other sources is unknown."""
    if not offset:
        return []
    try:
        return msgspec.json.decode(offset, type=_Sequences).sequences
    except msgspec.DecodeError:
        return []


class _Sequences(msgspec.Struct):
    sequences: list[int]


def show_line(line: str) -> None:
    """Replaces the current line of the terminal."""
    print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
