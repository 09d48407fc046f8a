"""`tidegate` in another process, started as quickly as possible: a fork of this worker's fork server.

`TidegateProcess` is a `subprocess.Popen` that takes the arguments of the command. If the environment has a variable
that must be set before Python starts, it executes `python -m tidegate`, as users do.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("fork_server.py")
END_S = 10
# The dynamic linker, Python or numba reads these before our code runs, or an imported library remembers them.
EARLY = ("LD_", "PYTHON", "NUMBA_", "XDG_", "HOME", "TMPDIR")


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(EARLY)}


def _umask() -> int:
    """Returns the mask of this process. `os.umask` can only return it by changing it, for all threads."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Umask:")[2].split()[0], 8)


INHERITED = _early(os.environ)
LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE)


class ForkServerLink:
    """The fork server of this process and the connection to it. Safe for threads."""

    def __init__(self) -> None:
        self._channel, its = socket.socketpair()
        with its:
            command = [sys.executable, str(SERVER), str(its.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Requests a fork with these descriptors, and returns its process id."""
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            answer = b""
            while not answer.endswith(b"\n"):
                data = self._channel.recv(64)
                assert data, f"the fork server has ended with {self._process.wait(END_S)}"
                answer += data
        return int(answer)

    def close(self) -> None:
        """Ends the server, even if it is still loading the kernels."""
        self._channel.close()
        self._process.kill()
        self._process.wait(END_S)


@functools.cache
def fork_server() -> ForkServerLink:
    link = ForkServerLink()
    atexit.register(link.close)
    return link


class TidegateProcess(subprocess.Popen[Any]):
    """A `Popen` that takes the arguments of `tidegate` instead of a whole command."""

    def __init__(self, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> None:
        environment = dict(os.environ if env is None else env)
        self._is_fork = _early(environment) == INHERITED
        self._ended = -1
        super().__init__([sys.executable, "-m", "tidegate", *arguments], env=environment, **options)

    # `Popen` has only these hooks: how it starts a process, and how it checks whether the process has ended.

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        if not self._is_fork:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        directory, environment, streams = rest[4], rest[5], rest[9:15]
        request = {
            "arguments": args[3:],
            "environment": environment,
            "directory": str(directory or Path.cwd()),
            "umask": _umask(),
            "limits": [(limit, resource.getrlimit(limit)) for limit in LIMITS],
        }
        # The child's ends of the pipes. -1 stands for the stream of this process.
        given = [own if end == -1 else end for own, end in enumerate((streams[0], streams[3], streams[5]))]
        self._ended, status = os.pipe()
        try:
            self.pid = fork_server().fork(request, [*given, status])
        finally:
            os.close(status)
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]
        self._child_created = True

    def _internal_poll(self, *rest: Any, **options: Any) -> int | None:
        if not self._is_fork:
            code: int | None = super()._internal_poll(*rest, **options)  # type: ignore[misc]
            return code
        if self.returncode is None and self._ended != -1:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if not self._is_fork:
            waited: tuple[int, int] = super()._try_wait(flags)  # type: ignore[misc]
            return waited
        if not select.select([self._ended], [], [], 0 if flags & os.WNOHANG else None)[0]:
            return 0, 0
        status = int(os.read(self._ended, 64))
        os.close(self._ended)
        self._ended = -1
        return self.pid, status
