"""One slice as a process: `tidegate slice matcher --coordinator zk://…`. It serves until it is retired or stopped."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import Final

from tidegate.cluster.cluster_link import ClusterLink
from tidegate.layers.access_point import AccessPoint
from tidegate.layers.carrier import Carrier
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import LayerFrame
from tidegate.layers.load import LOAD_S, load_of
from tidegate.layers.matcher import Matcher
from tidegate.layers.registry import Registry, RegistryPoint
from tidegate.layers.slice import Slice

log = logging.getLogger(__name__)

REGISTRY: Final = "registry"
CLOSE_S: Final = 2.0


class SliceProcess(Carrier):
    """`kind` is access-point, matcher or exit-point."""

    def __init__(self, kind: str, address: str, registry: Registry, bind: str) -> None:
        super().__init__(time.monotonic, self._end)
        self._kind = kind
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
        (name,) = await self._link.join(self._kind)
        part = _make(self._kind, name)
        self.add(part)
        self._link.begin()
        reporting = loop.create_task(self._report(part))
        log.info("%s serves", name)
        print(name, flush=True)
        try:
            await self._ending.wait()
        finally:
            reporting.cancel()
            await self._link.leave()
            await self._registry_point.close(loop.time() + CLOSE_S)
            await self._registry.close()
        if self._error is not None:
            raise self._error

    async def _report(self, part: Slice) -> None:
        while True:
            await asyncio.sleep(LOAD_S)
            self._link.tell_leader(load_of(part))

    def _hand_over(self, source: str, address: str | int, frame: LayerFrame) -> None:
        assert isinstance(address, str)
        self._link.send(source, address, frame)

    def _end(self, error: Exception | None) -> None:
        self._error = self._error or error
        self._ending.set()


def _make(kind: str, name: str) -> Slice:
    match kind:
        case "access-point":
            return AccessPoint(name, None, REGISTRY)
        case "matcher":
            return Matcher(name, None, REGISTRY)
        case _:
            return ExitPoint(name, None)
