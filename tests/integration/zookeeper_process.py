"""A real ZooKeeper for one test: Debian's package, on a free port, in a temporary directory."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ports import reserve_port

STARTUP_S = 60
SHUTDOWN_S = 30
CLASSES = "/etc/zookeeper/conf:/usr/share/java/zookeeper.jar"


class ZooKeeperProcess:
    """A context manager that runs a ZooKeeper, and ends it by its process id in any case. `start` after `kill` uses the
    same port and directory. It expires sessions by steps of half a second."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tidegate-zookeeper-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = reserve_port()
        self.address = f"zk://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._directory.cleanup()

    def start(self) -> None:
        """Starts ZooKeeper, and returns when it answers."""
        settings = Path(self._directory.name) / "zoo.cfg"
        settings.write_text(
            f"dataDir={self._directory.name}/data\nclientPort={self.port}\nclientPortAddress=127.0.0.1\n"
            "tickTime=500\nadmin.enableServer=false\n4lw.commands.whitelist=ruok\n"
        )
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        self._process = subprocess.Popen(
            ["java", "-Xmx256m", "-cp", CLASSES, main, str(settings)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + STARTUP_S
        while not self._answers():
            assert self._process.poll() is None, "ZooKeeper did not start"
            assert time.monotonic() < deadline_s, "ZooKeeper does not answer"
            time.sleep(0.05)

    def kill(self) -> None:
        """Kills ZooKeeper, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(SHUTDOWN_S)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"ruok")
                return connection.recv(4) == b"imok"
        except OSError:
            return False
