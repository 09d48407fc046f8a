"""A job publishes its progress as notifications, unless this is disabled."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from broker_process import BrokerProcess
from pyspark.sql import SparkSession

from tidegate import connect_sync
from tidegate.demo.main_job import START, STEP
from tidegate.devices import STATIONS, readings
from tidegate.pipeline.air_quality import Settings
from tidegate.pipeline.air_quality_job import Job, run

WAIT_S = 60


@pytest.mark.timeout(300)
def test_each_batch_is_told_with_its_rows(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> None:
    sent = list(islice(readings(1, START, STEP), 2 * len(STATIONS)))
    with connect_sync(broker.native) as connection, connection.subscribe("pipeline") as told:
        for queue, publishes in (("quiet", False), ("told", True)):
            connection.queue(queue).create(filter=f"for=={queue}")
            connection.publish([reading | {"for": queue} for reading in sent])
            job = Job(
                queue=queue,
                broker={"address": broker.native},
                out=tmp_path / queue,
                settings=Settings(ahead_s=None),
                batch_messages=1000,
                every="1 second",
                publishes=publishes,
            )
            run(spark, job, once=True)
        news = [delivery.notification for delivery in told.take(WAIT_S)]
    assert {each["pipeline"] for each in news} == {"air-quality"}
    of_readings = [each for each in news if each["query"] == "readings"]
    assert sum(each["rows"] for each in of_readings if each["batch"] == 0) == len(sent)
    assert of_readings[0].keys() == {"pipeline", "query", "batch", "rows", "rows_s", "behind", "batch_ms"}
    assert of_readings[0]["batch_ms"] > 0
