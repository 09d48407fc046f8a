"""Layers in separate processes, as their users start them: `tidegate slice …` and `tidegate serve --coordinator …`,
with a real ZooKeeper and a registry in LMDB."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from broker_process import BrokerProcess
from command import tidegate
from tidegate_process import TidegateProcess
from zookeeper_process import ZooKeeperProcess

from tidegate.cluster.directory import Directory
from tidegate.layers.reconfiguration import State

T = TypeVar("T")
SETTLE_S = 60
END_S = 30


class SliceProcess:
    """One `tidegate slice`. Its name is known once it serves; a coordinator has none. Its standard error goes to a
    file, because a full pipe without a reader would block it."""

    def __init__(self, kind: str, zookeeper: str, registry: str, *flags: str) -> None:
        command = ["slice", kind, "--coordinator", zookeeper, "--registry", registry, *flags]
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - `wait` closes it
        self._process = TidegateProcess(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)

    def name(self) -> str:
        assert self._process.stdout is not None
        name: str = self._process.stdout.readline().strip()
        assert name, f"a slice does not start: {self.errors()}"
        return name

    def errors(self) -> str:
        """Returns its standard error so far, which is gone once the process was waited for."""
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        return self._errors.read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_up(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        """Waits until the process ends by itself."""
        code = self._process.wait(END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        return code

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()


class Cluster:
    """A context manager that runs a cluster, with its slices by name and its broker."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tidegate-cluster-")
        self.registry = f"lmdb:{self._directory.name}/registry"
        self.zookeeper = ZooKeeperProcess()
        self.slices: dict[str, SliceProcess] = {}
        self.coordinators: list[SliceProcess] = []
        self._brokers: list[BrokerProcess] = []
        self._added = 0

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
        """Starts a slice, which is a spare until it is needed, and returns its name. Exit Points listen on Unix
        sockets, and others on TCP."""
        self._added += 1
        path = f"{self._directory.name}/{kind}-{self._added}"
        flags = ["--bind", f"unix:{path}"] if kind == "exit-point" else []
        process = SliceProcess(kind, self.zookeeper.address, self.registry, *flags)
        name = process.name()
        self.slices[name] = process
        return name

    def add_coordinator(self) -> None:
        self.coordinators.append(SliceProcess("coordinator", self.zookeeper.address, self.registry))

    def add_broker(self, *flags: str, environment: dict[str, str] | None = None) -> BrokerProcess:
        broker = BrokerProcess("--coordinator", self.zookeeper.address, *flags, environment=environment)
        broker.start()
        self._brokers.append(broker)
        return broker

    def kill(self, name: str) -> None:
        self.slices.pop(name).kill()

    def command(self, *arguments: str) -> dict[str, Any]:
        """Runs `tidegate scale`, `replace` or `layers`, and returns its output."""
        done = tidegate(*arguments, "--coordinator", self.zookeeper.address, timeout_s=SETTLE_S)
        assert done.code == 0, "\n".join([done.err, *(f"a coordinator: {each.errors()}" for each in self.coordinators)])
        printed: dict[str, Any] = json.loads(done.out)
        return printed

    def state(self) -> State:
        async def look(directory: Directory) -> State | None:
            return directory.state()

        return asyncio.run(self._ask(look)) or State.first()

    def settle(self, *counts: int, without: frozenset[str] = frozenset()) -> State:
        """Waits until there are so many Access Points, Matchers and Exit Points, and no change is pending."""
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
