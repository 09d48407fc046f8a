"""Waiting for streaming queries: a progress line for people, a tidy end, and failures as errors that one can act on.

Spark wraps what fails in an executor into a long text with the traceback of Python in it; the error of ours that is in
there is what the user must see.
"""

from __future__ import annotations

import re
import sys
import time
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
# The last line of a traceback of Python.
_RAISED: Final = re.compile(r"^  .*\n(\w[\w.]*: .+)$", re.MULTILINE)
_OURS: Final = re.compile(r"(?:^|\s)(\w+) ([A-Z]\d{3}): ([^\n]*); ([^\n;]*)")


def follow(
    queries: Sequence[StreamingQuery],
    *,
    show: Callable[[str], None] | None = None,
    look: Callable[[Sequence[StreamingQuery]], None] | None = None,
) -> None:
    """Returns when all queries have ended; on Ctrl-C they are stopped, in the order given. Raises the failure of the
    first that fails, with the others stopped. `look` is called with them twice a second, and at
    the end."""
    tell = show if show is not None else show_line if sys.stderr.isatty() else None
    try:
        while any(query.isActive for query in queries):
            _raise_failure(queries)
            if tell is not None:
                tell(progress_line(queries))
            if look is not None:
                look(queries)
            time.sleep(LOOK_EVERY_S)
        _raise_failure(queries)
        if look is not None:
            look(queries)
    finally:
        if tell is show_line:
            print(file=sys.stderr)
        for query in queries:
            if query.isActive:
                query.stop()


def progress_line(queries: Sequence[StreamingQuery]) -> str:
    """`readings: batch 12, 40,211 rows/s, 3,000 behind, 412 ms a batch` for each query."""
    return " | ".join(_describe(query) for query in queries)


def lag(progress: Any) -> int:
    """Rows that wait in the queues of a query, as of its last batch."""
    behind = 0
    for source in progress.sources:
        latest, end = _sequences(source.latestOffset), _sequences(source.endOffset)
        behind += sum(max(0, newest - done) for newest, done in zip(latest, end, strict=False))
    return behind


def to_error(failure: Exception) -> TidegateError:
    """The error of ours that a failure of Spark carries, or one that tells what Spark says."""
    text = str(failure)
    found = _OURS.findall(text)
    for name, code, message, remedy in reversed(found):
        shape = getattr(errors, name, None)
        if isinstance(shape, type) and issubclass(shape, TidegateError):
            return shape(code, message, remedy)
    raised = _RAISED.findall(text)
    reason = raised[-1] if raised else next((line.strip() for line in text.splitlines() if line.strip()), "no reason")
    return Unavailable("U711", f"Spark has failed: {reason}", "see its messages above; start again, nothing is lost")


@contextmanager
def failures_in_short() -> Iterator[None]:
    """Around jobs of Spark: what fails in them is an error of ours, without its cause. In `foreachBatch` it must be:
    Spark looks for interruptions in what Python raises, by a regular expression that overflows the stack when it meets
    a trace of Java, and then the query ends without an error."""
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
    """Those of our own source; other sources have no lag that we know of."""
    if not offset:
        return []
    try:
        return msgspec.json.decode(offset, type=_Sequences).sequences
    except msgspec.DecodeError:
        return []


class _Sequences(msgspec.Struct):
    sequences: list[int]


def show_line(line: str) -> None:
    """In place of the line before it, on a terminal."""
    print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
