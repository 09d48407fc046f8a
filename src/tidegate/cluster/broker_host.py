"""A broker's place in a cluster: its Connection Points are here, the other layers in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

from tidegate.cluster.cluster_link import ClusterLink
from tidegate.layers.connection_point import Bounds
from tidegate.layers.embedded_host import BrokerHost
from tidegate.layers.frames import LayerFrame, Outputs
from tidegate.layers.subscription_table import connection_point_number


class ClusterHost(BrokerHost):
    """What is not for a session or a slice here goes through the channels."""

    def __init__(self, numbers: tuple[int, int], link: ClusterLink, *arguments: Any) -> None:
        super().__init__(numbers, "", *arguments)
        self._link = link

    def status(self) -> dict[str, Any]:
        return self._link.status()

    def _hand_over(self, source: str, address: str | int, frame: LayerFrame) -> None:
        if isinstance(address, str):
            self._link.send(source, address, frame)
        else:
            super()._hand_over(source, address, frame)


class BrokerLink:
    """For use in `async with`: it has joined the cluster, and leaves it. `on_end` is told when the broker must end."""

    def __init__(self, address: str, bind: str) -> None:
        self.on_end: Callable[[Exception | None], None] | None = None
        self._host: ClusterHost | None = None
        self._link = ClusterLink(address, bind, self._deliver, self._end)
        self._numbers = (0, 0)

    async def __aenter__(self) -> Self:
        one, two = await self._link.join("connection-point", "connection-point")
        self._numbers = (connection_point_number(one), connection_point_number(two))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._link.leave()

    def make_host(
        self, bounds: Bounds, clock: Callable[[], float], on_failure: Callable[[Exception], None]
    ) -> ClusterHost:
        self._host = ClusterHost(self._numbers, self._link, bounds, clock, on_failure)
        asyncio.get_running_loop().call_soon(self._link.begin)
        return self._host

    def _deliver(self, outputs: Outputs, source: str) -> None:
        assert self._host is not None
        self._host.carry(outputs, source)

    def _end(self, error: Exception | None) -> None:
        if self.on_end is not None:
            self.on_end(error)
