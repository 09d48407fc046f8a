"""Supervisor: runs a whole cluster on one machine, for development. It starts the wanted number of slices, and new ones
for those that end. `tidegate scale` and `tidegate replace` change what is wanted, and the supervisor follows.

What may go wrong here: a process dies (another is started, after a pause if many have died recently), or the supervisor
itself is killed (its children continue without it).
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tidegate.cluster.directory import Directory
from tidegate.cluster.planning import Wanted
from tidegate.layers.layer import Layer, layer_of
from tidegate.security.credentials import REDIS_PASSWORD_VARIABLE, without_secrets

log = logging.getLogger(__name__)

END_S: Final = 15.0
LOOK_S: Final = 0.5
# After RESTARTS failures within RESTART_S, the next start waits for RESTART_S.
RESTARTS: Final = 5
RESTART_S: Final = 10.0


@dataclass(frozen=True)
class Plan:
    """The addresses, ports and data directory of a cluster on one machine."""

    coordinator: str
    registry: str
    data: str
    native_port: int
    http_port: int
    ssap_port: int
    redis_password_file: str = ""


@dataclass(eq=False)
class _Child:
    kind: str
    process: asyncio.subprocess.Process
    name: str = ""


class Supervisor:
    """Starts and watches the processes. `on_ready` gets the content of the broker's ready line, once all serve."""

    def __init__(self, plan: Plan, wanted: Wanted, on_ready: Callable[[dict[str, str]], None]) -> None:
        self._plan = plan
        self._first = wanted
        self._on_ready = on_ready
        self._directory = Directory(plan.coordinator, self._look_soon, self._stop)
        self._children: set[_Child] = set()
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ends_s: deque[float] = deque(maxlen=RESTARTS)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        await self._directory.open()
        await self._directory.want(self._first)
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._start(tasks, "coordinator")
                await self._start(tasks, "serve")
                while not self._stopping.is_set():
                    self._changed.clear()
                    await self._look(tasks)
                    await self._wait()
                await self._end_all()
        finally:
            await self._directory.close()

    def _stop(self) -> None:
        self._stopping.set()
        self._changed.set()

    def _look_soon(self) -> None:
        self._changed.set()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Starts the missing slices. The coordinator retires those that are no longer wanted, and they end by
        themselves."""
        wanted, state = self._directory.wanted(), self._directory.state()
        serving = state.current.slices if state is not None else frozenset()
        for layer in Layer:
            leaving = sum(layer_of(name) is layer for name in wanted.replaced & serving)
            running = sum(child.kind == layer for child in self._children)
            for _ in range(wanted.count(layer) + leaving - running):
                await self._start(tasks, layer)

    async def _start(self, tasks: asyncio.TaskGroup, kind: str) -> None:
        if len(self._ends_s) == RESTARTS and time.monotonic() - self._ends_s[0] < RESTART_S:
            log.warning("%d processes have failed within %g s; pausing before the next start", RESTARTS, RESTART_S)
            await asyncio.sleep(RESTART_S)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidegate", *self._arguments(kind),
            stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env=None if kind == "serve" else without_secrets(REDIS_PASSWORD_VARIABLE),
        )  # fmt: skip
        child = _Child(kind, process)
        self._children.add(child)
        tasks.create_task(self._watch(tasks, child))

    def _arguments(self, kind: str) -> list[str]:
        plan = self._plan
        if kind == "serve":
            chosen = {"native": plan.native_port, "http": plan.http_port, "ssap": plan.ssap_port}
            ports = [text for name, port in chosen.items() for text in (f"--{name}-port", str(port))]
            return ["serve", "--coordinator", plan.coordinator, "--data", plan.data, *ports]
        password = ["--redis-password-file", plan.redis_password_file] if plan.redis_password_file else []
        place = ["--coordinator", plan.coordinator, "--registry", plan.registry, *password]
        return ["slice", kind, *place, "--log-level", "warning"]

    async def _watch(self, tasks: asyncio.TaskGroup, child: _Child) -> None:
        """Reads a child's first line, which is its name or its ready line, and waits for its end."""
        assert child.process.stdout is not None
        line = (await child.process.stdout.readline()).decode().strip()
        if child.kind == "serve" and line:
            self._on_ready(json.loads(line)["ready"])
        child.name = line if child.kind in set(Layer) else child.kind
        code = await child.process.wait()
        self._children.discard(child)
        if self._stopping.is_set():
            return
        if code != 0:
            log.warning("%s exited with code %d", child.name or child.kind, code)
            self._ends_s.append(time.monotonic())
        if child.kind not in set(Layer):
            await self._start(tasks, child.kind)
        self._changed.set()

    async def _end_all(self) -> None:
        """Stops all processes, the broker first: its accepted notifications can still pass the layers."""
        for kinds in ({"serve"}, set(Layer), {"coordinator"}):
            ending = [child for child in self._children if child.kind in kinds]
            for child in ending:
                child.process.terminate()
            for child in ending:
                try:
                    async with asyncio.timeout(END_S):
                        await child.process.wait()
                except TimeoutError:
                    child.process.kill()
