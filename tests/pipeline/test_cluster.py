"""On a real cluster a machine may fail during a stream: every message comes through exactly once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from broker_process import BrokerProcess
from cluster import Cluster

from tidegate.client import SyncConnection, connect_sync

MESSAGES = 3000
ROWS_PER_BATCH = 200
WAIT_S = 200

DRIVER = """
import json, sys
from tidegate.pipeline.session import end_session, spark_session

master, address, rows, out, checkpoint = sys.argv[1:]
spark = spark_session(master, name="stream", spark__driver__memory="1g")
numbers = (
    spark.readStream.format("tidegate")
    .options(address=address, queue="numbers", schema="number bigint", maxRowsPerTrigger=rows)
    .load()
    .selectExpr("number", "number * number AS square")
)
query = numbers.writeStream.format("parquet").option("checkpointLocation", checkpoint).start(out)
# Until we are told that it is enough.
sys.stdin.read()
failure = query.exception()
query.stop()
if failure is not None:
    raise failure
print(json.dumps([list(row) for row in spark.read.parquet(out).collect()]))
end_session(spark)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as started:
        yield started


@pytest.mark.cluster
@pytest.mark.cold_spark
@pytest.mark.timeout(300)
def test_a_machine_that_goes_in_the_middle_of_a_stream_loses_and_doubles_nothing(
    cluster: Cluster, broker: BrokerProcess, tmp_path: Path
) -> None:
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    with connect_sync(broker.native) as connection:
        queue = connection.queue("numbers")
        queue.create(physical_queues=4)
        queue.put([{"number": number} for number in range(MESSAGES)])
        driver = subprocess.Popen(
            [
                sys.executable,
                "-c",
                DRIVER,
                cluster.master,
                broker.native,
                str(ROWS_PER_BATCH),
                str(out),
                str(checkpoint),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=cluster.environment,
        )
        try:
            wait_until(lambda: batches_done(checkpoint) >= 4, driver)
            assert cluster.state()["coresused"] == 2, "both workers must be at work"
            cluster.kill_worker()
            done = batches_done(checkpoint)
            wait_until(lambda: waiting(connection) == 0, driver)
            printed, _ = driver.communicate(timeout=WAIT_S)
        finally:
            driver.kill()
            driver.communicate()
    assert driver.returncode == 0
    assert done < MESSAGES / ROWS_PER_BATCH, "the worker was killed too late to prove anything"
    assert sorted(json.loads(printed)) == [[number, number**2] for number in range(MESSAGES)]


def batches_done(checkpoint: Path) -> int:
    commits = checkpoint / "commits"
    return sum(path.name.isdecimal() for path in commits.iterdir()) if commits.exists() else 0


def waiting(connection: SyncConnection) -> int:
    return sum(level.messages for level in connection.queue("numbers").levels())


def wait_until(holds: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert driver.poll() is None, "the driver has ended"
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
