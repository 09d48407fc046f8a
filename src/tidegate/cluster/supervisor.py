"""Supervisor: a whole cluster on one machine, for development. It starts as many slices as are wanted, and others for
those that end; `tidegate scale` and `tidegate replace` change what is wanted, and it follows.

What may go wrong here: a process dies (another is started, after a pause when many have died shortly before), or the
supervisor itself is killed: its children go on without it.
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

from tidegate.cluster.directory import Directory, Wanted

log = logging.getLogger(__name__)

END_S: Final = 15.0
LOOK_S: Final = 0.5
# So many ends within this time, and the next start waits that long.
RESTARTS: Final = 5
RESTART_S: Final = 10.0
_LAYERS: Final = {"access-point": "access_points", "matcher": "matchers", "exit-point": "exit_points"}


@dataclass(frozen=True)
class Plan:
    """What to start beside the slices, and how to reach it all."""

    coordinator: str
    registry: str
    data: str
    native_port: int
    http_port: int
    ssap_port: int


@dataclass(eq=False)
class _Child:
    kind: str
    process: asyncio.subprocess.Process
    name: str = ""


class Supervisor:
    """`on_ready` gets the ready line of the broker, when everything serves."""

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
        """Starts what is missing; who is not wanted any more is retired by the coordinator, and ends by itself."""
        wanted, state = self._directory.wanted() or Wanted(), self._directory.state()
        serving = state.current.slices if state is not None else frozenset()
        for kind, layer in _LAYERS.items():
            leaving = sum(name.startswith(f"{kind}-") for name in wanted.replaced & serving)
            running = sum(child.kind == kind for child in self._children)
            for _ in range(getattr(wanted, layer) + leaving - running):
                await self._start(tasks, kind)

    async def _start(self, tasks: asyncio.TaskGroup, kind: str) -> None:
        if len(self._ends_s) == RESTARTS and time.monotonic() - self._ends_s[0] < RESTART_S:
            log.warning("%d processes have ended within %g s; the next start waits", RESTARTS, RESTART_S)
            await asyncio.sleep(RESTART_S)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidegate", *self._arguments(kind),
            stdout=asyncio.subprocess.PIPE, start_new_session=True,
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
        return ["slice", kind, "--coordinator", plan.coordinator, "--registry", plan.registry, "--log-level", "warning"]

    async def _watch(self, tasks: asyncio.TaskGroup, child: _Child) -> None:
        """Reads what it says first, its name or that it is ready, and waits for its end."""
        assert child.process.stdout is not None
        line = (await child.process.stdout.readline()).decode().strip()
        if child.kind == "serve" and line:
            self._on_ready(json.loads(line)["ready"])
        child.name = line if child.kind in _LAYERS else child.kind
        code = await child.process.wait()
        self._children.discard(child)
        if self._stopping.is_set():
            return
        if code != 0:
            log.warning("%s has ended with %d", child.name or child.kind, code)
            self._ends_s.append(time.monotonic())
        if child.kind not in _LAYERS:
            await self._start(tasks, child.kind)
        self._changed.set()

    async def _end_all(self) -> None:
        """The brokers first, so that what they have accepted still arrives."""
        for kinds in ({"serve"}, set(_LAYERS), {"coordinator"}):
            ending = [child for child in self._children if child.kind in kinds]
            for child in ending:
                child.process.terminate()
            for child in ending:
                try:
                    async with asyncio.timeout(END_S):
                        await child.process.wait()
                except TimeoutError:
                    child.process.kill()
