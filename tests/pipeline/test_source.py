"""A logical queue as a table and a stream of Spark: nothing is lost or duplicated, whichever process ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow.parquet as pq
import pytest
from broker_process import BrokerProcess
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from seeds import SEED

from tidegate import NewMessage, SyncConnection, SyncQueue, connect_sync
from tidegate.errors import ConfigError, NoSuchQueue, QueueError, TidegateError, Unavailable
from tidegate.pipeline.progress import follow, lag, progress_line, to_error

pytestmark = pytest.mark.timeout(240)
WAIT_S = 90.0


@pytest.fixture
def connection(broker: BrokerProcess) -> Iterator[SyncConnection]:
    with connect_sync(broker.native) as connection:
        yield connection


@pytest.fixture
def queue(connection: SyncConnection) -> SyncQueue:
    queue = connection.queue(f"q-{uuid4().hex[:8]}")
    queue.create(physical_queues=2, durability="os")
    return queue


def put(queue: SyncQueue, *numbers: int) -> None:
    queue.put([{"n": number} for number in numbers])


def waiting(queue: SyncQueue) -> int:
    return sum(level.messages for level in queue.levels())


def eventually(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


class World:
    """A query that reads a queue into a list of batches. Its checkpoint is kept between runs."""

    def __init__(self, spark: SparkSession, address: str, queue: str, directory: Path) -> None:
        self.spark = spark
        self.options = {"address": address, "queue": queue, "schema": "n long", "retryTimeoutS": "30"}
        self.checkpoint = str(directory / "checkpoint")
        self.batches: list[tuple[int, list[int]]] = []
        self.fail_at = -1

    def start(self, **options: str) -> Any:
        frame = self.spark.readStream.format("tidegate").options(**self.options | options).load()
        return frame.writeStream.foreachBatch(self._keep).option("checkpointLocation", self.checkpoint)

    def run(self, **options: str) -> Any:
        """Reads everything available, and returns the query."""
        query = self.start(**options).trigger(availableNow=True).start()
        query.awaitTermination(WAIT_S)
        assert not query.isActive
        return query

    def failure(self, **options: str) -> TidegateError:
        with pytest.raises(PySparkException) as caught:
            self.run(**options)
        return to_error(caught.value)

    def numbers(self) -> list[int]:
        """Returns the numbers read. A replayed batch counts once, as in a sink that knows its number."""
        return sorted(number for numbers in dict(self.batches).values() for number in numbers)

    def _keep(self, batch: DataFrame, number: int) -> None:
        self.batches.append((number, sorted(row.n for row in batch.where("n is not null").select("n").collect())))
        if number == self.fail_at:
            self.fail_at = -1
            raise RuntimeError("the sink has failed")


@pytest.fixture
def world(spark: SparkSession, broker: BrokerProcess, queue: SyncQueue, tmp_path: Path) -> World:
    return World(spark, broker.native, queue.name, tmp_path)


class TestTable:
    def test_columns(self, spark: SparkSession, broker: BrokerProcess, queue: SyncQueue) -> None:
        began = datetime.now(UTC)
        body = msgspec.Raw(msgspec.msgpack.encode({"station": "28", "PM2.5": 3.5, "time": "2026-01-02T03:04:05Z"}))
        queue.put_messages([NewMessage(body, "group", "device", 7, {"kind": "reading"})])
        queue.put("no reading")
        reader = spark.read.format("tidegate").option("address", broker.native).option("queue", queue.name)
        reader = reader.option("schema", "station string, `PM2.5` double, time timestamp")
        rows = {row["_device"] == "device": row.asDict() for row in reader.load().collect()}
        good, bad = rows[True], rows[False]
        assert (good["station"], good["PM2.5"]) == ("28", 3.5)
        assert good["time"].replace(tzinfo=UTC) == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
        assert (good["_group"], good["_device_sequence"], good["_headers"]) == ("group", 7, {"kind": "reading"})
        assert (bytes(good["_body"]), good["_sequence"], good["_error"]) == (bytes(body), 1, None)
        assert began <= good["_enqueued_at"].astimezone(UTC) <= datetime.now(UTC)
        assert bad["station"] is None
        assert "Expected `object`" in bad["_error"]
        assert waiting(queue) == 2, "a table deletes nothing"

    def test_a_schema_of_ones_own(self, world: World, queue: SyncQueue) -> None:
        put(queue, 1, 2)
        del world.options["schema"]
        reader = world.spark.read.format("tidegate").options(**world.options).schema("n long, _sequence long")
        assert sorted(map(tuple, reader.load().collect())) == [(1, 1), (2, 1)]

    def test_more_than_a_page(self, world: World, queue: SyncQueue) -> None:
        for start in range(0, 3000, 1000):
            queue.put([{"n": number, "pad": "x" * 2000} for number in range(start, start + 1000)])
        frame = world.spark.read.format("tidegate").options(**world.options).load()
        assert frame.selectExpr("count(*)", "count(distinct n)", "sum(n)").collect() == [(3000, 3000, 4498500)]

    def test_an_empty_queue(self, world: World) -> None:
        assert world.spark.read.format("tidegate").options(**world.options).load().collect() == []


class TestStream:
    def test_every_message_once_in_batches_of_at_most_so_many(self, world: World, queue: SyncQueue) -> None:
        put(queue, *range(1000))
        query = world.run(maxRowsPerTrigger="300")
        assert world.numbers() == list(range(1000))
        assert [len(numbers) for _number, numbers in world.batches] == [300, 300, 300, 100]
        assert waiting(queue) == 0, "what the last batch has read is deleted too"
        first, *_others, last = [each for each in query.recentProgress if each.numInputRows]
        assert (lag(first), lag(last)) == (700, 0)
        assert "0 behind" in progress_line([query])

    def test_goes_on_where_it_was(self, world: World, queue: SyncQueue) -> None:
        put(queue, *range(10))
        world.run()
        put(queue, *range(10, 15))
        world.run()
        assert [len(numbers) for _number, numbers in world.batches] == [10, 5]
        world.run()
        assert world.numbers() == list(range(15))

    def test_an_idle_query_deletes_what_it_has_done(self, world: World, queue: SyncQueue) -> None:
        query = world.start().start()
        try:
            put(queue, *range(50))
            eventually(lambda: world.numbers() == list(range(50)), "the rows")
            eventually(lambda: waiting(queue) == 0, "the deletion, with nothing new to read")
        finally:
            query.stop()

    def test_messages_stay_when_they_shall(self, world: World, queue: SyncQueue) -> None:
        put(queue, *range(5))
        world.run(delete="false")
        put(queue, *range(5, 8))
        world.run(delete="false")
        assert world.numbers() == list(range(8))
        assert waiting(queue) == 8

    def test_a_batch_that_failed_is_replayed_with_the_same_range(self, world: World, queue: SyncQueue) -> None:
        put(queue, *range(100))
        world.fail_at = 1
        error = world.failure(maxRowsPerTrigger="30")
        assert "the sink has failed" in str(error)
        assert waiting(queue) == 70, "nothing of the failed batch is deleted"
        put(queue, *range(100, 150))
        world.run(maxRowsPerTrigger="1000")
        replayed = [numbers for number, numbers in world.batches if number == 1]
        assert replayed[0] == replayed[1]
        assert len(replayed[0]) == 30
        assert world.numbers() == list(range(150))
        assert waiting(queue) == 0

    def test_follow_waits_and_tells(self, world: World, queue: SyncQueue) -> None:
        put(queue, *range(10))
        lines: list[str] = []
        follow([world.start().queryName("numbers").trigger(availableNow=True).start()], show=lines.append)
        assert world.numbers() == list(range(10))
        assert lines
        assert all(line.startswith("numbers: ") for line in lines)

    def test_follow_stops_the_query_when_it_is_interrupted_in_a_call_of_java(
        self, world: World, queue: SyncQueue, spark: SparkSession
    ) -> None:
        """An exception between a call and its answer would pass the answer to the next call."""
        put(queue, *range(10))
        query = world.start().queryName("numbers").start()

        def call_java(_line: str) -> None:
            interrupting = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
            interrupting.start()
            while interrupting.is_alive():
                assert query.isActive
            interrupting.join()

        with pytest.raises(KeyboardInterrupt):
            follow([query], show=call_java)
        assert not query.isActive
        assert spark.range(7).count() == 7


class TestFaults:
    def test_wrong_options_fail_at_once(self, world: World) -> None:
        for options, code in (({"maxRows": "5"}, "C419"), ({"mode": "x"}, "C419"), ({"schema": "_n long"}, "C420")):
            assert world.failure(**options).code == code

    def test_no_such_queue(self, world: World) -> None:
        error = world.failure(queue="nowhere")
        assert isinstance(error, NoSuchQueue)
        assert "tidegate queue create" in error.remedy

    def test_bodies_that_do_not_fit(self, world: World, queue: SyncQueue) -> None:
        queue.put([{"n": 1}, {"n": "two"}])
        assert world.failure(mode="failfast").code == "Q913"
        world.run()
        assert world.batches[-1][1].count(1) == 1

    def test_a_checkpoint_of_another_queue(self, world: World, queue: SyncQueue, connection: SyncConnection) -> None:
        put(queue, 1)
        world.run()
        connection.queue("another").create(physical_queues=2)
        assert world.failure(queue="another").code == "C421"

    def test_a_queue_that_was_made_anew(self, world: World, queue: SyncQueue) -> None:
        put(queue, *range(10))
        world.run()
        queue.drop()
        assert isinstance(world.failure(), NoSuchQueue)
        queue.create(physical_queues=2)
        put(queue, *range(20))
        error = world.failure()
        assert isinstance(error, ConfigError)
        assert "created again" in error.message

    def test_a_queue_dropped_while_it_is_read(self, world: World, queue: SyncQueue) -> None:
        query = world.start().start()
        put(queue, 1)
        eventually(lambda: world.numbers() == [1] or not query.isActive, "the first row")
        assert query.isActive, query.exception()
        queue.drop()
        eventually(lambda: not query.isActive, "the end of the query")
        assert to_error(query.exception()).code == "Q901"

    def test_messages_that_somebody_else_takes(self, world: World, queue: SyncQueue) -> None:
        put(queue, 0)
        world.run()
        put(queue, *range(1, 41))
        world.fail_at = 1
        world.failure()
        queue.delete(queue.take(max=3, wait_s=0))
        error = world.failure()
        assert isinstance(error, QueueError)
        assert error.code == "Q914"
        assert "failOnDataLoss" in error.remedy
        world.run(failOnDataLoss="false")
        assert len(world.numbers()) == 38

    def test_no_broker_at_the_start(self, spark: SparkSession, tmp_path: Path) -> None:
        world = World(spark, "tidegate://127.0.0.1:9", "q", tmp_path)
        error = world.failure(retryTimeoutS="1")
        assert isinstance(error, Unavailable)
        assert "127.0.0.1:9" in error.message

    @pytest.mark.crash
    def test_a_broker_that_comes_back_and_one_that_does_not(self, spark: SparkSession, tmp_path: Path) -> None:
        with BrokerProcess() as broker:
            with connect_sync(broker.native) as connection:
                queue = connection.queue("q")
                queue.create(physical_queues=2)
                put(queue, *range(100))
                world = World(spark, broker.native, "q", tmp_path)
                query = world.start(maxRowsPerTrigger="10").start()
                eventually(lambda: len(world.batches) > 2, "some batches")
                broker.kill()
                time.sleep(1.0)
                broker.start()
                put(queue, *range(100, 130))
                eventually(lambda: world.numbers() == list(range(130)), "all rows, in spite of the crash")
                query.stop()
            query = world.start(retryTimeoutS="2").start()
            broker.kill()
            eventually(lambda: not query.isActive, "the end of the query")
            error = to_error(query.exception())
            assert isinstance(error, Unavailable)
            assert "start the query again" in error.remedy or "tidegate serve" in error.remedy


class TestKilledDriver:
    @pytest.mark.crash
    @pytest.mark.cold_spark
    @pytest.mark.timeout(300)
    def test_nothing_is_lost_or_twice(self, broker: BrokerProcess, queue: SyncQueue, tmp_path: Path) -> None:
        """The program is killed with all its processes at random moments while it streams, and restarted."""
        print(f"seed {SEED}")
        moments = random.Random(SEED)
        put(queue, *range(3000))
        program = str(Path(__file__).with_name("queue_stream.py"))
        command = [sys.executable, program, broker.native, queue.name, str(tmp_path)]
        kills = 0
        while True:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            ender = threading.Timer(moments.uniform(2.0, 8.0), os.killpg, (process.pid, signal.SIGKILL))
            if kills < 3:
                ender.start()
            code = process.wait()
            ender.cancel()
            process.stdout.close()
            if code == 0:
                break
            assert code == -signal.SIGKILL
            kills += 1
            more = 3000 + 100 * kills
            put(queue, *range(more - 100, more))
        assert waiting(queue) == 0
        numbers = pq.read_table(tmp_path / "batches", columns=["n"]).column("n").to_pylist()
        assert sorted(numbers) == list(range(3000 + 100 * kills))
