"""The sink with a real broker: rows arrive unchanged and once, whatever is repeated and whichever process dies."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from broker_process import BrokerProcess, clean_environment
from pyspark import TaskContext, cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tidegate import ConfigError, Message, NotAllowed, Overloaded, SyncConnection, TidegateError, connect_sync
from tidegate.client.synchronous import SyncSubscription
from tidegate.pipeline.options import parse_sink_options
from tidegate.pipeline.progress import to_error
from tidegate.pipeline.rows import NotificationRows
from tidegate.pipeline.sink import Key, RowWriter, Written, _publish, write_rows
from tidegate.pipeline.source import TidegateSource

# Spark's workers cannot import this module by its name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

NOWHERE = "tidegate://127.0.0.1:1"
PATIENCE_S = 120
DRIVER_S = 240


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as process:
        yield process


@pytest.fixture(scope="module")
def connection(broker: BrokerProcess) -> Iterator[SyncConnection]:
    with connect_sync(broker.native) as connection:
        yield connection


@pytest.fixture
def queue(connection: SyncConnection) -> str:
    return make_queue(connection)


def make_queue(connection: SyncConnection, **settings: Any) -> str:
    name = f"q-{secrets.token_hex(6)}"
    connection.queue(name).create(durability="os", **settings)
    return name


def kept(connection: SyncConnection, queue: str) -> list[Message]:
    """Returns everything in a queue."""
    levels = connection.queue(queue).levels()
    return [
        message
        for number, level in enumerate(levels)
        for message in connection.queue(queue).read(number, level.first, level.next, max=level.messages)
    ]


def numbers(connection: SyncConnection, queue: str) -> Counter[int]:
    return Counter(message.body["n"] for message in kept(connection, queue))


def once(rows: int) -> dict[int, int]:
    return dict.fromkeys(range(rows), 1)


def append(rows: DataFrame, broker: BrokerProcess, *, source: str = "tidegate", **options: Any) -> None:
    rows.write.format(source).options(address=broker.native, **options).mode("append").save()


def take(subscription: SyncSubscription, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < count:
        found += [delivery.notification for delivery in subscription.take(PATIENCE_S)]
    return found


def failure_of(work: Callable[[], object]) -> TidegateError:
    with pytest.raises(PySparkException) as raised:
        work()
    return to_error(raised.value)


# Delivered rows.


def test_rows_are_messages(spark: SparkSession, broker: BrokerProcess, connection: SyncConnection, queue: str) -> None:
    rows = spark.sql(
        "select id as n, if(id = 3, null, 'north') as zone, timestamp '2026-07-01 12:00:00' as at,"
        " array(id, null) as list, if(id % 2 = 0, 'even', null) as _group, map('kind', 'test') as _headers"
        " from range(0, 10, 1, 2)"
    )
    append(rows, broker, queue=queue)
    found = {message.body["n"]: message for message in kept(connection, queue)}
    assert len(found) == 10
    assert found[3].body == {"n": 3, "at": "2026-07-01T12:00:00Z", "list": [3, None]}
    assert found[4].body == {"n": 4, "zone": "north", "at": "2026-07-01T12:00:00Z", "list": [4, None]}
    assert {(n % 2, message.group, message.headers["kind"]) for n, message in found.items()} == {
        (0, "even", "test"),
        (1, "", "test"),
    }
    assert connection.queue(queue).stats()["duplicates"] == 0


def test_rows_are_notifications(spark: SparkSession, broker: BrokerProcess, connection: SyncConnection) -> None:
    mark = secrets.token_hex(6)
    rows = spark.range(0, 3000, 1, 2).select(
        f.col("id").alias("n"),
        f.lit(mark).alias("mark"),
        f.when(f.col("id") < 5, 1.5).alias("low"),
        f.to_date(f.lit("2026-07-01")).alias("day"),
        f.encode(f.col("id").cast("string"), "utf-8").alias("_payload"),
    )
    with connection.subscribe(f"mark=='{mark}'") as subscription:
        append(rows, broker)
        found = sorted(take(subscription, 3000), key=lambda notification: notification["n"])
    assert found[4] == {"n": 4, "mark": mark, "low": 1.5, "day": "2026-07-01", "$payload": b"4"}
    assert found[5] == {"n": 5, "mark": mark, "day": "2026-07-01", "$payload": b"5"}
    assert [notification["n"] for notification in found] == list(range(3000))


# Repetitions.


class FailOnceSource(TidegateSource):
    """A source whose tasks fail after they have sent everything, and are then retried."""

    @classmethod
    def name(cls) -> str:
        return "tidegate-fail-once"

    def writer(self, schema: StructType, overwrite: bool) -> RowWriter:
        return FailOnceWriter(parse_sink_options(self.options), schema, overwrite)


class FailOnceWriter(RowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        assert context is not None
        batches = iterator if context.attemptNumber() == 0 else reverse(iterator)
        written = super().write(batches)
        if context.attemptNumber() == 0:
            raise RuntimeError("the first attempt")
        assert written.repeated == written.rows
        return written


def reverse(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a partition in another order, as after a shuffle."""
    for batch in reversed(list(batches)):
        yield batch.take(pa.array(range(len(batch) - 1, -1, -1)))


def test_a_task_that_is_tried_again_doubles_nothing(
    spark: SparkSession, broker: BrokerProcess, connection: SyncConnection, queue: str
) -> None:
    spark.dataSource.register(FailOnceSource)
    mark = secrets.token_hex(6)
    rows = spark.range(0, 5000, 1, 2).select(f.col("id").alias("n"), f.lit(mark).alias("mark"))
    append(rows.withColumn("_group", (f.col("n") % 7).cast("string")), broker, source="tidegate-fail-once", queue=queue)
    assert numbers(connection, queue) == once(5000)
    assert connection.queue(queue).stats()["duplicates"] == 5000
    with connection.subscribe(f"mark=='{mark}','end'") as subscription:
        append(rows, broker, source="tidegate-fail-once")
        connection.publish({"mark": "end", "n": -1})
        found = Counter(notification["n"] for notification in take(subscription, 5001))
    assert found == once(5000) | {-1: 1}


SCHEMA = StructType([StructField("n", LongType()), StructField("mark", StringType())])


def shuffled(rows: int, mark: str, seed: int) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a partition in random order, in batches of random size."""
    chance = random.Random(seed)
    order = chance.sample(range(rows), rows)
    table = pa.table({"n": order, "mark": [mark] * rows})
    return iter(table.to_batches(max_chunksize=chance.randint(1 + rows // 100, rows)))


def test_a_task_that_has_died_between_two_parts_doubles_nothing(
    broker: BrokerProcess, connection: SyncConnection
) -> None:
    queue = make_queue(connection, messages_max=12_000)
    options = parse_sink_options({"address": broker.native, "queue": queue, "retryTimeoutS": "5"})
    with pytest.raises(Overloaded, match="L608"):
        write_rows(options, SCHEMA, Key("dies", 3, 1), shuffled(30_000, "m", 1))
    before = len(kept(connection, queue))
    assert 0 < before < 30_000
    connection.queue(queue).create(messages_max=100_000)
    assert write_rows(options, SCHEMA, Key("dies", 3, 1), shuffled(30_000, "m", 2)) == Written(30_000, before)
    assert numbers(connection, queue) == once(30_000)
    assert write_rows(options, SCHEMA, Key("dies", 3, 1), shuffled(30_000, "m", 3)).repeated == 30_000
    assert write_rows(options, SCHEMA, Key("dies", 4, 1), shuffled(5, "m", 4)).repeated == 0
    assert write_rows(options, SCHEMA, Key("dies", 3, 2), shuffled(5, "m", 5)).repeated == 0


def test_a_task_that_has_died_while_it_published_doubles_nothing(
    broker: BrokerProcess, connection: SyncConnection
) -> None:
    mark, key = secrets.token_hex(6), Key(secrets.token_hex(6), 3, 1)
    rows = sorted(row for batch in shuffled(25_000, mark, 1) for row in NotificationRows(SCHEMA).encode(batch, 0))

    async def publish_some() -> int:
        async with connection.connection.numbered_publisher(key.producer) as publisher:
            return await publisher.publish(key.number(0), rows[:13_000])

    options = parse_sink_options({"address": broker.native})
    with connection.subscribe(f"mark=='{mark}'", policy="block") as subscription:
        assert connection.call(publish_some()) == 13_000
        taking = threading.Thread(target=lambda: found.update(each["n"] for each in take(subscription, 25_001)))
        found: Counter[int] = Counter()
        taking.start()
        assert write_rows(options, SCHEMA, key, shuffled(25_000, mark, 2)) == Written(25_000, 13_000)
        assert write_rows(options, SCHEMA, key, shuffled(25_000, mark, 3)).repeated == 25_000
        connection.publish({"mark": mark, "n": -1})
        taking.join()
    assert found == once(25_000) | {-1: 1}


@pytest.mark.parametrize("is_published", [False, True])
def test_of_tasks_that_run_twice_at_a_time_each_row_comes_once(
    broker: BrokerProcess, connection: SyncConnection, is_published: bool
) -> None:
    mark, key = secrets.token_hex(6), Key(secrets.token_hex(6), 0, 0)
    queue = make_queue(connection, **({"filter": f"mark=='{mark}'"} if is_published else {}))
    options = parse_sink_options({"address": broker.native} | ({} if is_published else {"queue": queue}))

    def write(seed: int) -> int:
        try:
            return write_rows(options, SCHEMA, key, shuffled(20_000, mark, seed)).rows
        except NotAllowed:  # its twin uses the publisher's name now
            return 0

    with ThreadPoolExecutor(3) as twins:
        assert max(twins.map(write, range(3))) == 20_000
    assert numbers(connection, queue) == once(20_000)


class Files:
    """Files of rows that are read as a stream, one file per micro-batch, and the checkpoint of the query."""

    def __init__(self, directory: Path) -> None:
        self.rows = directory / "rows"
        self.checkpoint = directory / "checkpoint"
        self.rows.mkdir()
        self.count = 0

    def add(self, rows: int) -> None:
        lines = [json.dumps({"n": n, "mark": self.rows.parent.name}) for n in range(self.count, self.count + rows)]
        path = self.rows / f"{self.count:08}.json"
        (path.with_name("." + path.name)).write_text("\n".join(lines))
        (path.with_name("." + path.name)).rename(path)
        self.count += rows

    def stream(self, spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema("n bigint, mark string").option("maxFilesPerTrigger", 1)
        return reader.json(str(self.rows)).repartition(2, "n")

    def write(self, rows: DataFrame, broker: BrokerProcess, **options: str) -> None:
        """Runs the query until all files are read."""
        writer = rows.writeStream.format("tidegate").options(address=broker.native, **options)
        query = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()
        assert query.awaitTermination(PATIENCE_S)

    def forget_last_commit(self) -> None:
        """Removes the last commit, as after a crash before Spark has recorded that the batch is done."""
        commits = self.checkpoint / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)


@pytest.mark.timeout(300)
def test_a_batch_that_is_repeated_doubles_nothing_in_a_queue(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(tmp_path)
    with BrokerProcess() as broker:
        with connect_sync(broker.native) as connection:
            queue = make_queue(connection, deduplication_s=0)
            files.add(300)
            files.add(20_000)
            files.write(files.stream(spark), broker, queue=queue)
            assert numbers(connection, queue) == once(20_300)
        broker.kill()
        broker.start()
        files.forget_last_commit()
        files.add(100)
        files.write(files.stream(spark).mapInArrow(reverse, "n bigint, mark string"), broker, queue=queue)
        with connect_sync(broker.native) as connection:
            assert numbers(connection, queue) == once(20_400)
            assert connection.queue(queue).stats()["duplicates"] == 20_000, "it was repeated indeed"


@pytest.mark.timeout(300)
def test_a_batch_that_is_repeated_doubles_nothing_for_subscribers(
    spark: SparkSession, broker: BrokerProcess, connection: SyncConnection, tmp_path: Path
) -> None:
    files = Files(tmp_path)
    name = f"s-{secrets.token_hex(6)}"
    with (
        connection.subscribe(f"mark=='{tmp_path.name}'") as subscription,
        connection.subscribe(f"mark=='{tmp_path.name}'", name=name),
    ):
        files.add(300)
        files.add(2000)
        files.write(files.stream(spark), broker)
        assert Counter(each["n"] for each in take(subscription, 2300)) == once(2300)
        files.forget_last_commit()
        files.add(100)
        files.write(files.stream(spark).mapInArrow(reverse, "n bigint, mark string"), broker)
        assert sorted(each["n"] for each in take(subscription, 100)) == list(range(2300, 2400))
    assert numbers(connection, f"subscription.{name}") == once(2400)
    connection.unsubscribe(name)


DRIVER = """
import sys, time
from pathlib import Path
from tidegate.pipeline.session import spark_session
from tidegate.pipeline.options import parse_sink_options
from tidegate.pipeline.sink import RowStreamWriter
from tidegate.pipeline.source import TidegateSource

address, queue, rows, checkpoint, stop_in, told = sys.argv[1:]


class Writer(RowStreamWriter):
    def write(self, iterator):
        from pyspark import TaskContext
        written = super().write(iterator)
        if stop_in == "write" and TaskContext.get().partitionId() == 0 and written.rows:
            stop()
        return written

    def commit(self, messages, batchId):
        if stop_in == "commit" and batchId == 1:
            stop()


class Source(TidegateSource):
    def streamWriter(self, schema, overwrite):
        return Writer(parse_sink_options(self.options), schema, overwrite)


def stop():
    Path(told).touch()
    time.sleep(600)


spark = spark_session("local[1,4]", spark__sql__shuffle__partitions="3", spark__driver__memory="1g")
spark.dataSource.register(Source)
stream = spark.readStream.schema("n bigint, mark string").option("maxFilesPerTrigger", 1).json(rows).repartition(3, "n")
query = (
    stream.writeStream.format("tidegate")
    .options(address=address, queue=queue, checkpointLocation=checkpoint)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
"""


@pytest.mark.crash
@pytest.mark.cold_spark
@pytest.mark.timeout(3 * DRIVER_S)
def test_a_driver_that_is_killed_while_it_writes_and_while_it_commits_doubles_nothing(
    broker: BrokerProcess, connection: SyncConnection, queue: str, tmp_path: Path
) -> None:
    files = Files(tmp_path)
    for _ in range(3):
        files.add(1000)
    for stop_in in ("write", "commit", "never"):
        told = tmp_path / f"told-{stop_in}"
        arguments = (broker.native, queue, str(files.rows), str(files.checkpoint), stop_in, str(told))
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments], env=clean_environment(), start_new_session=True
        )
        try:
            deadline_s = time.monotonic() + DRIVER_S
            while driver.poll() is None and not told.exists():
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        finally:
            # The driver and its Java process together.
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
        assert driver.wait() == (0 if stop_in == "never" else -signal.SIGKILL)
        if stop_in == "write":
            assert 0 < len(kept(connection, queue)) < 1000, "some of the first batch"
    assert numbers(connection, queue) == once(3000)
    assert connection.queue(queue).stats()["duplicates"] >= 1000


# Errors.


def test_a_queue_that_is_full_is_waited_for(
    spark: SparkSession, broker: BrokerProcess, connection: SyncConnection
) -> None:
    queue = make_queue(connection, messages_max=100, physical_queues=1)
    rows = spark.range(0, 60, 1, 1).select(f.col("id").alias("n"))
    append(rows, broker, queue=queue)
    error = failure_of(lambda: append(rows, broker, queue=queue, retryTimeoutS=1))
    assert (error.code, len(kept(connection, queue))) == ("L608", 60)

    def empty() -> None:
        while connection.queue(queue).stats()["refused"] <= refused:
            time.sleep(0.05)
        connection.queue(queue).delete_below(0, 61)

    refused = connection.queue(queue).stats()["refused"]
    emptying = threading.Thread(target=empty)
    emptying.start()
    append(rows.withColumn("n", f.col("n") + 60), broker, queue=queue)
    emptying.join()
    assert sorted(numbers(connection, queue)) == list(range(60, 120))


def test_what_cannot_be_sent_fails_at_the_start(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> None:
    rows = spark.range(0, 10, 1, 1).select(f.col("id").alias("n"), f.array("id").alias("list"))
    assert failure_of(lambda: append(rows, broker)).code == "C422"
    assert failure_of(lambda: append(rows, broker, colour="blue")).code == "C419"
    overwriting = rows.write.format("tidegate").options(address=broker.native, queue="q").mode("overwrite")
    assert failure_of(overwriting.save).code == "C423"

    files = Files(tmp_path)
    files.add(1)
    stream = files.stream(spark).withColumn("list", f.array("n"))
    error = failure_of(lambda: files.write(stream, broker))
    assert (error.code, error.remedy.startswith("flatten it")) == ("C422", True)
    assert not (files.checkpoint / "commits" / "0").exists()


def test_a_bad_value_is_named_and_nothing_is_sent(
    spark: SparkSession, broker: BrokerProcess, connection: SyncConnection
) -> None:
    mark = secrets.token_hex(6)
    rows = spark.range(0, 10, 1, 1).select(
        f.lit(mark).alias("mark"), f.when(f.col("id") == 7, float("nan")).otherwise(1.0).alias("NO2")
    )
    with connection.subscribe(f"mark=='{mark}'") as subscription:
        error = failure_of(lambda: append(rows, broker))
        connection.publish({"mark": mark, "n": "alone"})
        assert take(subscription, 1) == [{"mark": mark, "n": "alone"}]
    assert error.code == "N208"
    assert error.message == "row 7 of its partition: NO2=nan is not a finite number"


def test_more_rows_than_have_numbers_are_not_published() -> None:
    with pytest.raises(ConfigError, match=r"C424.*partition 3 has 1048577 rows.*repartition"):
        _publish(parse_sink_options({"address": NOWHERE}), Key("q", 0, 3), [b"\x80"] * ((1 << 20) + 1))


@pytest.mark.parametrize("options", [{"queue": "q"}, {}])
def test_a_broker_that_is_away_is_told_with_the_cure(spark: SparkSession, options: dict[str, str]) -> None:
    rows = spark.range(1).select(f.col("id").alias("n"))
    writer = rows.write.format("tidegate").options(address=NOWHERE, retryTimeoutS="0.5", **options).mode("append")
    error = failure_of(writer.save)
    assert (error.code, error.remedy.startswith("check that the broker is running")) == ("U710", True)
