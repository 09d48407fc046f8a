"""Queue feeder: carries what the queue point has for a logical queue into it, in order, as fast as the store takes it.

One task a queue that has something to take. While the store is busy with one batch the next ones gather, and go
together. A queue that is full, and a store that fails, are tried again until it works: whoever published it waits for
the acknowledgement meanwhile, and what gathers here is bounded by the publishers' windows.

Brokers of a cluster that share a store all feed its queues, each with everything from where its binding came into
force, and the store keeps each notification once. So the first to put one has put those before it, and a queue has them
in order, but for one moment: a broker that joins could be ahead of what the others have yet to put since before its
binding. So it *follows* first: it waits until another has put what it has, and feeds by itself when nobody does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tidegate.errors import NoSuchQueue, Overloaded, TidegateError
from tidegate.layers.frames import Fill, Filled, Outputs
from tidegate.layers.slice import Slice
from tidegate.messages import BATCH_MESSAGES_MAX, NewMessage
from tidegate.queues import LogicalQueues

log = logging.getLogger(__name__)

RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 2.0
FOLLOW_S: Final = 5.0
FOLLOW_LOOK_S: Final = 0.01
# When nobody has put something for so long, nobody else feeds the queue.
FOLLOW_PATIENCE_S: Final = 1.0


@dataclass
class _Line:
    """What waits for one queue; a task works on it while there is something."""

    waiting: list[tuple[str, Fill]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class QueueFeeder(Slice):
    """`carry` takes the answers to the queue point: (outputs, source). `on_failure` is told of a mistake of ours, after
    which the publishers of what it held would wait for ever."""

    def __init__(
        self,
        name: str,
        queues: LogicalQueues,
        carry: Callable[[Outputs, str], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__(name)
        self._queues = queues
        self._carry = carry
        self._on_failure = on_failure
        self._lines: dict[str, _Line] = {}
        # Queues that others feed, and until when this one follows them: from the first notification on.
        self._followed_until_s: dict[str, float | None] = {}

    def follow(self, queue: str) -> None:
        """Others have fed it before."""
        self._followed_until_s[queue] = None

    def on_fill(self, source: str, frame: Fill, now_s: float) -> Outputs:
        line = self._lines.get(frame.queue)
        if line is None:
            line = self._lines[frame.queue] = _Line()
        line.waiting.append((source, frame))
        if line.task is None:
            line.task = asyncio.get_running_loop().create_task(self._supervise(frame.queue, line))
        return []

    async def close(self, deadline_s: float) -> None:
        """Waits for what is under way; what a full queue does not take by then was never acknowledged."""
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline_s - asyncio.get_running_loop().time()))
        for task in tasks:
            task.cancel()

    async def _supervise(self, queue: str, line: _Line) -> None:
        try:
            await self._work(queue, line)
        except Exception as error:
            self._on_failure(error)

    async def _work(self, queue: str, line: _Line) -> None:
        while line.waiting:
            taken = self._take(line)
            messages = [message for _source, fill in taken for message in fill.messages]
            await self._enqueue(queue, messages)
            for source, fill in taken:
                self._carry([(source, Filled(fill.ticket))], self.name)
        del self._lines[queue]

    def _take(self, line: _Line) -> list[tuple[str, Fill]]:
        """As many as fit a batch, at least one."""
        count = size = 0
        for _source, fill in line.waiting:
            size += len(fill.messages)
            if count and size > BATCH_MESSAGES_MAX:
                break
            count += 1
        taken, line.waiting = line.waiting[:count], line.waiting[count:]
        return taken

    async def _enqueue(self, queue: str, messages: list[NewMessage]) -> None:
        wait_s, portion = RETRY_FIRST_S, len(messages)
        while messages:
            try:
                if queue in self._followed_until_s and await self._is_put_by_others(queue, messages):
                    return
                settings = self._queues.definition(queue).settings
                # As many as an empty queue takes, wherever they go in it: more would wait for ever.
                portion = min(portion, max(1, settings.messages_max // settings.physical_queues))
                make_room = settings.policy == "drop-oldest"
                await self._queues.enqueue(queue, messages[:portion], make_room=make_room)
                messages, wait_s, portion = messages[portion:], RETRY_FIRST_S, 2 * portion
                continue
            except NoSuchQueue:
                return  # dropped meanwhile, with everything in it
            except TidegateError as error:
                is_first = wait_s == RETRY_FIRST_S
                log.log(
                    logging.WARNING if is_first else logging.DEBUG,
                    "queue %s is behind, publishers wait: %s",
                    queue,
                    error,
                )
                if not isinstance(error, Overloaded) and error.status < 500:
                    raise
                portion = max(1, portion // 2)  # which may have more bytes than an empty queue takes
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    async def _is_put_by_others(self, queue: str, messages: list[NewMessage]) -> bool:
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        until_s = self._followed_until_s[queue]
        if until_s is None:
            until_s = self._followed_until_s[queue] = began_s + FOLLOW_S
        while now_s() < min(until_s, began_s + FOLLOW_PATIENCE_S):
            if await self._queues.has(queue, messages):
                return True
            await asyncio.sleep(FOLLOW_LOOK_S)
        self._followed_until_s.pop(queue, None)
        return False
