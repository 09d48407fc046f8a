"""Runs the benchmarks and prints their tables: `python benchmarks/run.py [--quick] [--only NAME]`."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

# In a script, Python finds the modules beside this file, but not the package that contains them.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.job import FULL, QUICK, Effort, show_progress
from benchmarks.machine import describe_machine
from benchmarks.processes import Failed

# Modules of this package with a function `run`. They are imported only when they run, because only some need the
# clients of peers.
BENCHMARKS: Final = (
    "whole_path",
    "latency",
    "http_ingest",
    "memory",
    "queues",
    "knowledge",
    "knowledge_clients",
    "matcher",
    "spark_source",
    "spark_matching",
    "spark_sweep",
    "request_pool",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of each, a few minutes in all")
    parser.add_argument("--only", choices=BENCHMARKS, help="run one benchmark only")
    options = parser.parse_args()
    # Exits through an exception, which ends the servers and workers too. The default action would leave them running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    loop = "uvloop" if _has_uvloop() else "asyncio"
    print(f"{describe_machine()}, Tidegate's broker on {loop}\n", flush=True)
    failures = 0
    for name in BENCHMARKS:
        if options.only in (None, name):
            show_progress(f"{name} …")
            try:
                run: Callable[[Effort], str] = importlib.import_module(f"benchmarks.{name}").run
                print(run(QUICK if options.quick else FULL), flush=True)
            except (Failed, FileNotFoundError) as error:
                print(f"{name} could not be measured: {error}", file=sys.stderr)
                failures += 1
    return 1 if failures else 0


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
