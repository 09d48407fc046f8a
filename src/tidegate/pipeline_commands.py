"""`tidegate pipeline …`: the jobs on Spark. One function a job; the jobs themselves are in `pipeline/`.

Spark is imported when a job starts: the other commands do without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def add_pipeline(commands: Any) -> None:
    text = "Run a job on Spark: on this machine, or on a cluster with --master."
    parser = commands.add_parser(
        "pipeline",
        help=text,
        description=text,
        epilog="docs/pipeline.md explains the jobs, and the data source for jobs of your own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="JOB")
    jobs: tuple[Callable[[Any], None], ...] = ()
    for add in jobs:
        add(actions)


def add_spark_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--master", help="where Spark runs: local[4], spark://host:7077, … (default: all cores of this machine)"
    )
    parser.add_argument("--ui", action="store_true", help="serve Spark's own pages while the job runs")


@contextmanager
def session(options: argparse.Namespace, name: str) -> Iterator[SparkSession]:
    """Spark for one job, ended with it."""
    try:
        from tidegate.pipeline.session import end_session, spark_session
    except ImportError as error:
        raise ConfigError(
            "C412", f"the pipeline needs {error.name}, which is not installed", "pip install 'tidegate[pipeline]'"
        ) from error
    spark = spark_session(options.master, name=name, ui=options.ui)
    try:
        yield spark
    finally:
        end_session(spark)
