"""What tests of all kinds use: how hard properties are looked at, a real broker, and Spark."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from broker_process import BrokerProcess
from hypothesis import settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# No deadline: machines are shared. TIDEGATE_TEST_EXAMPLES=10000 looks harder; a failure prints how to repeat it.
settings.register_profile(
    "tidegate", deadline=None, print_blob=True, max_examples=int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "100"))
)
settings.load_profile("tidegate")


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    """A broker with the default configuration, shared by the tests of a module."""
    with BrokerProcess() as process:
        yield process


@pytest.fixture(scope="module", autouse=True)
def _links_end_with_their_module() -> Iterator[None]:
    """A link whose broker is gone tries again for ever, in a thread, at random times, which Hypothesis takes amiss."""
    yield
    if "tidegate.pipeline.broker_link" in sys.modules:
        sys.modules["tidegate.pipeline.broker_link"].close_links()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests, since starting one takes seconds."""
    from tidegate.pipeline.session import end_session, spark_session

    session = spark_session(
        "local[2,4]",
        name="tests",
        spark__sql__shuffle__partitions="2",
        spark__driver__memory="1g",
        # For short jobs: Java's quick compiler, and a collector that starts no threads.
        spark__driver__extraJavaOptions="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    )
    yield session
    end_session(session)
