"""Runs a broker in a process of its own, as in production: for the demo and for evaluations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tidegate.errors import Unavailable

STARTUP_S: Final = 120.0
END_S: Final = 20.0


@dataclass(frozen=True)
class RunningBroker:
    """The addresses and the process of a running broker. `ssap` is empty without a knowledge base."""

    address: str
    http: str
    ssap: str
    pid: int
    until_ended: Callable[[], Awaitable[int]]


@contextlib.asynccontextmanager
async def broker_process(*flags: str) -> AsyncIterator[RunningBroker]:
    """Runs `tidegate serve` on free ports with a temporary data directory, and stops it on exit, also after errors."""
    with tempfile.TemporaryDirectory(prefix="tidegate-data-") as data:
        ports = ("--native-port", "0", "--http-port", "0", "--ssap-port", "-1")
        command = ("-m", "tidegate", "serve", *ports, "--log-level", "warning")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            "--data",
            data,
            *flags,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C must reach only the parent, which still needs the broker while it shuts down.
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(STARTUP_S):
                line = await process.stdout.readline()
            if not line:
                raise Unavailable("U701", "the broker did not start", "see its message above")
            ready = json.loads(line)["ready"]
            yield RunningBroker(ready["native"], ready["http"], ready["ssap"], process.pid, process.wait)
        finally:
            await end_process(process)


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Terminates the process, and kills it if it has not exited after `END_S`."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
