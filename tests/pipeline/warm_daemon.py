"""Spark's daemon of Python workers, for the tests: it imports the workers' modules before it forks them.

Spark starts `python -m warm_daemon WORKER_MODULE` for each kind of worker: tasks, planning, reading, writing. Spark
requests a fork whenever a query begins, and a new worker would spend a second on importing Arrow, pandas and our
source.

What may go wrong: Spark's own daemon imports nothing before a fork, because a library could start threads. The modules
below start none.
"""

from __future__ import annotations

import gc
import importlib
import sys

from pyspark.daemon import manager

TASKS = "pyspark.worker"
LOADED = ("pandas", "pyarrow.parquet", "pyspark.sql.functions", "pyspark.sql.streaming", "tidegate.pipeline.source")
SIMULATIONS = ("tidegate_lab.queues.message_queue", "tidegate_lab.control.request_pool")
LOADED_BY_TASKS = ("tidegate.pipeline.matching", *SIMULATIONS)

if __name__ == "__main__":
    for name in (sys.argv[1], *LOADED, *(LOADED_BY_TASKS if sys.argv[1] == TASKS else ())):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    manager()
