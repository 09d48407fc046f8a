"""Autoscaling, live: measures through the coordinator, asks the policy, and writes down what it wants.

What may go wrong here: nobody answers for a while (the policy begins anew after a pause), or an operator changes the
layers meanwhile (the policy takes note of it, and rests).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from tidegate.cluster.directory import Directory, Wanted
from tidegate.cluster.observer import Observer
from tidegate.errors import Unavailable
from tidegate.layers.autoscaler import Autoscaler, Counts, Layer, ServiceLevel
from tidegate.layers.frames import Load
from tidegate.layers.load import measure

Show = Callable[[str, dict[str, int] | None], None]


async def autoscale(directory: Directory, level: ServiceLevel, every_s: float, *, is_dry: bool, show: Show) -> None:
    """Until it is cancelled. `show` is told every decision, and why nothing is decided when that is another reason."""
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
                continue  # half of a change says nothing
            current: Counts = {
                Layer.ACCESS_POINT: len(state.current.access_points),
                Layer.MATCHER: len(state.current.matchers),
                Layer.EXIT_POINT: len(state.current.exit_points),
            }
            decision = autoscaler.observe(measure(before, loads, time.monotonic()), current)
            before = loads
            if decision.wanted != current:
                counts = {f"{layer.replace('-', '_')}s": count for layer, count in decision.wanted.items()}
                show(decision.why, counts)
                if not is_dry:
                    await directory.want(msgspec.structs.replace(directory.wanted() or Wanted(), **counts))
            elif decision.why.split(";")[0] != shown:
                shown = decision.why.split(";")[0]
                show(decision.why, None)
