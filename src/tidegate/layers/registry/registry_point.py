"""Registry point: the registry as a slice, at one address in every process.

It takes Change from Access Points, ReadShare from Matchers and Fence from the coordinator, and answers when the store
has done it. While one write is under way the changes that come meanwhile gather, and go together, a writer's at a time
and in their order; their number is bounded by what Connection Points have under way. Reads and fences do not wait for
writes: none of their promises depends on what this process has not acknowledged yet.

What may go wrong here: the store fails, and everything is tried again, at growing intervals, until it works; nobody
gets an answer meanwhile. A writer that was declared dead gets none at all: it has successors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tidegate.errors import FencedWriter, Unavailable
from tidegate.layers.control import Buried, Fence, ReadShare, Share, Step
from tidegate.layers.frames import Change, ChangeOk, Outputs
from tidegate.layers.registry.registry import Registry
from tidegate.layers.slice import Slice
from tidegate.layers.subscription_table import connection_point_number, is_connection_point

log = logging.getLogger(__name__)

# A Redis does nothing else while it takes so many: some milliseconds.
CHANGES_AT_ONCE: Final = 1000
RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 2.0


@dataclass(frozen=True)
class RegistryPointStatistics:
    changes: int
    writes: int
    waiting_changes: int
    entries_read: int


class RegistryPoint(Slice):
    """Guarantees: ChangeOk is sent after, and only after, the change is durable; those of one writer in the order of
    its changes. `carry` takes the answers to whoever asked: (outputs, source). `on_failure` is told of a mistake of
    ours, after which those who asked would wait for ever."""

    def __init__(
        self,
        name: str,
        registry: Registry,
        carry: Callable[[Outputs, str], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__(name)
        self._registry = registry
        self._carry = carry
        self._on_failure = on_failure
        self._waiting: dict[str, list[Change]] = {}
        self._is_writing = False
        self._reads: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changes = 0
        # Changes that have come, and those of them that are written or refused.
        self._taken = 0
        self._settled = 0
        self._writes = 0
        self._entries_read = 0

    def on_change(self, source: str, frame: Change, now_s: float) -> Outputs:
        self._waiting.setdefault(source, []).append(frame)
        self._taken += 1
        if not self._is_writing:
            self._is_writing = True
            self._start(self._write)
        return []

    def on_fence(self, source: str, frame: Fence, now_s: float) -> Outputs:
        """Dead Connection Points are forgotten here too: all Access Points that were to tell may have died."""
        self._fenced |= frame.dead
        self._start(partial(self._fence, frame))
        for name in filter(is_connection_point, frame.dead):
            self._start(partial(self._bury, connection_point_number(name), self._taken))
        return []

    def on_read_share(self, source: str, frame: ReadShare, now_s: float) -> Outputs:
        """A Matcher asks again only in a later transaction; what it asked for before is of no use any more."""
        if source in self._reads:
            self._reads[source].cancel()
        self._reads[source] = self._start(partial(self._read, source, frame))
        return []

    def on_buried(self, source: str, frame: Buried, now_s: float) -> Outputs:
        self._start(partial(self._bury, connection_point_number(frame.connection_point), self._taken))
        return []

    def statistics(self) -> RegistryPointStatistics:
        waiting = sum(map(len, self._waiting.values()))
        return RegistryPointStatistics(self._changes, self._writes, waiting, self._entries_read)

    async def close(self, deadline_s: float) -> None:
        """Waits for what is under way; what the store does not take by then was never acknowledged."""
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline_s - asyncio.get_running_loop().time()))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _start(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._supervise(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _supervise(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            self._on_failure(error)

    async def _write(self) -> None:
        while self._waiting:
            writer, changes = self._take()
            try:
                await self._insist(partial(self._registry.change, writer, changes))
            except FencedWriter as error:
                log.warning("changes are passed over: %s", error)
                self._fenced.add(writer)
                self._settled += len(changes) + len(self._waiting.pop(writer, []))
                continue
            self._changes += len(changes)
            self._settled += len(changes)
            self._writes += 1
            self._carry([(writer, ChangeOk(each.subscription, each.version)) for each in changes], self.name)
        self._is_writing = False

    def _take(self) -> tuple[str, list[Change]]:
        """Of the writer that waits longest; what is too much for one write waits behind the other writers."""
        writer = next(iter(self._waiting))
        waiting = self._waiting.pop(writer)
        if len(waiting) > CHANGES_AT_ONCE:
            self._waiting[writer] = waiting[CHANGES_AT_ONCE:]
        return writer, waiting[:CHANGES_AT_ONCE]

    async def _fence(self, frame: Fence) -> None:
        await self._insist(partial(self._registry.fence, frame.dead))
        self._carry(self._reply(Step.FENCED, frame.epoch), self.name)

    async def _bury(self, connection_point: int, behind: int) -> None:
        """Behind the changes that came before it."""
        while self._settled < behind:
            await asyncio.sleep(RETRY_FIRST_S)
        await self._insist(partial(self._registry.forget, connection_point))

    async def _read(self, matcher: str, frame: ReadShare) -> None:
        await self._insist(partial(self._send_share, matcher, frame))
        self._carry([(matcher, Share(frame.transaction, [], is_last=True))], self.name)

    async def _send_share(self, matcher: str, frame: ReadShare) -> None:
        """After a failure from the beginning: what the Matcher has already, it passes over."""
        async for entries in self._registry.read_share(frame.transaction, matcher):
            self._entries_read += len(entries)
            self._carry([(matcher, Share(frame.transaction, entries, is_last=False))], self.name)

    async def _insist(self, step: Callable[[], Awaitable[None]]) -> None:
        wait_s = RETRY_FIRST_S
        while True:
            try:
                return await step()
            except FencedWriter:
                raise
            except Unavailable as error:
                level = logging.WARNING if wait_s == RETRY_FIRST_S else logging.DEBUG
                log.log(level, "the registry is behind, subscriptions wait: %s", error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)
