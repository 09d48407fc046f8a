"""A change of the layers as an operator sees it: what is wanted is written down, the coordinator gets there, and this
watches. Whoever interrupts it interrupts only the watching.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from tidegate.cluster.directory import Directory, Wanted
from tidegate.cluster.observer import Observer
from tidegate.cluster.outcome import Outcome
from tidegate.cluster.probe import Probe
from tidegate.errors import Unavailable
from tidegate.layers.autoscaler import Layer
from tidegate.layers.load import LOAD_S, layer_of
from tidegate.layers.reconfiguration import State

LOOK_S: Final = 0.02
# How long a probe looks at the layers before they change, so that there is something to compare with.
CALM_S: Final = 1.0
LAYERS: Final = ("access_points", "matchers", "exit_points")


async def change_layers(
    directory: Directory,
    change: Callable[[Wanted], Wanted],
    probe: Probe | None,
    timeout_s: float,
    show: Callable[[str], None],
) -> Outcome:
    """Shows each phase once, and what is missing; done when the layers are as wanted."""
    async with Observer(directory) as observer:
        before = await observer.loads()
        if probe is not None:
            await asyncio.sleep(CALM_S)
        began_s = time.monotonic()
        state = await _bring_about(directory, change, timeout_s, show)
        seconds = time.monotonic() - began_s
        findings = None
        if probe is not None:
            await asyncio.sleep(CALM_S)
            findings = await probe.finish()
        await asyncio.sleep(2 * LOAD_S)
        after = await observer.loads()
    matchers = {name: load for name, load in after.items() if layer_of(name) is Layer.MATCHER}
    moved = sum(load.moved_in - (before[name].moved_in if name in before else 0) for name, load in matchers.items())
    return Outcome(state, began_s, seconds, moved, sum(load.subscriptions for load in matchers.values()), findings)


async def _bring_about(
    directory: Directory, change: Callable[[Wanted], Wanted], timeout_s: float, show: Callable[[str], None]
) -> State:
    wanted = change(directory.wanted() or Wanted())
    await directory.want(wanted)
    deadline_s = time.monotonic() + timeout_s
    shown = ""
    while True:
        state = directory.state()
        missing = _missing(state, wanted)
        if state is not None and state.transaction is None and not missing:
            return state
        now = f"waits for {missing}" if state is None or state.transaction is None else _phase(state)
        if now != shown:
            shown = now
            show(now)
        if time.monotonic() > deadline_s:
            raise Unavailable(
                "U732",
                f"after {timeout_s:g} s the layers are not as wanted: {now}",
                "start what is missing with tidegate slice; it goes on as soon as it is there",
            )
        await asyncio.sleep(LOOK_S)


def _phase(state: State) -> str:
    assert state.transaction is not None
    return f"epoch {state.transaction.epoch}: {state.phase}"


def _missing(state: State | None, wanted: Wanted) -> str:
    """What the present configuration lacks, or has too much of."""
    if state is None:
        return "a coordinator"
    faults = [f"another slice for {name}" for name in sorted(wanted.replaced & state.current.slices)]
    for layer in LAYERS:
        present, count = len(getattr(state.current, layer)), getattr(wanted, layer)
        if present != count:
            faults.append(f"{count} {layer.replace('_', '-')}, there are {present}")
    return "; ".join(faults)
