"""A real broker, as its users start it: `tidegate serve` in a process of its own, on free ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

STARTUP_S = 90
SHUTDOWN_S = 30


class BrokerProcess:
    """Use it in `with`; it is ended, by its process id, whatever happens. `start` after `kill` uses the same ports and
    the same data directory. It serves a knowledge base where a test asks for one."""

    def __init__(self, *flags: str, environment: dict[str, str] | None = None, has_knowledge: bool = False) -> None:
        self._flags = flags
        self._environment = environment or {}
        self._process: subprocess.Popen[str] | None = None
        self._data = tempfile.TemporaryDirectory(prefix="tidegate-test-")
        self._native_port = self._http_port = 0
        self._ssap_port = 0 if has_knowledge else -1
        self.native = ""
        self.http = ""
        # Made up by the broker, where it does.
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
        self._data.cleanup()

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
        """Of SSAP."""
        return self._ssap_port

    def start(self) -> None:
        """Returns when the broker is ready."""
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
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tidegate", "serve", *ports, "--log-level", "warning", *self._flags],
            stdout=subprocess.PIPE,
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
        """Asks it to end, as an operator does; the exit code."""
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Ends it as a crash does."""
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

    def _close(self) -> None:
        if self._process is not None:
            self._process.wait(SHUTDOWN_S)
            assert self._process.stdout is not None
            self._process.stdout.close()


def clean_environment() -> dict[str, str]:
    """This environment without settings of Tidegate, which would leak into the processes under test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
