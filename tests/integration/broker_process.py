"""A real broker, as its users start it: `tidegate serve` in another process, on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tidegate_process import TidegateProcess

STARTUP_S = 90
SHUTDOWN_S = 60


class BrokerProcess:
    """A context manager that runs a broker, and ends it by its process id in any case.

    `start` after `kill` uses the same ports and the same data directory. The broker serves a knowledge base if a test
    requests one, and writes its log to a file if one is given."""

    def __init__(
        self,
        *flags: str,
        environment: dict[str, str] | None = None,
        has_knowledge: bool = False,
        log: Path | None = None,
    ) -> None:
        self._log = log
        self._flags = flags
        self._environment = environment or {}
        self._process: TidegateProcess | None = None
        self._data = tempfile.TemporaryDirectory(prefix="tidegate-test-")
        self._native_port = self._http_port = 0
        self._ssap_port = 0 if has_knowledge else -1
        self.native = ""
        self.http = ""
        # The token that the broker generates, if it does.
        self.token = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._close()
        self._remove_data()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def data(self) -> str:
        return self._data.name

    @property
    def native_port(self) -> int:
        return self._native_port

    @property
    def http_port(self) -> int:
        return self._http_port

    @property
    def port(self) -> int:
        """The port of SSAP."""
        return self._ssap_port

    def start(self) -> None:
        """Starts the broker, and returns when it is ready. A previous one must have ended."""
        self._close()
        ports = (
            "--native-port",
            str(self._native_port),
            "--http-port",
            str(self._http_port),
            "--ssap-port",
            str(self._ssap_port),
            "--data",
            self._data.name,
        )
        with self._log.open("ab") if self._log is not None else contextlib.nullcontext() as log:
            self._process = TidegateProcess(
                ["serve", *ports, "--log-level", "warning", *self._flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=clean_environment() | self._environment,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the broker did not start: exit code {self._process.wait(STARTUP_S)}"
        said = json.loads(line)
        self.token, ready = said.get("token", ""), said["ready"]
        self.native, self.http = ready["native"], ready["http"]
        self._native_port, self._http_port = urlsplit(self.native).port or 0, urlsplit(self.http).port or 0
        self._ssap_port = urlsplit(ready["ssap"]).port or -1

    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> int:
        """Ends the broker with SIGTERM, as an operator does, and returns the exit code."""
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kills the broker, as a crash does."""
        self.send(signal.SIGKILL)
        self.wait()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        assert self._process is not None
        code = self._process.wait(SHUTDOWN_S)
        self._close()
        return code

    def _remove_data(self) -> None:
        """Removes the data directory. The workers of a killed broker end a moment later, and may still write."""
        deadline_s = time.monotonic() + SHUTDOWN_S
        while True:
            try:
                self._data.cleanup()
                return
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def _close(self) -> None:
        if self._process is not None:
            self._process.wait(SHUTDOWN_S)
            assert self._process.stdout is not None
            self._process.stdout.close()


def clean_environment() -> dict[str, str]:
    """Returns this environment without Tidegate's settings, which would leak into the processes under test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
