"""Spark's source: from a queue of 1 KB messages to a sink that does nothing, compared with the limit of Python sources.

Measured in one Spark session with two threads, interleaved: the queue, the same Arrow batches from memory, and Spark's
own read of the same rows in Parquet. The CPU time per row of the broker, of Spark (Java) and of its Python workers
shows the bottleneck. Also measured: the time of an almost empty micro-batch, compared with Spark's own source `rate`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame, SparkSession

from benchmarks.job import Effort, show_progress
from benchmarks.memory_source import PARTITIONS, MemorySource, body
from benchmarks.over_tidegate import Broker, tidegate_broker
from benchmarks.processes import Failed, cpu_s, tree_cpu_s, tree_cpu_since_s
from benchmarks.tables import ratio, write_table
from tidegate.client import SyncConnection, connect_sync
from tidegate.messages import NewMessage
from tidegate.pipeline.session import end_session, spark_session

MASTER: Final = "local[2]"
ROWS_PER_TRIGGER: Final = 100_000
# The first batches of a query load Python's libraries and warm up Java.
WARM_UP_BATCHES: Final = 2
BATCHES: Final = 8
SMALL_BATCHES: Final = 40
ROUNDS_MAX: Final = 3
QUERY_S: Final = 300.0
PUT_AT_ONCE: Final = 5000

_QUEUE: Final = "queue"
_MEMORY: Final = "memory"
_TABLE: Final = "queue, as a table"
_PARQUET: Final = "Parquet, as a table"
_NAMES: Final = {
    _QUEUE: "Tidegate, stream",
    _MEMORY: "the same Arrow batches from memory, stream",
    _TABLE: "Tidegate, table",
    _PARQUET: "Parquet of the same rows, table",
}


@dataclass(frozen=True)
class Measured:
    """Rows per second, and CPU microseconds per row of the broker, of Spark's Java, and of its Python workers."""

    rows_per_s: float
    broker_us: float
    java_us: float
    python_us: float


def run(effort: Effort) -> str:
    rounds = min(effort.rounds, ROUNDS_MAX)
    batches = BATCHES if effort.rounds > 1 else WARM_UP_BATCHES + 1
    spark = spark_session(MASTER, name="benchmark", spark__driver__memory="3g")
    spark.dataSource.register(MemorySource)
    try:
        with TemporaryDirectory() as directory, tidegate_broker() as broker, connect_sync(broker.native) as connection:
            bench = _Bench(spark, connection, broker, Path(directory), batches * ROWS_PER_TRIGGER)
            return "\n".join([_throughput(bench, rounds), _small_batches(bench)])
    finally:
        end_session(spark)


def _throughput(bench: _Bench, rounds: int) -> str:
    runs: dict[str, list[Measured]] = {name: [] for name in _NAMES}
    for number in range(rounds):
        for name, measure in (
            (_TABLE, bench.table),
            (_PARQUET, bench.parquet),
            (_QUEUE, bench.stream),
            (_MEMORY, bench.memory_stream),
        ):
            measured = measure()
            runs[name].append(measured)
            show_progress(f"round {number + 1}  {_NAMES[name]}: {measured.rows_per_s:,.0f} rows/s")
    middle = {name: _middle(measured) for name, measured in runs.items()}
    ours = middle[_QUEUE]
    rows = [
        [
            _NAMES[name],
            f"{each.rows_per_s:,.0f}",
            f"{each.broker_us:.2f}",
            f"{each.python_us:.2f}",
            f"{each.java_us:.2f}",
            ratio(ours.rows_per_s, each.rows_per_s),
        ]
        for name, each in middle.items()
    ]
    parts = {"the broker": ours.broker_us, "Python in Spark": ours.python_us, "Java in Spark": ours.java_us}
    limit = max(parts, key=lambda part: parts[part])
    notes = (
        f"medians of {rounds} rounds in turns; {MASTER}, two physical queues, rows of 1 KB with all columns, to noop",
        f"streams: {ROWS_PER_TRIGGER:,} rows a batch, deleted behind it; the first {WARM_UP_BATCHES} do not count",
        "CPU in us per row, of all processes of a kind; the rest of two cores is idle or used by others",
        f"the most expensive part of Tidegate's stream is {limit}",
    )
    head = ("source", "rows/s", "broker us", "Python us", "Java us", "Tidegate, stream / this")
    return write_table("Spark: a queue to a sink that does nothing", head, rows, notes)


def _small_batches(bench: _Bench) -> str:
    measured = bench.small_batches()
    rate = median(measured["rate"])
    rows = [
        [name, f"{median(times):.0f}", f"{min(times):.0f}", f"{len(times)}", ratio(median(times), rate)]
        for name, times in measured.items()
    ]
    head = ("source", "median ms", "fastest ms", "batches", "this / rate")
    notes = (
        "triggerExecution as Spark reports it, all to noop, in turns",
        "the Python source that does nothing shows the minimum that Spark needs for any Python source",
    )
    return write_table("Spark: a micro-batch with almost nothing in it", head, rows, notes)


class _Bench:
    def __init__(
        self, spark: SparkSession, connection: SyncConnection, broker: Broker, directory: Path, rows: int
    ) -> None:
        self._spark = spark
        self._broker = broker
        self._directory = directory
        self._rows = rows
        self._queue = connection.queue("benchmark")
        self._queue.create(physical_queues=PARTITIONS, durability="os", bytes_max=1 << 33, messages_max=10_000_000)
        self._queries = 0
        self._clock = _Clock(spark, broker.pid)

    def stream(self) -> Measured:
        self._fill(self._rows)
        return self._run_query(self._from_queue(ROWS_PER_TRIGGER))

    def memory_stream(self) -> Measured:
        return self._run_query(self._from_memory(ROWS_PER_TRIGGER))

    def table(self) -> Measured:
        self._fill(self._rows)
        options = {"address": self._broker.native, "queue": "benchmark"}
        frame = self._spark.read.format("tidegate").options(**options).load()
        if not self._parquet.exists():
            frame.write.parquet(str(self._parquet))
        return self._to_noop(frame)

    def parquet(self) -> Measured:
        return self._to_noop(self._spark.read.parquet(str(self._parquet)))

    def small_batches(self) -> dict[str, list[float]]:
        """Returns the milliseconds of each batch, by source."""
        measured: dict[str, list[float]] = {"Tidegate, 2 rows": [], "in Python, 2 rows from memory": [], "rate": []}
        ours, memory, rate = measured.values()
        self._drain()
        for _ in range(2):
            with self._feeding():
                ours += self._batch_times(self._from_queue(ROWS_PER_TRIGGER))
            memory += self._batch_times(self._from_memory(PARTITIONS))
            rate += self._batch_times(self._spark.readStream.format("rate").option("rowsPerSecond", "20").load())
        return measured

    @property
    def _parquet(self) -> Path:
        return self._directory / "rows.parquet"

    def _fill(self, rows: int) -> None:
        """Fills the queue up to this many messages."""
        missing = rows - sum(level.messages for level in self._queue.levels())
        message = NewMessage(msgspec.Raw(body()))
        while missing > 0:
            self._queue.put_messages([message] * min(PUT_AT_ONCE, missing))
            missing -= PUT_AT_ONCE

    def _drain(self) -> None:
        for number, level in enumerate(self._queue.levels()):
            self._queue.delete_below(number, level.next)

    def _from_queue(self, rows_max: int) -> DataFrame:
        options = {"address": self._broker.native, "queue": "benchmark", "maxRowsPerTrigger": str(rows_max)}
        return self._spark.readStream.format("tidegate").options(**options).load()

    def _from_memory(self, rows_max: int) -> DataFrame:
        options = {"rows": str(self._rows), "rowsPerTrigger": str(rows_max)}
        return self._spark.readStream.format("memory_batches").options(**options).load()

    def _start(self, frame: DataFrame) -> Any:
        self._queries += 1
        checkpoint = str(self._directory / f"checkpoint-{self._queries}")
        return frame.writeStream.format("noop").option("checkpointLocation", checkpoint)

    def _run_query(self, frame: DataFrame) -> Measured:
        """Reads all available rows, batch by batch, and measures from the end of the warm-up."""
        query = self._start(frame).trigger(availableNow=True).start()
        self._wait(query, lambda: _done(query) >= WARM_UP_BATCHES)
        warm = _done(query)
        began_s, before = time.monotonic(), self._clock.read()
        query.awaitTermination(QUERY_S)
        elapsed_s, used = time.monotonic() - began_s, self._clock.since(before)
        progress = [each for each in query.recentProgress if each.numInputRows]
        rows = sum(each.numInputRows for each in progress)
        if rows != self._rows:
            raise Failed(f"the query has read {rows:,} of {self._rows:,} rows")
        counted = sum(each.numInputRows for each in progress[warm:])
        return Measured(counted / elapsed_s, *(1e6 * each / counted for each in used))

    def _to_noop(self, frame: DataFrame) -> Measured:
        began_s, before = time.monotonic(), self._clock.read()
        frame.write.format("noop").mode("overwrite").save()
        elapsed_s, used = time.monotonic() - began_s, self._clock.since(before)
        return Measured(self._rows / elapsed_s, *(1e6 * each / self._rows for each in used))

    @contextmanager
    def _feeding(self) -> Iterator[None]:
        """Puts two messages at a time, so that every batch finds some."""
        is_over = threading.Event()

        def feed() -> None:
            while not is_over.wait(0.05):
                self._queue.put_messages([NewMessage(msgspec.Raw(body()))] * PARTITIONS)

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            yield
        finally:
            is_over.set()
            feeder.join()

    def _batch_times(self, frame: DataFrame) -> list[float]:
        query = self._start(frame).start()
        try:
            self._wait(query, lambda: _done(query) >= WARM_UP_BATCHES + SMALL_BATCHES)
            progress = [each for each in query.recentProgress if each.numInputRows]
        finally:
            query.stop()
        return [each.durationMs["triggerExecution"] for each in progress[WARM_UP_BATCHES:]]

    def _wait(self, query: Any, is_there: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + QUERY_S
        while not is_there():
            if not query.isActive and not is_there():
                raise Failed(f"the query has ended: {query.exception()}")
            if time.monotonic() > deadline_s:
                raise Failed(f"the query has not read enough batches after {QUERY_S:g} s")
            time.sleep(0.005)


def _done(query: Any) -> int:
    """Returns the number of finished batches that had rows."""
    return sum(1 for each in query.recentProgress if each.numInputRows)


def _middle(runs: list[Measured]) -> Measured:
    return Measured(
        median(each.rows_per_s for each in runs),
        median(each.broker_us for each in runs),
        median(each.java_us for each in runs),
        median(each.python_us for each in runs),
    )


class _Clock:
    """Reads the CPU seconds of the broker, of Spark's Java, and of all Python processes that Java has started."""

    def __init__(self, spark: SparkSession, broker_pid: int) -> None:
        jvm: Any = spark._jvm
        self._java_pid = int(jvm.java.lang.ProcessHandle.current().pid())
        self._broker_pid = broker_pid

    def read(self) -> tuple[float, float, dict[int, float]]:
        return cpu_s(self._broker_pid), cpu_s(self._java_pid), tree_cpu_s(self._java_pid)

    def since(self, before: tuple[float, float, dict[int, float]]) -> tuple[float, float, float]:
        broker_s, java_s = cpu_s(self._broker_pid) - before[0], cpu_s(self._java_pid) - before[1]
        return broker_s, java_s, tree_cpu_since_s(self._java_pid, before[2]) - java_s
