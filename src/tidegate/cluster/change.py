"""A change of the layers as an operator sees it: what is wanted is written down, the coordinator gets there, and this
watches. Whoever interrupts it interrupts only the watching.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tidegate.cluster.directory import Directory, Wanted
from tidegate.cluster.observer import Observer
from tidegate.cluster.probe import Findings, Probe
from tidegate.errors import Unavailable
from tidegate.layers.autoscaler import Layer
from tidegate.layers.load import LOAD_S, layer_of
from tidegate.layers.reconfiguration import State

LOOK_S: Final = 0.02
# How long a probe looks at the layers before they change, so that there is something to compare with.
CALM_S: Final = 1.0
LAYERS: Final = ("access_points", "matchers", "exit_points")


@dataclass(frozen=True)
class Outcome:
    """`began_s` and `seconds` are of the change itself; `moved` of `subscriptions` changed their Matcher."""

    state: State
    began_s: float
    seconds: float
    moved: int
    subscriptions: int
    findings: Findings | None

    def to_dict(self) -> dict[str, Any]:
        """As `tidegate scale` and `POST /v1/scale` tell it; without a probe, without what only it can know."""
        current = self.state.current
        told: dict[str, Any] = {
            "epoch": current.epoch,
            "slices": sorted(current.slices),
            "seconds": round(self.seconds, 2),
            "moved": self.moved,
            "moved_share": round(self.moved / self.subscriptions, 3) if self.subscriptions else 0.0,
        }
        return told | (_told_by_probe(self.findings, self.began_s) if self.findings is not None else {})


def _told_by_probe(findings: Findings, began_s: float) -> dict[str, Any]:
    times = list(zip(findings.sent_s, findings.delays_s, strict=True))
    before = [delay_s for sent_s, delay_s in times if sent_s + delay_s < began_s]
    during = [delay_s for sent_s, delay_s in times if sent_s + delay_s >= began_s]
    return {
        "probes": len(findings.sent_s),
        "longest_delay_ms": round(max(during, default=0.0) * 1000, 1),
        "longest_delay_before_ms": round(max(before, default=0.0) * 1000, 1),
        "lost": findings.lost,
        "doubled": findings.doubled,
        "disordered": findings.disordered,
    }


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
