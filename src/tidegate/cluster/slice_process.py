"""One slice as a process: `tidegate slice matcher --coordinator zk://…`. It runs until it is retired or stopped."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import Final

from tidegate.cluster.cluster_link import REGISTRY, ClusterLink
from tidegate.cluster.registry import Registry, RegistryPoint
from tidegate.hosts.carrier import Carrier
from tidegate.hosts.load import LOAD_S, load_of
from tidegate.layers.access_point import AccessPoint
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import LayerFrame
from tidegate.layers.layer import Layer
from tidegate.layers.matcher import Matcher
from tidegate.layers.slice import Slice

log = logging.getLogger(__name__)

CLOSE_S: Final = 2.0


class SliceProcess(Carrier):
    """Runs one slice of a layer in its own process."""

    def __init__(self, layer: Layer, address: str, registry: Registry, bind: str) -> None:
        super().__init__(time.monotonic, self._end)
        self._layer = layer
        self._registry = registry
        self._link = ClusterLink(address, bind, self.carry, self._end)
        self._registry_point = RegistryPoint(REGISTRY, registry, self.carry, self._end)
        self._ending = asyncio.Event()
        self._error: Exception | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        await self._registry.open()
        self.add(self._registry_point)
        (name,) = await self._link.join(self._layer)
        part = _make(self._layer, name)
        self.add(part)
        self._link.begin()
        log.info("%s is serving", name)
        print(name, flush=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                reporting = tasks.create_task(self._report(part))
                await self._ending.wait()
                reporting.cancel()
        finally:
            await self._link.leave()
            await self._registry_point.close(loop.time() + CLOSE_S)
            await self._registry.close()
        if self._error is not None:
            raise self._error

    async def _report(self, part: Slice) -> None:
        while True:
            await asyncio.sleep(LOAD_S)
            self._link.send_to_leader(load_of(part))

    def _hand_over(self, source: str, address: str, frame: LayerFrame) -> None:
        self._link.send(source, address, frame)

    def _end(self, error: Exception | None) -> None:
        self._error = self._error or error
        self._ending.set()


def _make(layer: Layer, name: str) -> Slice:
    match layer:
        case Layer.ACCESS_POINT:
            return AccessPoint(name, None, REGISTRY)
        case Layer.MATCHER:
            return Matcher(name, None, REGISTRY)
        case Layer.EXIT_POINT:
            return ExitPoint(name, None)
