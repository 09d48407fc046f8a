"""Autoscaling of a running cluster: measures through the coordinator, asks the policy (`layers.autoscaler`), and writes
the wanted counts to the directory.

What may go wrong here: no coordinator answers for a while (after a pause the policy drops its earlier wishes), or an
operator changes the layers meanwhile (the policy notices and rests).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from tidegate.cluster.directory import Directory
from tidegate.cluster.observer import Observer
from tidegate.errors import Unavailable
from tidegate.hosts.load import measure
from tidegate.layers.autoscaler import Autoscaler, Counts, ServiceLevel
from tidegate.layers.frames import Load
from tidegate.layers.layer import Layer

Show = Callable[[str, dict[str, int] | None], None]


async def autoscale(directory: Directory, level: ServiceLevel, every_s: float, *, is_dry: bool, show: Show) -> None:
    """Measures and decides until it is cancelled. `show` gets every decision, and the reason for no change whenever
    that reason differs from the last one. With `is_dry` nothing is written."""
    autoscaler = Autoscaler(level)
    before: dict[str, Load] = {}
    shown = ""
    async with Observer(directory) as observer:
        while True:
            await asyncio.sleep(every_s)
            try:
                loads = await observer.loads()
            except Unavailable as error:
                show(str(error), None)
                continue
            state = directory.state()
            if state is None or state.transaction is not None or not before:
                before = loads
                continue  # a measurement during a change would mix two configurations
            current: Counts = {layer: len(state.current.of(layer)) for layer in Layer}
            decision = autoscaler.observe(measure(before, loads, time.monotonic()), current)
            before = loads
            if decision.wanted != current:
                counts = {layer.field: count for layer, count in decision.wanted.items()}
                show(decision.why, counts)
                if not is_dry:
                    await directory.want(msgspec.structs.replace(directory.wanted(), **counts))
            elif decision.why.split(";")[0] != shown:
                shown = decision.why.split(";")[0]
                show(decision.why, None)
