"""Confirmations of changes: each waits until its change has the durability that the operator has configured.

With `os`, a change is confirmed once the store has it: it survives a crash of the broker. With `fsync`, a change is
confirmed once the disk has it: it survives a power cut. Changes then share syncs: all changes that are made during one
sync wait together for the next. A sync runs in a thread of its own, so queries and other changes continue meanwhile.

A change with an empty delta also waits while other changes are not synced, because it may repeat one of them.

What may go wrong: a sync fails (K132); its changes are in the graph but may not survive a power cut. Too many changes
wait for a sync (L652).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, TypeAlias

from tidegate.errors import Overloaded, TidegateError

Durability = Literal["fsync", "os"]
Confirm: TypeAlias = Callable[[TidegateError | None], None]
RETRY_AFTER_S: Final = 0.5


class Confirmations:
    """Calls back the clients of changes, in batches, once `sync` has returned.

    Use it on the thread of an event loop. It calls `sync` in another thread, one call at a time. Without a `sync`
    function it confirms every change immediately.
    """

    def __init__(self, sync: Callable[[], None] | None, waiting_max: int) -> None:
        self._sync = sync
        self._waiting_max = waiting_max
        self._waiting: list[Confirm] = []
        self._syncing: list[Confirm] = []
        self._running: asyncio.Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.syncs = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._syncing)

    def check_room(self) -> None:
        """Raises Overloaded when the maximum number of changes is waiting already."""
        if len(self) >= self._waiting_max:
            raise Overloaded(
                "L652",
                f"{len(self)} changes are already waiting for the disk",
                "retry in a moment, or use a faster disk",
                retry_after_s=RETRY_AFTER_S,
            )

    def confirm(self, confirm: Confirm, is_changed: bool = True) -> None:
        """Calls `confirm` once all changes made so far are durable, with the error if the sync failed."""
        if self._sync is None or (not is_changed and not len(self)):
            confirm(None)
            return
        self._waiting.append(confirm)
        self._start()

    async def stop(self) -> None:
        """Waits until all pending changes are confirmed, then ends the thread."""
        while self._running is not None:
            await asyncio.wait([self._running])
            await asyncio.sleep(0)  # lets `_on_synced` run, which may start the next sync
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _start(self) -> None:
        if self._running is not None or not self._waiting:
            return
        assert self._sync is not None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tidegate-knowledge-sync")
        self._syncing, self._waiting = self._waiting, []
        self._running = asyncio.get_running_loop().run_in_executor(self._thread, self._sync)
        self._running.add_done_callback(self._on_synced)

    def _on_synced(self, running: asyncio.Future[None]) -> None:
        confirmed, self._syncing, self._running = self._syncing, [], None
        self.syncs += 1
        error = running.exception()
        # Start the next sync first, so that it runs during these callbacks.
        self._start()
        for confirm in confirmed:
            confirm(error if isinstance(error, TidegateError) or error is None else _failed(error))


def _failed(error: BaseException) -> TidegateError:
    return TidegateError("K118", f"internal error in the broker: {error}", "see its log, and report it")
