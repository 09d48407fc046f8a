"""Cluster link: gives a process its place in the directory, channels to the other processes, and an orderly end.

`ClusterLink` joins a carrier of slices to the cluster. If the process's session with the directory has expired, or a
coordinator has declared one of its slices dead, the process must end: all others ignore its slices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from tidegate.cluster.channels import Channels
from tidegate.cluster.directory import Directory
from tidegate.errors import ForeignFrame, Unavailable
from tidegate.hosts.embedded_host import status_of
from tidegate.hosts.supervised_tasks import SupervisedTasks
from tidegate.layers.control import Retire, Suspect
from tidegate.layers.frames import LayerFrame, Outputs
from tidegate.layers.selector import Configuration

log = logging.getLogger(__name__)

# The registry's name in every process of a cluster; frames to it and from it never leave the process.
REGISTRY: Final = "registry"


class ClusterLink:
    """`deliver(outputs, source)` takes the frames for the slices of this process. `on_end(error)` is called when the
    process must end; the error is None if its slices were retired."""

    def __init__(
        self,
        address: str,
        bind: str,
        deliver: Callable[[Outputs, str], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self.directory = Directory(address, self._look_soon, self._on_expired)
        self._channels = Channels(self._on_frame, self._on_broken)
        self._bind = bind
        self._deliver = deliver
        self._on_end = on_end
        self._names: list[str] = []
        self._leader = ""
        self._configuration = Configuration(0, (), (), ())
        self._unreported: set[str] = set()
        self._early: list[tuple[str, str, LayerFrame]] | None = []
        self._changed = asyncio.Event()
        self._tasks = SupervisedTasks(on_end)

    async def join(self, *layers: str) -> list[str]:
        """Registers one slice for each of these layers and returns their names. Frames for them wait until `begin`."""
        await self.directory.open()
        endpoint = await self._channels.listen(self._bind)
        self._names = [await self.directory.register(layer, endpoint) for layer in layers]
        self._tasks.start(self._keep_looking)
        return self._names

    def begin(self) -> None:
        """Delivers the frames that came early, now that the slices exist. Call it once."""
        early, self._early = self._early or [], None
        for source, address, frame in early:
            try:
                self._take(source, address, frame)
            except ForeignFrame as error:
                log.warning("ignoring an invalid frame that came early: %s", error)

    def status(self) -> dict[str, Any]:
        """Returns the last decided configuration and its epoch, as the directory has them."""
        return status_of(self._configuration)

    def send(self, source: str, address: str, frame: LayerFrame) -> None:
        self._channels.send(source, address, frame)

    def send_to_leader(self, frame: LayerFrame) -> None:
        """Sends a frame to the leading coordinator, or drops it if none is known: a report must not wait for one."""
        if self._leader:
            self._channels.send(self._names[0], self._leader, frame)

    async def leave(self) -> None:
        await self._tasks.close(deadline_s=0.0)
        await self._channels.close()
        await self.directory.close()

    async def _keep_looking(self) -> None:
        while True:
            self._changed.clear()
            await self._look()
            await self._changed.wait()

    async def _look(self) -> None:
        members, leader = await self.directory.members(), self.directory.leader()
        state = self.directory.state()
        if state is not None and not state.dead.isdisjoint(self._names):
            self._on_end(_declared_dead(self._names))
            return
        if state is not None:
            self._configuration = state.current
        self._leader = leader.name if leader is not None else ""
        if leader is not None:
            members[leader.name] = leader.endpoint
        self._channels.place(members)
        self._report()

    def _on_frame(self, source: str, address: str, frame: LayerFrame) -> None:
        if self._early is None:
            self._take(source, address, frame)
        else:
            # Others know a name as soon as it is in the directory, which may be before this process knows it.
            self._early.append((source, address, frame))

    def _take(self, source: str, address: str, frame: LayerFrame) -> None:
        if address not in self._names or source in self._names or source == REGISTRY:
            raise ForeignFrame(f"unexpected {type(frame).__name__} from {source!r} to {address!r}")
        if isinstance(frame, Retire):
            self._on_end(None)
        else:
            self._deliver([(address, frame)], source)

    def _on_broken(self, names: set[str]) -> None:
        self._unreported |= names
        self._report()

    def _report(self) -> None:
        """Reports unreachable slices to the leading coordinator, once one is known. It never reports the leader to
        itself."""
        self._unreported.discard(self._leader)
        if self._unreported and self._leader and self._names:
            names, self._unreported = frozenset(self._unreported), set()
            self._channels.send(self._names[0], self._leader, Suspect(names))

    def _look_soon(self) -> None:
        self._changed.set()

    def _on_expired(self) -> None:
        self._on_end(_declared_dead(self._names))


def _declared_dead(names: list[str]) -> Unavailable:
    return Unavailable(
        "U731", f"{', '.join(names)} was declared dead by the cluster", "start it again: it gets a new name"
    )
