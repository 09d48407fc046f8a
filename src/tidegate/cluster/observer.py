"""Observer: asks the coordinator how much the slices have to do. It is no slice, and may come and go as it likes.

What may go wrong here: there is no coordinator, or it does not answer; then Unavailable.
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

from tidegate.cluster.directory import Directory, Leader
from tidegate.errors import Unavailable
from tidegate.layers.channels import Channels
from tidegate.layers.frames import AskLoads, LayerFrame, Load, Loads

OBSERVER: Final = "observer-"
ANSWER_S: Final = 5.0


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
        """The last report of every slice and broker."""
        leader = self._directory.leader()
        if leader is None:
            raise _no_coordinator("there is none")
        if not self._endpoint:
            self._endpoint = await self._channels.listen(self._bind(leader))
        self._channels.place({leader.name: leader.endpoint})
        self._answer = asyncio.get_running_loop().create_future()
        self._channels.send(self._name, leader.name, AskLoads(self._endpoint))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._answer
        except TimeoutError:
            raise _no_coordinator(f"{leader.name} at {leader.endpoint} does not answer") from None

    def _bind(self, leader: Leader) -> str:
        """Where the coordinator can reach this process: by the way that leads to it."""
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
        "U733", f"no coordinator tells of the load: {why}", "start one: tidegate slice coordinator --coordinator zk://…"
    )
