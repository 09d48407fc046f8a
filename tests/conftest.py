"""Common parts of all tests: the two tiers, the number of examples of property tests, a real broker, and Spark."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from broker_process import BrokerProcess
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tidegate.pipeline.java import OPTIONS_FOR_FEW_ROWS, SUBMIT_OPTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# No deadline, because machines are shared. Each run tries the same examples, so that a change fails only for its own
# faults. TIDEGATE_TEST_EXAMPLES=10000 tries more, and other ones each time. A failure prints how to repeat it.
EXAMPLES = os.environ.get("TIDEGATE_TEST_EXAMPLES")
settings.register_profile(
    "tidegate", deadline=None, print_blob=True, max_examples=int(EXAMPLES or 50), derandomize=EXAMPLES is None
)
settings.load_profile("tidegate")

# Applies to every Spark driver of the tests, because they all process few rows.
os.environ.setdefault(SUBMIT_OPTIONS, OPTIONS_FOR_FEW_ROWS)

# The reasons why a test is deep. A test with one of these markers is marked `deep` too: `make test` leaves it out, and
# `make test-deep` runs it.
DEEP = frozenset({"crash", "cluster", "cold_spark", "evaluation", "nojit", "seeds"})
SPARK = "tests/pipeline"
# These tests start their own drivers, and share no session.
COLD = tuple(f"{SPARK}/test_{name}.py" for name in ("air_quality_crash", "cluster", "demo"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks deep tests, and puts tests that use Spark first, because they keep their workers busy the longest."""
    for item in items:
        if any(marker.name in DEEP for marker in item.iter_markers()):
            item.add_marker("deep")
    items.sort(key=lambda item: (not item.nodeid.startswith(COLD), not item.nodeid.startswith(SPARK)))


def pytest_collection_finish() -> None:
    """Exempts the thousands of collected tests, which stay in memory, from garbage collection."""
    gc.collect()
    gc.freeze()


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Keeps the tests of a file in one worker, because they share brokers, and also all tests that share a Spark
    session. A second session would take as long to start as many tests take to run."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return SPARK if file.startswith(SPARK) and file not in COLD else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    """Runs a broker with the default configuration, which the tests of a module share."""
    with BrokerProcess() as process:
        yield process


@pytest.fixture(scope="module", autouse=True)
def _links_end_with_their_module() -> Iterator[None]:
    """Ends the links of a module. A link without its broker retries forever in a thread, and draws random numbers at
    any time, which Hypothesis reports as an error."""
    yield
    if "tidegate.pipeline.broker_link" in sys.modules:
        sys.modules["tidegate.pipeline.broker_link"].close_links()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Runs one session for all tests of a worker, because starting one takes seconds."""
    from tidegate.pipeline.session import end_session, spark_session

    with pytest.MonkeyPatch.context() as patch:
        # Spark passes its own PYTHONPATH to its workers, which find `warm_daemon` there.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "pipeline"), prepend=os.pathsep)
        session = spark_session(
            "local[2,4]",
            name="tests",
            spark__python__daemon__module="warm_daemon",
            spark__sql__shuffle__partitions="2",
            spark__driver__memory="1g",
        )
    yield session
    end_session(session)
