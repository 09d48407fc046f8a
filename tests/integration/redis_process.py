"""A real Redis for one test: `redis-server` on a free port of this machine, in a temporary directory."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any, Self

from ports import reserve_port
from redis import Redis
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as NotThere

STARTUP_S = 30
SHUTDOWN_S = 30


class RedisProcess:
    """A context manager that runs a Redis, and ends it by its process id in any case. `fsync` is the policy of the
    append-only file, or None for no such file. `start` after `kill` uses the same port and directory."""

    def __init__(self, *, fsync: str | None = "everysec", environment: dict[str, str] | None = None) -> None:
        self._fsync = fsync
        self._environment = os.environ | (environment or {})
        self._directory = tempfile.TemporaryDirectory(prefix="tidegate-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = reserve_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._directory.cleanup()

    def start(self) -> None:
        """Starts Redis, and returns when it answers."""
        aof = ["--appendonly", "no"] if self._fsync is None else ["--appendonly", "yes", "--appendfsync", self._fsync]
        place = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", self._directory.name]
        self._process = subprocess.Popen(
            ["redis-server", *place, "--save", "", *aof],
            stdout=subprocess.DEVNULL,
            env=self._environment,
        )
        deadline_s = time.monotonic() + STARTUP_S
        while not self._answers():
            assert self._process.poll() is None, "redis-server did not start"
            assert time.monotonic() < deadline_s, "redis-server does not answer"
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kills Redis, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(SHUTDOWN_S)

    def client(self) -> Any:
        """Returns a client for inspecting the data. The caller must close it. It is not typed, because the results of
        commands depend on the kind of client."""
        return Redis(port=self.port, protocol=2)

    def _answers(self) -> bool:
        client = self.client()
        try:
            return bool(client.ping())
        except (NotThere, BusyLoadingError):
            return False
        finally:
            client.close()
