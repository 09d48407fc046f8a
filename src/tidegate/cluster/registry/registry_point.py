"""Registry point: the registry as a slice, at one address in every process.

It takes Change from Access Points, ReadShare from Matchers and Fence from the coordinator, and replies when the store
has completed them. While one write is pending, new changes gather. They are then written together, one writer at a time
and in order. What Connection Points have in flight bounds their number. Reads and fences do not wait for writes: none
of their promises depends on changes that this process has not acknowledged yet.

What may go wrong here: the store fails. Every call is then retried at growing intervals until it works, and no reply is
sent meanwhile. A writer that was declared dead gets no reply at all: it has successors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tidegate.cluster.registry.registry import Registry
from tidegate.errors import FencedWriter, Unavailable
from tidegate.hosts.supervised_tasks import SupervisedTasks
from tidegate.layers.control import Buried, Fence, ReadShare, Share, Step
from tidegate.layers.frames import Change, ChangeOk, Outputs
from tidegate.layers.slice import Slice
from tidegate.layers.subscription_table import connection_point_number, is_connection_point

log = logging.getLogger(__name__)

# Redis serves no other command while it stores this many, which takes some milliseconds.
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
    """Guarantees: ChangeOk is sent after, and only after, the change is durable, and for one writer in the order of its
    changes. `carry(outputs, source)` takes the replies. `on_failure` gets unexpected errors, which are bugs: pending
    requests would wait forever, so it must end the process."""

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
        self._waiting: dict[str, list[Change]] = {}
        self._is_writing = False
        self._reads: dict[str, asyncio.Task[None]] = {}
        self._tasks = SupervisedTasks(on_failure)
        self._changes = 0
        # The number of changes that have arrived, and of those that are written or refused.
        self._taken = 0
        self._settled = 0
        self._has_settled = asyncio.Event()
        self._writes = 0
        self._entries_read = 0

    def on_change(self, source: str, frame: Change, now_s: float) -> Outputs:
        self._waiting.setdefault(source, []).append(frame)
        self._taken += 1
        if not self._is_writing:
            self._is_writing = True
            self._tasks.start(self._write)
        return []

    def on_fence(self, source: str, frame: Fence, now_s: float) -> Outputs:
        """Fences dead writers, and removes the subscriptions of dead Connection Points. An Access Point normally
        requests that removal (Buried), but all Access Points may have died too."""
        self._fenced |= frame.dead
        self._tasks.start(partial(self._fence, frame))
        for name in filter(is_connection_point, frame.dead):
            self._tasks.start(partial(self._bury, connection_point_number(name), self._taken))
        return []

    def on_read_share(self, source: str, frame: ReadShare, now_s: float) -> Outputs:
        """Starts to read a share. A Matcher asks again only in a later transaction, so its earlier read is
        cancelled."""
        if source in self._reads:
            self._reads[source].cancel()
        self._reads[source] = self._tasks.start(partial(self._read, source, frame))
        return []

    def on_buried(self, source: str, frame: Buried, now_s: float) -> Outputs:
        self._tasks.start(partial(self._bury, connection_point_number(frame.connection_point), self._taken))
        return []

    def statistics(self) -> RegistryPointStatistics:
        waiting = sum(map(len, self._waiting.values()))
        return RegistryPointStatistics(self._changes, self._writes, waiting, self._entries_read)

    async def close(self, deadline_s: float) -> None:
        """Waits until the deadline for pending work. Changes that the store has not taken by then were never
        acknowledged."""
        await self._tasks.close(deadline_s)

    async def _write(self) -> None:
        while self._waiting:
            writer, changes = self._take()
            try:
                await self._retry(partial(self._registry.change, writer, changes))
            except FencedWriter as error:
                log.warning("ignoring changes: %s", error)
                self._fenced.add(writer)
                self._settle(len(changes) + len(self._waiting.pop(writer, [])))
                continue
            self._changes += len(changes)
            self._settle(len(changes))
            self._writes += 1
            self._carry([(writer, ChangeOk(each.subscription, each.version)) for each in changes], self.name)
        self._is_writing = False

    def _take(self) -> tuple[str, list[Change]]:
        """Takes changes of the writer that has waited longest. Changes beyond the size of one write wait behind the
        other writers."""
        writer = next(iter(self._waiting))
        waiting = self._waiting.pop(writer)
        if len(waiting) > CHANGES_AT_ONCE:
            self._waiting[writer] = waiting[CHANGES_AT_ONCE:]
        return writer, waiting[:CHANGES_AT_ONCE]

    def _settle(self, changes: int) -> None:
        self._settled += changes
        self._has_settled.set()

    async def _fence(self, frame: Fence) -> None:
        await self._retry(partial(self._registry.fence, frame.dead))
        self._carry(self._reply(Step.FENCED, frame.epoch), self.name)

    async def _bury(self, connection_point: int, behind: int) -> None:
        """Removes the subscriptions of a dead Connection Point, once the first `behind` changes are settled: an earlier
        change would otherwise bring some back."""
        while self._settled < behind:
            self._has_settled.clear()
            await self._has_settled.wait()
        await self._retry(partial(self._registry.forget, connection_point))

    async def _read(self, matcher: str, frame: ReadShare) -> None:
        await self._retry(partial(self._send_share, matcher, frame))
        self._carry([(matcher, Share(frame.transaction, [], is_last=True))], self.name)

    async def _send_share(self, matcher: str, frame: ReadShare) -> None:
        """Sends a Matcher its share. After a failure it starts again from the beginning; the Matcher ignores the
        entries that it already has."""
        async for entries in self._registry.read_share(frame.transaction, matcher):
            self._entries_read += len(entries)
            self._carry([(matcher, Share(frame.transaction, entries, is_last=False))], self.name)

    async def _retry(self, step: Callable[[], Awaitable[None]]) -> None:
        wait_s = RETRY_FIRST_S
        while True:
            try:
                return await step()
            except FencedWriter:
                raise
            except Unavailable as error:
                level = logging.WARNING if wait_s == RETRY_FIRST_S else logging.DEBUG
                log.log(level, "the registry is unavailable, subscriptions wait: %s", error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)
