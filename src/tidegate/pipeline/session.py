"""The Spark session: the only place that builds one, so that every job, test and benchmark runs on the same settings.

    spark = spark_session()                                   all cores of this machine
    spark = spark_session("spark://head:7077")                your own cluster

It sets the Java of `pipeline.java`, quiet logging (log4j2.properties) and times in UTC. On one machine (also with a
cluster on its loopback address) Spark uses the loopback address, retries failed tasks, and uses a checkpoint file
manager that does not fork a shell for every file.
Override any setting by keyword, with dots written as two underscores: `spark__sql__shuffle__partitions=8`.
"""

from __future__ import annotations

import os
import sys
from importlib import resources
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from tidegate.config import is_loopback
from tidegate.pipeline.java import java_home, needed_options
from tidegate.pipeline.source import TidegateSource

# A job fails at the fourth failure of a task, as on a cluster; with plain local[*] it fails at the first.
DEFAULT_MASTER: Final = "local[*,4]"
LOOPBACK: Final = "127.0.0.1"
END_S: Final = 30.0
_FILE_MANAGER: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def spark_session(
    master: str | None = None, *, name: str = "tidegate", ui: bool = False, **configuration: str
) -> SparkSession:
    """Returns the session of this process, with the data source `tidegate`. `master` is anything that Spark accepts;
    `ui` serves Spark's own pages, at `spark.sparkContext.uiWebUrl`."""
    chosen = master or DEFAULT_MASTER
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = settings_for(chosen, is_shown=ui)
    for key, value in configuration.items():
        setting = key.replace("__", ".")
        # Java options are added to ours: without ours Spark would log too much, or corrupt data on some Javas.
        settings[setting] = f"{settings[setting]} {value}" if setting.endswith("extraJavaOptions") else value
    builder = SparkSession.builder.master(chosen).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(TidegateSource)
    return spark


def end_session(spark: SparkSession) -> None:
    """Stops Spark and waits until its Java process has ended. `stop` alone leaves Java running until this process
    ends."""
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(END_S)
    SparkContext._gateway = SparkContext._jvm = None


def is_on_one_machine(master: str) -> bool:
    """Returns whether driver and executors run on this machine: other machines cannot reach a master on loopback."""
    if master.startswith("spark://"):
        hosts = [address.rpartition(":")[0].strip("[]") for address in master.removeprefix("spark://").split(",")]
        return all(map(is_loopback, hosts))
    return master == "local" or master.startswith("local[")


def settings_for(master: str, *, is_shown: bool) -> dict[str, str]:
    """Returns the settings for Spark, before those of the caller."""
    log = resources.files("tidegate.pipeline") / "log4j2.properties"
    java_options = needed_options(java_home())
    settings = {
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log} {java_options}".strip(),
        "spark.executor.extraJavaOptions": java_options,
        "spark.ui.enabled": str(is_shown).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        # A busy machine may take longer than the default of 15 s to start a Python worker, which would fail the stream.
        "spark.python.authenticate.socketTimeout": "60s",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Parquet's standard type: other programs read it as UTC and can skip row groups by it. Spark's default is not.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
    }
    if is_on_one_machine(master):
        settings |= {
            "spark.driver.host": LOOPBACK,
            "spark.driver.bindAddress": LOOPBACK,
            "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
            "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
        }
    return settings
