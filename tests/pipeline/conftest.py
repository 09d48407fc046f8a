"""Spark for the tests of the pipeline: one session for all of them, since starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tidegate.pipeline.session import spark_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_session(
        "local[2,4]",
        name="tests",
        spark__sql__shuffle__partitions="2",
        spark__driver__memory="1g",
    )
    yield session
    session.stop()
