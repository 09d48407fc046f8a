"""What every process of a cluster has: its place in the directory, channels to the others, and an orderly end.

`ClusterLink` joins a carrier of slices to the cluster. When the directory no longer knows this process, or a
coordinator has declared one of its slices dead, it must not go on: its slices are fenced everywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from tidegate.cluster.change import change_layers
from tidegate.cluster.directory import Directory, Wanted
from tidegate.cluster.outcome import Outcome
from tidegate.cluster.probe import Probe
from tidegate.errors import Unavailable
from tidegate.layers.channels import Channels
from tidegate.layers.control import Retire, Suspect
from tidegate.layers.embedded_host import status_of
from tidegate.layers.frames import LayerFrame, Outputs
from tidegate.layers.selector import Configuration

log = logging.getLogger(__name__)

# How long whoever asked waits for a change of the layers; the coordinator goes on after that.
CHANGE_S: Final = 60.0


class ClusterLink:
    """`deliver(outputs, source)` takes what comes to the slices here; `on_end(error)` is told when this process must
    end: without an error when it is not needed any more."""

    def __init__(
        self,
        address: str,
        bind: str,
        deliver: Callable[[Outputs, str], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._directory = Directory(address, self._look_soon, self._on_expired)
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
        self._looking: asyncio.Task[None] | None = None

    async def join(self, *layers: str) -> list[str]:
        """Names for slices of these layers. What comes for them waits until `begin`."""
        await self._directory.open()
        endpoint = await self._channels.listen(self._bind)
        self._names = [await self._directory.register(layer, endpoint) for layer in layers]
        self._looking = asyncio.get_running_loop().create_task(self._keep_looking())
        return self._names

    def begin(self) -> None:
        """The slices are there."""
        early, self._early = self._early or [], None
        for source, address, frame in early:
            self._deliver([(address, frame)], source)

    def status(self) -> dict[str, Any]:
        """The last decided configuration, as the directory has it."""
        return status_of(self._configuration)

    async def change_layers(self, counts: Mapping[str, int], probe: Probe | None) -> Outcome:
        """To so many slices of the named layers."""

        def change(wanted: Wanted) -> Wanted:
            return msgspec.structs.replace(wanted, **counts)

        return await change_layers(self._directory, change, probe, CHANGE_S, lambda phase: log.info("%s", phase))

    def send(self, source: str, address: str, frame: LayerFrame) -> None:
        self._channels.send(source, address, frame)

    def tell_leader(self, frame: LayerFrame) -> None:
        """Nothing that would have to wait for one."""
        if self._leader:
            self._channels.send(self._names[0], self._leader, frame)

    async def leave(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self._channels.close()
        await self._directory.close()

    async def _keep_looking(self) -> None:
        try:
            while True:
                self._changed.clear()
                await self._look()
                await self._changed.wait()
        except Exception as error:
            self._on_end(error)

    async def _look(self) -> None:
        members, leader = await self._directory.members(), self._directory.leader()
        state = self._directory.state()
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
        if isinstance(frame, Retire):
            self._on_end(None)
        elif self._early is not None:
            self._early.append((source, address, frame))
        else:
            self._deliver([(address, frame)], source)

    def _on_broken(self, names: set[str]) -> None:
        self._unreported |= names
        self._report()

    def _report(self) -> None:
        """A leader that has gone is not told of itself."""
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
        "U731", f"{', '.join(names)} was taken for dead by the others", "start it again: it gets another name"
    )
