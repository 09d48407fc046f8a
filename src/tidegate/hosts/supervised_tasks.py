"""Supervised tasks: the work that frames start. A slice handles a frame and returns; work that must wait for a store or
a directory continues here.

What may go wrong here: a task fails unexpectedly. That is a bug, and requests that wait for the task would never be
answered. So the error goes to `on_failure`, which must end the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class SupervisedTasks:
    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        # Not in a TaskGroup: a frame's handler is synchronous, and no `async with` surrounds its work. A failing group
        # would also cancel the process at once, and it must still end in order.
        task = asyncio.get_running_loop().create_task(self._supervise(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, deadline_s: float) -> None:
        """Waits until the deadline for pending work, then cancels the rest."""
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline_s - asyncio.get_running_loop().time()))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _supervise(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # the supervising place of a process: whatever it is, the process ends with it
            self._on_failure(error)
