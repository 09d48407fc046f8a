"""Frames that reach a process of a cluster before it knows its own names wait, and are not treated as foreign."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.cluster.cluster_link import ClusterLink
from tidegate.errors import ForeignFrame
from tidegate.layers.frames import Outputs, SubmitAck


def test_a_frame_for_a_name_that_is_being_registered_waits_until_the_slices_are_there() -> None:
    delivered: list[tuple[str, str]] = []

    def deliver(outputs: Outputs, source: str) -> None:
        delivered.extend((source, str(address)) for address, _frame in outputs)

    async def scenario() -> None:
        link = ClusterLink("zk://127.0.0.1:2181", "127.0.0.1:0", deliver, lambda _error: None)
        for address in ("connection-point-1", "connection-point-2", "connection-point-9"):
            link._on_frame("access-point-1", address, SubmitAck("p", 1, []))
        link._names = ["connection-point-1", "connection-point-2"]
        assert delivered == []
        link.begin()
        assert delivered == [("access-point-1", "connection-point-1"), ("access-point-1", "connection-point-2")]
        with pytest.raises(ForeignFrame):
            link._on_frame("access-point-1", "connection-point-9", SubmitAck("p", 1, []))

    asyncio.run(scenario())
