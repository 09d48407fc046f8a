"""Scaling: a change of the layers, as an operator requests it. `tidegate scale`, `tidegate replace`, `POST /v1/scale`
and the laboratory all make their changes here.

    probe ─► loads before ─► calm ─► change, phase by phase ─► calm ─► findings of the probe ─► loads after

What may go wrong here: slices are missing, or a subscriber that blocks does not read. After `timeout_s` the scaling
gives up with U732. Like an interruption, this stops only the watching; the coordinator continues the change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, Protocol, TypeAlias

from tidegate.cluster.outcome import Outcome
from tidegate.cluster.planning import Wanted
from tidegate.cluster.probe import Probe
from tidegate.errors import Overloaded, Unavailable
from tidegate.layers.frames import Load
from tidegate.layers.layer import Layer, layer_of
from tidegate.layers.reconfiguration import State

log = logging.getLogger(__name__)

# How long a probe watches the layers before a change, for comparison, and after it.
CALM_S: Final = 1.0
TIMEOUT_S: Final = 60.0

OpenProbe: TypeAlias = Callable[[], AbstractAsyncContextManager[Probe | None]]


class Layers(Protocol):
    """The layers of a cluster, or of one process. Reports of load are at most `report_s` old."""

    @property
    def report_s(self) -> float: ...

    async def loads(self) -> dict[str, Load]:
        """Returns the last report of every Matcher, and perhaps of other slices."""

    def wanted(self) -> Wanted: ...

    async def want(self, wanted: Wanted) -> None:
        """Requests a change. It does not wait until the change is made."""

    def state(self) -> State | None:
        """Returns the coordinator's state, or None if there was no coordinator yet."""

    async def wait_change(self) -> None:
        """Waits until the state has changed."""


class Scaling:
    """Changes layers, one change at a time, while a probe watches. `open_probe` may yield None: then no probe watches.
    `show` gets what is missing, each phase that is observed, and the new epoch."""

    def __init__(
        self,
        layers: Layers,
        open_probe: OpenProbe = nullcontext,
        timeout_s: float = TIMEOUT_S,
        show: Callable[[str], None] = log.info,
    ) -> None:
        self._layers = layers
        self._open_probe = open_probe
        self._timeout_s = timeout_s
        self._show = show
        self._is_changing = False
        self._probe: Probe | None = None

    async def change(self, change: Callable[[Wanted], Wanted]) -> Outcome:
        """Changes the layers, and returns when they are as wanted."""
        if self._is_changing:
            raise already_changing()
        self._is_changing = True
        try:
            async with self._open_probe() as self._probe:
                return await self._change(change, self._probe)
        finally:
            self._is_changing, self._probe = False, None

    def status(self) -> dict[str, Any]:
        """Returns the probe's findings so far during a change; empty if no change is in progress."""
        if self._probe is None:
            return {}
        seen = self._probe.findings()
        longest_s = max(seen.delays_s, default=0.0)
        return {
            "scaling": {
                "probes": len(seen.sent_s),
                "longest_delay_ms": round(longest_s * 1000, 1),
                "doubled": seen.doubled,
                "disordered": seen.disordered,
            }
        }

    async def _change(self, change: Callable[[Wanted], Wanted], probe: Probe | None) -> Outcome:
        layers, calm_s = self._layers, CALM_S if probe is not None else 0.0
        before = await layers.loads()
        await asyncio.sleep(calm_s)
        began_s = time.monotonic()
        wanted = change(layers.wanted())
        await layers.want(wanted)
        state = await self._wait_until_made(wanted)
        seconds = time.monotonic() - began_s
        await asyncio.sleep(max(calm_s, layers.report_s))
        findings = await probe.finish() if probe is not None else None
        after = await layers.loads()
        matchers = {name: load for name, load in after.items() if layer_of(name) is Layer.MATCHER}
        moved = sum(load.moved_in - (before[name].moved_in if name in before else 0) for name, load in matchers.items())
        return Outcome(state, began_s, seconds, moved, sum(load.subscriptions for load in matchers.values()), findings)

    async def _wait_until_made(self, wanted: Wanted) -> State:
        shown = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    state = self._layers.state()
                    missing = _missing(state, wanted)
                    if state is not None and state.transaction is None and not missing:
                        self._show(f"epoch {state.current.epoch}: in effect")
                        return state
                    now = f"waiting for {missing}" if state is None or state.transaction is None else _phase(state)
                    if now != shown:
                        shown = now
                        self._show(now)
                    await self._layers.wait_change()
        except TimeoutError:
            raise Unavailable(
                "U732",
                f"the change is not complete after {self._timeout_s:g} s: {shown}",
                "it continues; start missing slices with tidegate slice, and check whether a subscriber with the "
                "policy block is not reading",
            ) from None


def already_changing() -> Overloaded:
    return Overloaded("L660", "the layers are already being changed", "wait until that change is done")


def _phase(state: State) -> str:
    assert state.transaction is not None
    return f"epoch {state.transaction.epoch}: {state.phase}"


def _missing(state: State | None, wanted: Wanted) -> str:
    """Describes how the present configuration differs from the wanted one; empty if it does not."""
    if state is None:
        return "a coordinator"
    faults = [f"a replacement for {name}" for name in sorted(wanted.replaced & state.current.slices)]
    for layer in Layer:
        present, count = len(state.current.of(layer)), wanted.count(layer)
        if present != count:
            faults.append(f"{count} {layer.plural} (now {present})")
    return "; ".join(faults)
