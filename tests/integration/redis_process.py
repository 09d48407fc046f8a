"""A real Redis of a test's own: `redis-server` on a free port of this machine, in a directory that goes with it."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any, Self

from redis import Redis
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as NotThere

STARTUP_S = 30
SHUTDOWN_S = 30


class RedisProcess:
    """Use it in `with`; it is ended, by its process id, whatever happens. `fsync` is that of the append-only file, None
    for none. `start` after `kill` has the same port and directory."""

    def __init__(self, *, fsync: str | None = "everysec") -> None:
        self._fsync = fsync
        self._directory = tempfile.TemporaryDirectory(prefix="tidegate-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
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
        """Returns when it answers."""
        aof = ["--appendonly", "no"] if self._fsync is None else ["--appendonly", "yes", "--appendfsync", self._fsync]
        place = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", self._directory.name]
        self._process = subprocess.Popen(
            ["redis-server", *place, "--save", "", *aof],
            stdout=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + STARTUP_S
        while not self._answers():
            assert self._process.poll() is None, "redis-server did not start"
            assert time.monotonic() < deadline_s, "redis-server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(SHUTDOWN_S)

    def client(self) -> Any:
        """For a look underneath; close it. Not typed: what commands give depends on the client's kind."""
        return Redis(port=self.port, protocol=2)

    def _answers(self) -> bool:
        client = self.client()
        try:
            return bool(client.ping())
        except (NotThere, BusyLoadingError):
            return False
        finally:
            client.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
