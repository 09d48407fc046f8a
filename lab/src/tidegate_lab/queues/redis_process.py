"""Starts a Redis server for an evaluation, on a free port, in its own directory.

What may go wrong: redis-server is not installed (U708).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from typing import Final

from tidegate.errors import Unavailable
from tidegate.security.credentials import without_secrets

STARTUP_S: Final = 120.0


@contextlib.asynccontextmanager
async def redis_process() -> AsyncIterator[tuple[str, int]]:
    """Runs a Redis whose append-only file is synced every second. Yields its address and process id."""
    program = shutil.which("redis-server")
    if program is None:
        raise Unavailable("U708", "redis-server is not installed", "apt-get install redis-server")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="tidegate-evaluation-") as directory:
        process = await asyncio.create_subprocess_exec(
            program, "--port", str(port), "--bind", "127.0.0.1", "--dir", directory, "--appendonly", "yes",
            "--save", "", stdout=asyncio.subprocess.DEVNULL, env=without_secrets(),
        )  # fmt: skip
        try:
            await _wait_for_port(port)
            yield f"redis://127.0.0.1:{port}/0", process.pid
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _wait_for_port(port: int) -> None:
    async with asyncio.timeout(STARTUP_S):
        while True:
            try:
                _reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                await writer.wait_closed()
                return
