"""Layers in processes of their own, as their users start them: `tidegate slice …` and `tidegate serve --coordinator …`,
with a real ZooKeeper, and a registry in LMDB."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from broker_process import BrokerProcess
from zookeeper_process import ZooKeeperProcess

from tidegate.cluster.directory import Directory
from tidegate.layers.reconfiguration import State

T = TypeVar("T")
SETTLE_S = 60
END_S = 30


class SliceProcess:
    """One `tidegate slice`. Its name is known once it serves; a coordinator has none."""

    def __init__(self, kind: str, zookeeper: str, registry: str, *flags: str) -> None:
        command = ["slice", kind, "--coordinator", zookeeper, "--registry", registry, *flags]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tidegate", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def name(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        """Until it ends by itself."""
        code = self._process.wait(END_S)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        return code

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()


class Cluster:
    """Use it in `with`. Slices by name; the broker is `broker`."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tidegate-cluster-")
        self.registry = f"lmdb:{self._directory.name}/registry"
        self.zookeeper = ZooKeeperProcess()
        self.slices: dict[str, SliceProcess] = {}
        self.coordinators: list[SliceProcess] = []
        self._brokers: list[BrokerProcess] = []

    def __enter__(self) -> Self:
        self.zookeeper.start()
        self.add_coordinator()
        for kind in ("access-point", "matcher", "exit-point"):
            self.add(kind)
        self.settle(1, 1, 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for broker in self._brokers:
            broker.__exit__(kind, error, trace)
        for each in [*self.slices.values(), *self.coordinators]:
            each.end()
        self.zookeeper.__exit__(kind, error, trace)
        self._directory.cleanup()

    def add(self, kind: str) -> str:
        """A slice that is there, and a spare until it is wanted. Exit Points listen on Unix sockets, others on TCP."""
        path = f"{self._directory.name}/{kind}-{len(self.slices)}"
        flags = ["--bind", f"unix:{path}"] if kind == "exit-point" else []
        process = SliceProcess(kind, self.zookeeper.address, self.registry, *flags)
        name = process.name()
        assert name, f"a {kind} does not start"
        self.slices[name] = process
        return name

    def add_coordinator(self) -> None:
        self.coordinators.append(SliceProcess("coordinator", self.zookeeper.address, self.registry))

    def add_broker(self, *flags: str) -> BrokerProcess:
        broker = BrokerProcess("--coordinator", self.zookeeper.address, *flags)
        broker.start()
        self._brokers.append(broker)
        return broker

    def kill(self, name: str) -> None:
        self.slices.pop(name).kill()

    def command(self, *arguments: str) -> dict[str, Any]:
        """`tidegate scale`, `replace` or `layers`, and what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "tidegate", *arguments, "--coordinator", self.zookeeper.address],
            capture_output=True,
            text=True,
            timeout=SETTLE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed: dict[str, Any] = json.loads(done.stdout)
        return printed

    def state(self) -> State:
        async def look(directory: Directory) -> State | None:
            return directory.state()

        return asyncio.run(self._ask(look)) or State.first()

    def settle(self, *counts: int, without: frozenset[str] = frozenset()) -> State:
        """Waits until there are so many Access Points, Matchers and Exit Points, and nothing is under way."""
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            state = self.state()
            current = state.current
            found = (len(current.access_points), len(current.matchers), len(current.exit_points))
            if state.transaction is None and found == counts and current.slices.isdisjoint(without):
                return state
            assert time.monotonic() < deadline_s, f"the layers stay at {state}"
            time.sleep(0.1)

    async def _ask(self, question: Callable[[Directory], Awaitable[T]]) -> T:
        directory = Directory(self.zookeeper.address, lambda: None, lambda: None)
        await directory.open()
        try:
            return await question(directory)
        finally:
            await directory.close()
