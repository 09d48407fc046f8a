"""A standalone Spark cluster on this machine, from the pip package: a master and workers of one core, as processes.

They are started as docs/operating.md recommends. Every worker has its own process group, which includes its executors,
and is ended by its process id.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

from ports import reserve_port

import tidegate
from tidegate.pipeline.java import java_home

STARTUP_S = 120
LOOPBACK = "127.0.0.1"


class Cluster:
    """A context manager that runs a cluster. It starts when the master knows both workers, and always ends them."""

    def __init__(self, directory: Path, workers: int = 2) -> None:
        self._directory = directory
        self._port, self._page_port = reserve_port(), reserve_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._workers = workers
        self.environment = os.environ | {
            "JAVA_HOME": str(java_home()),
            "SPARK_LOCAL_IP": LOOPBACK,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(Path(tidegate.__file__).parents[1]),
        }

    @property
    def master(self) -> str:
        return f"spark://{LOOPBACK}:{self._port}"

    def __enter__(self) -> Self:
        try:
            ports = ("--port", str(self._port), "--webui-port", str(self._page_port))
            self._start("master.Master", "--host", LOOPBACK, *ports)
            for number in range(self._workers):
                size = ("--cores", "1", "--memory", "1g", "--webui-port", "0")
                place = ("--work-dir", str(self._directory / f"worker-{number}"))
                self._start("worker.Worker", "--host", LOOPBACK, *size, *place, self.master)
            self._wait_for_workers()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def kill_worker(self) -> None:
        """Kills a worker and its executors together, as if a machine failed."""
        kill_group(self._processes.pop())

    def state(self) -> dict[str, Any]:
        """Returns the state as the master reports it."""
        with urlopen(f"http://{LOOPBACK}:{self._page_port}/json/", timeout=10) as page:
            found: dict[str, Any] = json.load(page)
        return found

    def _start(self, daemon: str, *arguments: str) -> None:
        log = (self._directory / f"{len(self._processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [str(Path(sys.executable).parent / "spark-class"), f"org.apache.spark.deploy.{daemon}", *arguments],
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        self._processes.append(process)

    def _wait_for_workers(self) -> None:
        deadline_s = time.monotonic() + STARTUP_S
        while self._workers_alive() < self._workers:
            assert all(process.poll() is None for process in self._processes), self._logs()
            assert time.monotonic() < deadline_s, self._logs()
            time.sleep(0.1)

    def _workers_alive(self) -> int:
        with suppress(URLError, OSError):
            return sum(worker["state"] == "ALIVE" for worker in self.state()["workers"])
        return 0

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._directory.glob("*.log")))

    def _end(self) -> None:
        """Ends the workers first, because they would search for a master that has ended."""
        while self._processes:
            kill_group(self._processes.pop())


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
