"""The coordinator as a process: compares live slices with the wanted counts, and has `Coordinator` make the changes.

Several may run; ZooKeeper lets one of them lead, and another takes over when the leader ends. The leader learns of a
death from ZooKeeper when a session expires, or at once from a broken channel, its own or a slice's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Sequence
from typing import Final

from tidegate.cluster.channels import Channels
from tidegate.cluster.cluster_link import REGISTRY
from tidegate.cluster.directory import Directory, Leader
from tidegate.cluster.observer import OBSERVER
from tidegate.cluster.planning import Wanted, has_same_slices, next_configuration
from tidegate.cluster.registry import Registry, RegistryPoint
from tidegate.errors import Unavailable
from tidegate.layers.control import Reply, Suspect
from tidegate.layers.coordinator import Coordinator
from tidegate.layers.frames import AskLoads, LayerFrame, Load, Loads, Outputs
from tidegate.layers.reconfiguration import lost
from tidegate.layers.session_events import Output
from tidegate.layers.subscription_table import is_connection_point

log = logging.getLogger(__name__)

RETRY_S: Final = 0.5


class CoordinatorProcess:
    def __init__(self, address: str, registry: Registry, bind: str) -> None:
        self._directory = Directory(address, self._look_soon, self._fail)
        self._channels = Channels(self._on_frame, self._on_broken)
        self._registry = registry
        self._registry_point = RegistryPoint(REGISTRY, registry, self._carry, self._on_failure)
        self._bind = bind
        self._coordinator: Coordinator | None = None
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._suspects: set[str] = set()
        self._loads: dict[str, Load] = {}
        self._observers: dict[str, str] = {}
        self._error: BaseException | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self._registry.open()
        await self._directory.open()
        endpoint = await self._channels.listen(self._bind)
        leader = Leader(f"coordinator-{os.getpid()}-{secrets.token_hex(3)}", endpoint)
        try:
            await self._wait_for_lead(leader)
            while not self._stopping.is_set():
                self._changed.clear()
                await self._look(leader)
                await self._wait()
        finally:
            await self._channels.close()
            await self._directory.close()
            await self._registry.close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopping.set()
        self._changed.set()

    async def _wait_for_lead(self, leader: Leader) -> None:
        while not self._stopping.is_set():
            self._changed.clear()
            if await self._directory.lead(leader):
                return
            await self._wait()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(RETRY_S):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _look(self, leader: Leader) -> None:
        if self._coordinator is None:
            coordinator = await asyncio.to_thread(Coordinator, leader.name, self._directory, REGISTRY)
            # Read the slices after the state: a slice that the state names and this list lacks is really dead.
            await self._directory.refresh_members()
        else:
            coordinator = self._coordinator
        members = await self._directory.members()
        self._channels.place(members | self._observers)
        self._loads = {name: load for name, load in self._loads.items() if name in members}
        if self._coordinator is None:
            self._coordinator = coordinator
            self._send(coordinator.take_over())
        self._reconcile(coordinator, members, self._directory.wanted())

    def _reconcile(self, coordinator: Coordinator, members: dict[str, str], wanted: Wanted) -> None:
        """Compares the live slices with the coordinator's state and the wanted counts. It declares deaths, welcomes new
        Connection Points, and begins a recovery if slices were lost, or else a change if one is wanted."""
        if coordinator.is_deposed:
            self.stop()
            return
        state = coordinator.state
        involved = frozenset[str]().union(*(each.slices for each in state.live)) | state.connection_points
        dead = {name for name in involved if name not in members or name in self._suspects} - state.dead
        if dead:
            log.warning("declared dead: %s", ", ".join(sorted(dead)))
            self._channels.forget(dead)
            self._send(coordinator.on_death(dead))
        for name in members:
            if is_connection_point(name) and name not in state.connection_points | state.dead:
                self._send(coordinator.on_joined(name))
        living = [name for name in members if name not in coordinator.state.dead | self._suspects]
        if lost(coordinator.state):
            following = next_configuration(coordinator.state.current, living, wanted, is_recovery=True)
            if following is not None:
                self._send(coordinator.recover(following))
        elif coordinator.state.transaction is None:
            following = next_configuration(coordinator.state.current, living, wanted, is_recovery=False)
            if following is not None and not has_same_slices(following, coordinator.state.current):
                self._send(coordinator.change(following, is_buffered=wanted.is_buffered))

    def _send(self, outputs: Outputs) -> None:
        assert self._coordinator is not None
        for address, frame in outputs:
            if address == REGISTRY:
                self._carry(self._registry_point.handle(self._coordinator.name, frame, time.monotonic()), REGISTRY)
            else:
                self._channels.send(self._coordinator.name, address, frame)

    def _carry(self, outputs: Sequence[Output], source: str) -> None:
        """Takes the registry's replies."""
        for _address, frame in outputs:
            if isinstance(frame, Reply):
                self._on_frame(source, "", frame)

    def _on_frame(self, source: str, address: str, frame: LayerFrame) -> None:
        if isinstance(frame, Reply) and self._coordinator is not None:
            self._send(self._coordinator.on_reply(source, frame, time.monotonic()))
            if self._coordinator.state.transaction is None:
                self._look_soon()
        elif isinstance(frame, Suspect):
            self._on_broken(set(frame.names))
        elif isinstance(frame, Load):
            self._loads[source] = frame
        elif isinstance(frame, AskLoads) and self._coordinator is not None:
            if source.startswith(OBSERVER):
                self._observers[source] = frame.endpoint
                self._channels.place(self._channels.endpoints | self._observers)
            self._channels.send(self._coordinator.name, source, Loads(self._loads))

    def _on_broken(self, names: set[str]) -> None:
        """Records slices that cannot be reached. An observer may disconnect at any time, so it is only forgotten."""
        self._observers = {name: endpoint for name, endpoint in self._observers.items() if name not in names}
        self._suspects |= {name for name in names if not name.startswith(OBSERVER)}
        self._look_soon()

    def _look_soon(self) -> None:
        self._changed.set()

    def _fail(self) -> None:
        self._on_failure(Unavailable("U731", "the session with ZooKeeper has expired", "start this coordinator again"))

    def _on_failure(self, error: Exception) -> None:
        self._error = error
        self.stop()
