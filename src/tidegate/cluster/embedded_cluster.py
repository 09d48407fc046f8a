"""All layers in one process, and a coordinator for them: they can be scaled as those of a cluster are, by epochs, while
everything flows. On one core that makes nothing faster; it shows what a change does, and that nobody need fear it.

What may go wrong here: a subscriber that blocks holds up a change until it reads or is disconnected. No slice dies
alone, so there is no registry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from tidegate.cluster.outcome import Outcome
from tidegate.cluster.probe import Probe
from tidegate.cluster.probed_host import ProbedHost
from tidegate.errors import Unavailable
from tidegate.layers.access_point import AccessPoint
from tidegate.layers.connection_point import Bounds
from tidegate.layers.control import Reply, Retire
from tidegate.layers.coordinator import Coordinator
from tidegate.layers.embedded_host import EmbeddedHost, status_of
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import LayerFrame, Outputs
from tidegate.layers.matcher import Matcher
from tidegate.layers.reconfiguration import State
from tidegate.layers.selector import Configuration

COORDINATOR: Final = "coordinator"
CALM_S: Final = 1.0
LOOK_S: Final = 0.01
TIMEOUT_S: Final = 60.0
MAKES: Final[dict[str, Callable[[str, None], Any]]] = {
    "access-point": AccessPoint,
    "matcher": Matcher,
    "exit-point": ExitPoint,
}


class EmbeddedCluster(ProbedHost, EmbeddedHost):
    """The first slice of each layer is always there."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float], on_failure: Callable[[Exception], None]) -> None:
        EmbeddedHost.__init__(self, bounds, clock, on_failure)
        self._coordinator = Coordinator(COORDINATOR, _Memory(State.first(self.configuration)), registry="")
        self._command(self._coordinator.take_over())
        for edge in (self.connection_point, self.queue_point):
            self._command(self._coordinator.on_joined(edge.name))

    def status(self) -> dict[str, Any]:
        return super().status() | status_of(self._coordinator.state.current)

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {
            kind.replace("-", "_"): _sum([part.statistics() for part in self._slices(kind)]) for kind in MAKES
        }

    async def _change_layers(self, counts: Mapping[str, int], probe: Probe | None) -> Outcome:
        if probe is not None:
            await asyncio.sleep(CALM_S)
        began_s = time.monotonic()
        moved_before = self.statistics()["matcher"].moved_in
        self._command(self._coordinator.change(self._wanted(counts)))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while self._coordinator.state.transaction is not None:
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            phase = self._coordinator.state.phase
            raise Unavailable(
                "U732",
                f"after {TIMEOUT_S:g} s the layers are not as wanted: {phase}",
                "it goes on; does a subscriber block?",
            ) from None
        seconds = time.monotonic() - began_s
        findings = None
        if probe is not None:
            await asyncio.sleep(CALM_S)
            findings = await probe.finish()
        matchers = self.statistics()["matcher"]
        moved = max(0, matchers.moved_in - moved_before)
        return Outcome(self._coordinator.state, began_s, seconds, moved, matchers.subscriptions, findings)

    def _wanted(self, counts: Mapping[str, int]) -> Configuration:
        """The first of each layer stay; new ones get the lowest names that are free."""
        current = self._coordinator.state.current
        layers = []
        for kind, make in MAKES.items():
            layer = kind.replace("-", "_") + "s"
            names = getattr(current, layer)[: counts.get(layer)]
            for number in range(len(names), counts.get(layer, 0)):
                name = f"{kind}-{number + 1}"
                self.add(make(name, None))
                names += (name,)
            layers.append(names)
        return Configuration(0, *layers)

    def _slices(self, kind: str) -> list[Any]:
        return [part for name, part in self.slices.items() if name.startswith(kind)]

    def _command(self, outputs: Outputs) -> None:
        self.carry([output for output in outputs if not isinstance(output[1], Retire)], COORDINATOR)
        for name, frame in outputs:
            if isinstance(frame, Retire):
                del self.slices[str(name)]

    def _hand_over(self, source: str, address: str | int, frame: LayerFrame) -> None:
        if isinstance(frame, Reply):
            self._command(self._coordinator.on_reply(source, frame, self._clock()))
        else:
            super()._hand_over(source, address, frame)


class _Memory:
    """Nobody else leads, and nothing outlives the process."""

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
