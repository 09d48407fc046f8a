"""A broker in a process of its own, as in real life: for the demo and for evaluations."""

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
    """`http` and, with a knowledge base, `ssap` are addresses too."""

    address: str
    http: str
    ssap: str
    pid: int
    until_ended: Callable[[], Awaitable[int]]


@contextlib.asynccontextmanager
async def broker_process(*flags: str) -> AsyncIterator[RunningBroker]:
    """`tidegate serve` on free ports with a data directory of its own, ended tidily whatever happens."""
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
            # Ctrl-C is for whoever has started it, who ends it when it is no longer needed.
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
    """Asks it to end, and ends one that does not."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
