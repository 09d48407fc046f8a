"""The Spark session: the only place that builds one, so that every job, test and benchmark runs on the same settings.

    spark = spark_session()                                   all cores of this machine
    spark = spark_session("spark://head:7077")                a cluster of one's own

What is set here and why: the Java of `pipeline.java`; silence (log4j2.properties); times in UTC; on one machine (also
with a cluster on its loopback address) that address, tasks that are tried again, and a checkpoint file manager that
does not fork a shell for every file.
Everything can be set otherwise by keyword, dots written as two underscores: `spark__sql__shuffle__partitions=8`.
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

# A task that has failed is tried again up to four times, as on a cluster; plain local[*] gives up at once.
DEFAULT_MASTER: Final = "local[*,4]"
LOOPBACK: Final = "127.0.0.1"
END_S: Final = 30.0
_FILE_MANAGER: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def spark_session(
    master: str | None = None, *, name: str = "tidegate", ui: bool = False, **configuration: str
) -> SparkSession:
    """The session of this process, with the data source `tidegate`. `master` is anything that Spark takes; `ui` serves
    Spark's own pages, at `spark.sparkContext.uiWebUrl`."""
    chosen = master or DEFAULT_MASTER
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = settings_for(chosen, is_shown=ui)
    for key, value in configuration.items():
        setting = key.replace("__", ".")
        # Java's options are added to ours: without them Spark would be loud, or on a Java that spoils data.
        settings[setting] = f"{settings[setting]} {value}" if setting.endswith("extraJavaOptions") else value
    builder = SparkSession.builder.master(chosen).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(TidegateSource)
    return spark


def end_session(spark: SparkSession) -> None:
    """Stops Spark and waits for the end of its Java process, which `stop` alone leaves to the end of this one."""
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(END_S)
    SparkContext._gateway = SparkContext._jvm = None


def is_on_one_machine(master: str) -> bool:
    """Whether driver and executors run on this machine: nobody else can reach a master on loopback."""
    if master.startswith("spark://"):
        hosts = [address.rpartition(":")[0].strip("[]") for address in master.removeprefix("spark://").split(",")]
        return all(map(is_loopback, hosts))
    return master == "local" or master.startswith("local[")


def settings_for(master: str, *, is_shown: bool) -> dict[str, str]:
    """What Spark is told, before the caller's own settings."""
    log = resources.files("tidegate.pipeline") / "log4j2.properties"
    java_options = needed_options(java_home())
    settings = {
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log} {java_options}".strip(),
        "spark.executor.extraJavaOptions": java_options,
        "spark.ui.enabled": str(is_shown).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Parquet's own, which other programs read as UTC and skip by; Spark's default is a form of its own.
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
