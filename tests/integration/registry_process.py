"""A registry in another process, as in every process of a cluster. It receives its instructions as lines of JSON.

    {"writer": name, "changes": [[id, version, filter], …]}   →  "ok", or the code of the error
    {"writer": name, "first": id}                             →  each id once it is acknowledged, until an error

The second form adds one subscription after the other until the writer is fenced or killed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from broker_process import clean_environment

from tidegate.cluster.registry import Registry, open_registry
from tidegate.errors import TidegateError
from tidegate.layers.frames import Change

EXIT_S = 30
FLOOD_FILTER = "flood"


class RegistryProcess:
    """A context manager that runs the process, and ends it by its process id in any case."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_environment(),
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def begin_change(self, writer: str, changes: Sequence[tuple[int, int, str | None]]) -> None:
        self._tell({"writer": writer, "changes": changes})

    def begin_flood(self, writer: str, first: int) -> None:
        self._tell({"writer": writer, "first": first})

    def answer(self) -> str:
        """Returns the next answer, or the empty string when the process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def change(self, writer: str, changes: Sequence[tuple[int, int, str | None]]) -> str:
        self.begin_change(writer, changes)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(EXIT_S)

    def _tell(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)


async def serve(address: str) -> None:
    registry = open_registry(address)
    await registry.open()
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        try:
            await obey(registry, order)
        except TidegateError as error:
            print(error.code, flush=True)
    await registry.close()


async def obey(registry: Registry, order: dict[str, Any]) -> None:
    writer = order["writer"]
    if "changes" in order:
        changes = [Change(id_, version, text.encode() if text else None) for id_, version, text in order["changes"]]
        await registry.change(writer, changes)
        print("ok", flush=True)
        return
    subscription = order["first"]
    while True:
        await registry.change(writer, [Change(subscription, 1, FLOOD_FILTER.encode())])
        print(subscription, flush=True)
        subscription += 1


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
