"""Embedded cluster: all layers in one process, with a coordinator. They scale by epochs while notifications flow, as in
a cluster of processes. On one core this makes nothing faster; it demonstrates that a change is safe.

What may go wrong here: a subscriber that blocks delays a change until it reads or is disconnected. No slice can die
alone, so there is no registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from tidegate.cluster.planning import Wanted, next_configuration
from tidegate.cluster.scaling import already_changing
from tidegate.hosts.embedded_host import EmbeddedHost, status_of
from tidegate.hosts.load import load_of
from tidegate.layers.access_point import AccessPoint
from tidegate.layers.connection_point import Bounds
from tidegate.layers.control import Reply, Retire
from tidegate.layers.coordinator import Coordinator
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import LayerFrame, Load, Outputs
from tidegate.layers.layer import Layer, layer_of
from tidegate.layers.matcher import Matcher
from tidegate.layers.reconfiguration import State

COORDINATOR: Final = "coordinator"
SLICE_CLASSES: Final[dict[Layer, Callable[[str, None], Any]]] = {
    Layer.ACCESS_POINT: AccessPoint,
    Layer.MATCHER: Matcher,
    Layer.EXIT_POINT: ExitPoint,
}


class EmbeddedCluster(EmbeddedHost):
    """A host whose layers can be scaled. The first slice of each layer always stays."""

    report_s: Final = 0.0

    def __init__(self, bounds: Bounds, clock: Callable[[], float], on_failure: Callable[[Exception], None]) -> None:
        super().__init__(bounds, clock, on_failure)
        self.layers = self
        self._changed = asyncio.Event()
        self._coordinator = Coordinator(COORDINATOR, _Memory(State.first(self.configuration)), registry="")
        self._command(self._coordinator.take_over())
        for edge in (self.connection_point, self.queue_point):
            self._command(self._coordinator.on_joined(edge.name))

    def status(self) -> dict[str, Any]:
        return super().status() | status_of(self._coordinator.state.current)

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {
            layer.replace("-", "_"): _sum([part.statistics() for part in self._slices(layer)]) for layer in Layer
        }

    async def loads(self) -> dict[str, Load]:
        return {part.name: load_of(part) for part in self._slices(Layer.MATCHER)}

    def wanted(self) -> Wanted:
        current = self.state().current
        return Wanted(len(current.access_points), len(current.matchers), len(current.exit_points))

    async def want(self, wanted: Wanted) -> None:
        """Begins a change. The first slices of each layer stay; new ones get the lowest free names."""
        if self.state().transaction is not None:
            raise already_changing()
        for layer, make in SLICE_CLASSES.items():
            for number in range(len(self._slices(layer)), wanted.count(layer)):
                self.add(make(f"{layer}-{number + 1}", None))
        following = next_configuration(self.state().current, self.slices, wanted, is_recovery=False)
        assert following is not None
        self._command(self._coordinator.change(following, is_buffered=wanted.is_buffered))

    def state(self) -> State:
        return self._coordinator.state

    async def wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _slices(self, layer: Layer) -> list[Any]:
        return [part for name, part in self.slices.items() if layer_of(name) is layer]

    def _command(self, outputs: Outputs) -> None:
        self.carry([output for output in outputs if not isinstance(output[1], Retire)], COORDINATOR)
        for name, frame in outputs:
            if isinstance(frame, Retire):
                del self.slices[name]
        self._changed.set()

    def _hand_over(self, source: str, address: str, frame: LayerFrame) -> None:
        if isinstance(frame, Reply):
            self._command(self._coordinator.on_reply(source, frame, self._clock()))
        else:
            super()._hand_over(source, address, frame)


class _Memory:
    """Stores the coordinator's state in memory: no other coordinator exists, and the state may end with the process."""

    def __init__(self, state: State) -> None:
        self._state = state

    def load(self) -> State:
        return self._state

    def replace(self, state: State) -> bool:
        self._state = state
        return True


def _sum(parts: list[Any]) -> Any:
    first = parts[0]
    return type(first)(*(sum(getattr(part, each.name) for part in parts) for each in fields(first)))
