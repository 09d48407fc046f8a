"""A broker in a cluster: its Connection Points are in this process, the other layers in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec

from tidegate.cluster.cluster_layers import ClusterLayers
from tidegate.cluster.cluster_link import ClusterLink
from tidegate.hosts.embedded_host import BrokerHost
from tidegate.hosts.load import LOAD_S, Delays, Rates, delay_counts, delay_summary, load_of
from tidegate.layers.connection_point import Bounds
from tidegate.layers.frames import AskLoads, LayerFrame, Load, Loads, Outputs, Submit, SubmitAck
from tidegate.layers.session_events import Output
from tidegate.layers.subscription_table import connection_point_number


class ClusterHost(BrokerHost):
    """Sends frames that are not for a slice of this process through the channels."""

    def __init__(self, numbers: tuple[int, int], link: ClusterLink, *arguments: Any) -> None:
        super().__init__(numbers, "", *arguments)
        self.layers = ClusterLayers(link.directory)
        self._link = link
        self._next_report_s = 0.0
        self._loads: dict[str, Load] = {}
        self._loads_before: dict[str, Load] = {}
        self._delays = Delays()
        self._submitted_s: dict[tuple[str, int], float] = {}

    def status(self) -> dict[str, Any]:
        """Returns the configuration and its epoch, the rates of all slices of the cluster by their last two reports,
        and the delays."""
        slices = {
            name: msgspec.structs.asdict(rates) | {"subscriptions": load.subscriptions}
            for name, load in sorted(self._loads.items())
            if (before := self._loads_before.get(name)) and (rates := Rates.between(before, load))
        }
        delays_ms = delay_summary(delay_counts(self._loads_before, self._loads))
        return self._link.status() | {"slices": slices, "delays_ms": delays_ms}

    def tick(self) -> None:
        """Runs the periodic work. Every LOAD_S it also reports this broker's load to the coordinator, and asks for the
        load of the other slices."""
        super().tick()
        if self._clock() >= self._next_report_s:
            self._next_report_s = self._clock() + LOAD_S
            self._link.send_to_leader(load_of(self.connection_point, self._delays, self.address))
            self._link.send_to_leader(AskLoads())

    def take_loads(self, loads: dict[str, Load]) -> None:
        """Takes the last reports of all slices. It keeps each slice's previous report until a newer one arrives: rates
        need two different reports."""
        changed = {name: load for name, load in self._loads.items() if loads.get(name) != load}
        self._loads_before = {name: self._loads_before.get(name, load) for name, load in self._loads.items()} | changed
        self._loads = loads

    def carry(self, outputs: Sequence[Output], source: str = "") -> None:
        for _address, frame in outputs:
            if isinstance(frame, SubmitAck):
                began_s = self._submitted_s.pop((frame.publisher, frame.last), None)
                if began_s is not None:
                    self._delays.add(self._clock() - began_s)
        super().carry(outputs, source)

    def _hand_over(self, source: str, address: str, frame: LayerFrame) -> None:
        if isinstance(frame, Submit):
            # A batch that is sent again after a crash keeps the time of its first attempt.
            self._submitted_s.setdefault((frame.batch.publisher, frame.batch.last), self._clock())
        self._link.send(source, address, frame)


class BrokerLink:
    """Joins a broker to the cluster; use it in `async with`. It calls `on_end` when the broker must end."""

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
        for _address, frame in outputs:
            if isinstance(frame, Loads):
                self._host.take_loads(frame.loads)
                return
        self._host.carry(outputs, source)

    def _end(self, error: Exception | None) -> None:
        if self.on_end is not None:
            self.on_end(error)
