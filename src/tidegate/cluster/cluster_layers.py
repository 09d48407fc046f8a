"""Cluster layers: the layers of a cluster, as `Scaling` changes them. An observer reads the loads; the directory does
the rest."""

from __future__ import annotations

from typing import Final

from tidegate.cluster.directory import Directory
from tidegate.cluster.observer import Observer
from tidegate.hosts.load import LOAD_S
from tidegate.layers.frames import Load


class ClusterLayers:
    report_s: Final = 2 * LOAD_S

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.wanted, self.want = directory.wanted, directory.want
        self.state, self.wait_change = directory.state, directory.wait_change

    async def loads(self) -> dict[str, Load]:
        async with Observer(self._directory) as observer:
            return await observer.loads()
