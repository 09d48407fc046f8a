"""Ports for servers that cannot pick one themselves (Redis, ZooKeeper, Spark) and for restarts on the same port.

Between closing a port and the start of its server, another test or an outgoing connection of the kernel may take the
port. The ports from here are below the kernel's range for outgoing connections, and a lock on a file reserves each of
them for the life of the test process.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

PORTS = range(20_000, 32_000)
LOCKS = Path(tempfile.gettempdir()) / f"tidegate-test-ports-{os.getuid()}"

_held: list[IO[bytes]] = []


def reserve_port() -> int:
    """Returns a port of the loopback that no other test process uses until this one ends."""
    LOCKS.mkdir(exist_ok=True)
    for port in random.sample(PORTS, len(PORTS)):
        lock = (LOCKS / str(port)).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        # The lock is kept even if the port is in use, so that no test process tries it again.
        _held.append(lock)
        if _is_free(port):
            return port
    raise AssertionError(f"all ports from {PORTS.start} to {PORTS.stop} are in use")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
