"""Runs `tidegate` commands as forks of one process that has imported everything and loaded the kernels.

A broker needs two seconds of CPU time to import its modules and to load its kernels, and the tests start hundreds of
brokers. A fork of a process that has loaded them is ready immediately. It is a normal process with its own memory,
standard streams, signals and exit code, and it runs the entry point of the command. `tidegate_process` is the other
side, which requests forks.

    python fork_server.py FD        serves requests on the Unix socket FD until it is closed

A request is a JSON object (arguments, environment, directory, umask, limits) with four descriptors: standard input,
output, error, and the end of a pipe. The answer is the process id. When the process ends, the pipe receives its wait
status.

What may go wrong: anything that must be set before Python starts (LD_PRELOAD, NUMBA_…) does not reach a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import selectors
import socket
import sys
from typing import Any

REQUEST_BYTES = 1 << 20
DESCRIPTORS = 4
LOADED = (
    "tidegate.broker.assembly",
    "tidegate.commands.cli",
    "tidegate.cluster.broker_host",
    "tidegate.cluster.coordinator_process",
    "tidegate.cluster.slice_process",
    "tidegate.queues.stores.redis_store",
)


def load() -> None:
    """Imports what commands import when they run, and loads the kernels."""
    for name in LOADED:
        importlib.import_module(name)
    from tidegate.broker.warm_up import warm_up

    warm_up()
    # These objects stay. Freezing them spares each fork from examining them and from copying their pages.
    gc.collect()
    gc.freeze()


class ForkServer:
    """Serves fork requests. `_running` maps the descriptor that signals the end of a process to its id and to the pipe
    for its wait status."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._running: dict[int, tuple[int, int]] = {}

    def serve(self) -> list[str]:
        """Forks a process per request. In each fork it returns the arguments; in the server it exits at the end."""
        while True:
            for key, _events in self._selector.select():
                if key.fd in self._running:
                    self._report(key.fd)
                    continue
                data, descriptors, _flags, _address = socket.recv_fds(self._channel, REQUEST_BYTES, DESCRIPTORS)
                if not data:
                    sys.exit(0)
                pid = os.fork()
                if pid == 0:
                    self._forget_all()
                    return _become(json.loads(data), descriptors)
                self._watch(pid, descriptors)

    def _watch(self, pid: int, descriptors: list[int]) -> None:
        *streams, status = descriptors
        for stream in streams:
            os.close(stream)
        ended = os.pidfd_open(pid)
        self._running[ended] = pid, status
        self._selector.register(ended, selectors.EVENT_READ)
        self._channel.sendall(f"{pid}\n".encode())

    def _report(self, ended: int) -> None:
        self._selector.unregister(ended)
        pid, pipe = self._running.pop(ended)
        _pid, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # the other side no longer waits for it
            os.write(pipe, f"{status}\n".encode())
        os.close(pipe)
        os.close(ended)

    def _forget_all(self) -> None:
        """Closes the server's descriptors in a fork."""
        self._selector.close()
        self._channel.close()
        for ended, (_pid, pipe) in self._running.items():
            os.close(ended)
            os.close(pipe)


def _become(request: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Sets up what a child normally inherits: the streams, limits, environment and directory of the request."""
    for standard, given in enumerate(descriptors[:3]):
        os.dup2(given, standard)
    for given in descriptors:
        os.close(given)
    for limit, bounds in request["limits"]:
        resource.setrlimit(limit, bounds)
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    arguments: list[str] = request["arguments"]
    return arguments


if __name__ == "__main__":
    load()
    chosen = ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
    sys.argv = ["tidegate", *chosen]
    from tidegate.commands.cli import main

    main(chosen)
