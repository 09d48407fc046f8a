"""A ZooKeeper server for one machine, from Debian's package: for development, when no address is given. It keeps its
data in a directory, and ends with the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from tidegate.errors import ConfigError, Unavailable
from tidegate.security.credentials import without_secrets
from tidegate.security.private_files import private_directory

JAR: Final = Path("/usr/share/java/zookeeper.jar")
MAIN: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
STARTUP_S: Final = 60.0
HEAP: Final = "-Xmx256m"


@contextlib.asynccontextmanager
async def zookeeper_server(directory: Path) -> AsyncIterator[str]:
    """Runs a ZooKeeper server, and yields its address once it answers."""
    java = shutil.which("java")
    if java is None or not JAR.exists():
        raise ConfigError(
            "C451",
            "ZooKeeper is not installed on this machine",
            "install it (Debian and Ubuntu: sudo apt-get install zookeeper), or name one: --coordinator zk://host:2181",
        )
    private_directory(directory)
    port = _free_port()
    settings = directory / "zoo.cfg"
    settings.write_text(
        f"dataDir={directory.resolve()}/data\nclientPort={port}\nclientPortAddress=127.0.0.1\n"
        "tickTime=1000\nadmin.enableServer=false\n4lw.commands.whitelist=ruok\n"
    )
    process = await asyncio.create_subprocess_exec(
        java, HEAP, "-cp", f"{directory}:{JAR}", MAIN, str(settings),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        env=without_secrets(),
    )  # fmt: skip
    try:
        async with asyncio.timeout(STARTUP_S):
            while not await asyncio.to_thread(_answers, port):
                if process.returncode is not None:
                    raise Unavailable("U730", "ZooKeeper exited at its start", f"run it by hand: {MAIN} {settings}")
                await asyncio.sleep(0.1)
        yield f"zk://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"ruok")
            return connection.recv(4) == b"imok"
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
