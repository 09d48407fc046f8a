"""Observer: asks the coordinator for the load of all slices. It is not a slice, and may connect and leave at any time.

What may go wrong here: there is no coordinator, or a dead one whose session has not expired yet. Another may take over
meanwhile, so the observer asks again. If none answers within ANSWER_S, it raises Unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tidegate.cluster.channels import Channels
from tidegate.cluster.directory import Directory, Leader
from tidegate.errors import Unavailable
from tidegate.layers.frames import AskLoads, LayerFrame, Load, Loads

OBSERVER: Final = "observer-"
# Longer than it takes until a dead coordinator is replaced.
ANSWER_S: Final = 10.0
ASK_EVERY_S: Final = 1.0


class Observer:
    """Use it in `async with`."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._channels = Channels(self._on_frame, lambda _names: None)
        self._name = f"{OBSERVER}{secrets.token_hex(4)}"
        self._answer: asyncio.Future[dict[str, Load]] | None = None
        self._files = contextlib.ExitStack()
        self._endpoint = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channels.close()
        self._files.close()

    async def loads(self) -> dict[str, Load]:
        """Returns the last report of every slice and broker."""
        self._answer = asyncio.get_running_loop().create_future()
        deadline_s = asyncio.get_running_loop().time() + ANSWER_S
        while asyncio.get_running_loop().time() < deadline_s:
            leader = self._directory.leader()
            if leader is not None:
                await self._ask(leader)
            done, _waiting = await asyncio.wait([self._answer], timeout=ASK_EVERY_S)
            if done:
                return self._answer.result()
        raise _no_coordinator(f"{leader.name} at {leader.endpoint} does not answer" if leader else "none is running")

    async def _ask(self, leader: Leader) -> None:
        if not self._endpoint:
            self._endpoint = await self._channels.listen(self._bind(leader))
        self._channels.place({leader.name: leader.endpoint})
        self._channels.send(self._name, leader.name, AskLoads(self._endpoint))

    def _bind(self, leader: Leader) -> str:
        """Returns an address where the coordinator can reach this process: the local end of a route to it."""
        if leader.endpoint.startswith("unix:"):
            directory = self._files.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-"))
            return f"unix:{Path(directory) / 'observer'}"
        host, _colon, port = leader.endpoint.rpartition(":")
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, int(port)))
            return str(way.getsockname()[0])

    def _on_frame(self, source: str, address: str, frame: LayerFrame) -> None:
        if isinstance(frame, Loads) and self._answer is not None and not self._answer.done():
            self._answer.set_result(frame.loads)


def _no_coordinator(why: str) -> Unavailable:
    return Unavailable(
        "U733", f"no coordinator reports the load: {why}", "start one: tidegate slice coordinator --coordinator zk://…"
    )
