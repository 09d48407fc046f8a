"""Jobs in separate processes, and their cost: this is the only module that starts, ends and measures processes.

A `Server` is a program under test, and a `Worker` is a Python function that uses it. Both are context managers, and are
ended by their process id, also when the benchmark fails. CPU time comes from the kernel's clock of each process
(nanoseconds, all threads), read from outside while the process lives. CPU time before `go` does not count.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

STARTUP_S: Final = 120.0
# The bound of one measured run. A worker that is not done by then returns what it has.
RUN_S: Final = 30.0
_END_S: Final = 15.0
# The low bits of a clock id that ask for a process, and for its CPU time as the scheduler counts it.
_PROCESS_CPU_CLOCK: Final = 2

_spawning = multiprocessing.get_context("spawn")


class Failed(Exception):
    """A process did not do its part, so the benchmark that needs it stops."""


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a live process and its threads since its start, like clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | _PROCESS_CPU_CLOCK)


def tree_cpu_s(root: int) -> dict[int, float]:
    """Returns the CPU seconds of a process and of all its live descendants, by process id."""
    used_s: dict[int, float] = {}
    pids = [root]
    while pids:
        pid = pids.pop()
        with contextlib.suppress(OSError):
            used_s[pid] = cpu_s(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
    return used_s


def tree_cpu_since_s(root: int, before_s: dict[int, float]) -> float:
    """Returns the CPU seconds that the tree has used since. Processes that have ended meanwhile do not count."""
    return sum(used_s - before_s.get(pid, 0.0) for pid, used_s in tree_cpu_s(root).items())


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def anonymous_bytes(pid: int) -> int:
    """Returns the resident memory of a process without mapped files, which the system may take back."""
    status = Path(f"/proc/{pid}/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(kilobytes)


def free_port() -> int:
    """Returns a port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find_program(name: str) -> str:
    """Returns the path of a program. Debian installs servers in a folder that is not on every user's PATH."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise Failed(f"{name} is not installed: scripts/ensure-packages {name}:{name}")
    return found


class Server:
    """A program that listens on loopback."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._command = command
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def read_line(self) -> bytes:
        """Returns the next line that the program prints."""
        assert self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], STARTUP_S)
        line = self._process.stdout.readline() if is_there else b""
        if not line:
            raise self._failed("says nothing")
        return line

    def wait_listening(self, port: int) -> None:
        deadline_s = time.monotonic() + STARTUP_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            time.sleep(0.02)
        raise self._failed(f"does not listen on port {port}")

    def _failed(self, what: str) -> Failed:
        self._log.seek(0)
        last = self._log.read().decode(errors="replace")[-1000:]
        return Failed(f"{' '.join(self._command)} {what}: {last}")


class Line:
    """A worker's end of its connection to the benchmark."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ready(self, value: Any = None) -> None:
        self._connection.send(("ready", value))

    def wait_go(self) -> None:
        self._connection.recv()


class Worker:
    """Runs `work(line, *arguments)` in another process. It reports ready, may wait for go, and returns its result."""

    def __init__(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._connection, theirs = _spawning.Pipe()
        self._name = work.__qualname__
        self._process = _spawning.Process(target=_work, args=(theirs, work, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for a worker that has returned its result, and ends any other."""
        self._connection.close()
        self._process.join(_END_S if kind is None else 0.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_ready(self) -> Any:
        return self._receive("ready", STARTUP_S)

    def go(self) -> None:
        self._connection.send("go")

    def result(self, timeout_s: float = 2 * RUN_S) -> Any:
        return self._receive("result", timeout_s)

    def kill(self) -> None:
        """Kills a worker whose orderly end would only take time."""
        self._process.kill()

    def _receive(self, expected: str, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise Failed(f"{self._name} is not {expected} after {timeout_s:g} s")
            kind, value = self._connection.recv()
        except EOFError:
            raise Failed(f"{self._name} ended without a result") from None
        if kind != expected:
            raise Failed(f"{self._name}: {value}")
        return value


def _work(connection: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = ("result", work(Line(connection), *arguments))
    except BaseException:
        answer = ("failed", traceback.format_exc())
    with contextlib.suppress(EOFError, OSError):
        connection.send(answer)
        # The process must live until its CPU clock has been read.
        connection.recv()
