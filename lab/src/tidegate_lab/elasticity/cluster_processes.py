"""Cluster for evaluations: one process per slice, its own ZooKeeper, and a registry in LMDB.

Slices beyond the wanted number are spares, which a change uses immediately. So an experiment measures the change
itself, not the start of a Python process. What may go wrong: a process does not start (U701).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Self

from tidegate.broker.assembly import prepare_kernels
from tidegate.broker.process import end_process
from tidegate.cluster.directory import Directory
from tidegate.cluster.zookeeper_server import zookeeper_server
from tidegate.errors import Unavailable

STARTUP_S: Final = 120.0


class ClusterProcesses:
    """The processes of a cluster, which starts as 1-1-1. Clients reach its broker at `address`."""

    def __init__(self, coordinator: str, data: Path) -> None:
        self.coordinator = coordinator
        self.address = ""
        self.directory = Directory(coordinator, lambda: None, lambda: None)
        self._data = data
        self._processes: list[asyncio.subprocess.Process] = []
        self._slices: dict[str, asyncio.subprocess.Process] = {}

    async def __aenter__(self) -> Self:
        await self.directory.open()
        try:
            await self._run("slice", "coordinator", *self._slice_flags(), prints_line=False)
            for kind in ("access-point", "matcher", "exit-point"):
                await self.start(kind)
            flags = ("--coordinator", self.coordinator, "--data", str(self._data), "--log-level", "warning")
            line = await self._run("serve", *flags, "--native-port", "0", "--http-port", "0", "--ssap-port", "-1")
            self.address = json.loads(line)["ready"]["native"]
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def start(self, kind: str) -> str:
        """Starts a slice, waits until it is ready, and returns its name. The slice is a spare unless one is missing."""
        name = await self._run("slice", kind, *self._slice_flags())
        self._slices[name] = self._processes[-1]
        return name

    async def kill(self, name: str) -> None:
        """Kills a slice without warning, as a crash does."""
        self._slices[name].kill()
        await self._slices[name].wait()

    def _slice_flags(self) -> tuple[str, ...]:
        registry = f"lmdb:{self._data / 'registry'}"
        return ("--coordinator", self.coordinator, "--registry", registry, "--log-level", "error")

    async def _run(self, *arguments: str, prints_line: bool = True) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidegate", *arguments, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._processes.append(process)
        if not prints_line:
            return ""
        assert process.stdout is not None
        async with asyncio.timeout(STARTUP_S):
            line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise Unavailable("U701", f"tidegate {' '.join(arguments[:2])} did not start", "see its message above")
        return line

    async def _end(self) -> None:
        """Ends the broker first, then the slices, and the coordinator last."""
        await self.directory.close()
        for process in reversed(self._processes):
            await end_process(process)


@contextlib.asynccontextmanager
async def cluster_processes() -> AsyncIterator[ClusterProcesses]:
    prepare_kernels()  # here, because otherwise every child would compile them at the same time
    with tempfile.TemporaryDirectory(prefix="tidegate-cluster-") as data:
        async with (
            zookeeper_server(Path(data) / "zookeeper") as coordinator,
            ClusterProcesses(coordinator, Path(data)) as cluster,
        ):
            yield cluster
