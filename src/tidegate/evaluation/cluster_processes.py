"""A cluster for evaluations: every slice a process, a ZooKeeper of its own, a registry in LMDB. Slices that are started
beyond what is wanted are spares, which a change takes at once: so what is measured is the change, not Python's start.
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

from tidegate.broker import prepare_kernels
from tidegate.broker_process import end_process
from tidegate.cluster.directory import Directory
from tidegate.cluster.zookeeper_server import zookeeper_server
from tidegate.errors import Unavailable

STARTUP_S: Final = 120.0


class ClusterProcesses:
    """1-1-1 at first. `address` is where clients reach its broker."""

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
            await self._run("slice", "coordinator", *self._slice_flags(), says=False)
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
        """A slice that serves when this returns, as a spare unless it is missing; its name."""
        name = await self._run("slice", kind, *self._slice_flags())
        self._slices[name] = self._processes[-1]
        return name

    async def kill(self, name: str) -> None:
        """As a crash does."""
        self._slices[name].kill()
        await self._slices[name].wait()

    def _slice_flags(self) -> tuple[str, ...]:
        registry = f"lmdb:{self._data / 'registry'}"
        return ("--coordinator", self.coordinator, "--registry", registry, "--log-level", "error")

    async def _run(self, *arguments: str, says: bool = True) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidegate", *arguments, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._processes.append(process)
        if not says:
            return ""
        assert process.stdout is not None
        async with asyncio.timeout(STARTUP_S):
            line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise Unavailable("U701", f"tidegate {' '.join(arguments[:2])} did not start", "see its message above")
        return line

    async def _end(self) -> None:
        """The broker first, then the slices, the coordinator last."""
        await self.directory.close()
        for process in reversed(self._processes):
            await end_process(process)


@contextlib.asynccontextmanager
async def cluster_processes() -> AsyncIterator[ClusterProcesses]:
    prepare_kernels()  # once, not in every child at the same time
    with tempfile.TemporaryDirectory(prefix="tidegate-cluster-") as data:
        async with (
            zookeeper_server(Path(data) / "zookeeper") as coordinator,
            ClusterProcesses(coordinator, Path(data)) as cluster,
        ):
            yield cluster
