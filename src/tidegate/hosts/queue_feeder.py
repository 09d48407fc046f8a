"""Queue feeder: stores the queue point's notifications in logical queues, in order, as fast as the store takes them.

Each queue with waiting notifications has one task. While the store is busy with one batch, the next ones gather and are
stored together. A full queue is retried for up to its `block_s`; meanwhile its publishers wait for acknowledgements.
After that, notifications that do not fit are refused or dropped, as the queue's `after_block` says (`queues.pressure`).
A failing store is retried until it works. The publishers' windows bound what gathers here.

Brokers of a cluster that share a store all feed its queues. Each feeds everything from the moment that its binding came
into force, and the store keeps each notification once: what a feed claims to have stored is in the queue's covers. The
first broker to store a notification has stored the earlier ones too, so a queue has them in order. There is one
exception: a broker that joins could be ahead of notifications from before its binding that the others have yet to
store. The newcomer therefore *follows* first: it waits until another broker has stored its notifications, and stores
them itself if no other does. Notifications that the others store later are kept too, only out of order, because the
newcomer claims nothing from before its binding.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from tidegate.errors import NoSuchQueue, Overloaded, TidegateError
from tidegate.hosts.supervised_tasks import SupervisedTasks
from tidegate.layers.frames import Fill, Filled, Outputs, Refused
from tidegate.layers.slice import Slice
from tidegate.messages import BATCH_MESSAGES_MAX
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import QueueSettings
from tidegate.queues.feed import Feed, FeedPart
from tidegate.queues.store import QueueFull

log = logging.getLogger(__name__)

RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 2.0
FOLLOW_S: Final = 5.0
FOLLOW_LOOK_S: Final = 0.01
# If no other broker has stored a notification after this time, no other broker feeds the queue.
FOLLOW_PATIENCE_S: Final = 1.0


# A fill, and the queue point that waits for the answer.
Waiting: TypeAlias = tuple[str, Fill]


class _Filling:
    """A feed that is being stored in one queue. Each step stores as many messages as the queue takes, and decides what
    happens to those that do not fit. `refused` has the `id()` of each refused message object."""

    def __init__(self, queues: LogicalQueues, queue: str, feed: Feed) -> None:
        self.feed = feed
        self.refused: set[int] = set()
        self._queues = queues
        self._queue = queue
        self._pressure = queues.pressure(queue)
        # An overflowing queue rarely has room, and trying a single message is a cheap way to find out.
        self._portion = 1 if self._pressure.is_overflowing else len(feed)
        self._wait_s = RETRY_FIRST_S
        self._is_whole = True

    async def step(self) -> float:
        """Tries to store a portion, and returns how long to wait before the next step."""
        settings = self._queues.definition(self._queue).settings
        # At most as many as one empty physical queue takes, since all of them may go to the same one.
        self._portion = min(self._portion, max(1, settings.messages_max // settings.physical_queues))
        attempted, rest = self.feed.first(self._portion), self.feed.after(self._portion)
        is_late = self._pressure.is_overflowing and settings.after_block == "drop-oldest"
        makes_room = is_late or settings.policy == "drop-oldest"
        try:
            await self._queues.feed(self._queue, attempted, make_room=makes_room)
        except QueueFull as full:
            unstored = self._queues.unstored(self._queue, attempted, full)
            self.feed = unstored.then(rest)
            return self._on_full(full, len(unstored), settings, makes_room=makes_room)
        except TidegateError as error:
            if not isinstance(error, Overloaded) and error.status < 500:
                raise
            level = logging.WARNING if self._wait_s == RETRY_FIRST_S else logging.DEBUG
            log.log(level, "queue %s cannot store notifications now, its publishers wait: %s", self._queue, error)
            self._portion = max(1, self._portion // 2)
            return self._next_wait_s()
        self._pressure.on_stored(time.monotonic())
        # With `drop-oldest` everything fits: success does not show that the queue has caught up, its fill ratio does.
        self._is_whole &= not is_late
        self.feed, self._portion, self._wait_s = rest, 2 * self._portion, RETRY_FIRST_S
        return 0.0

    def finish(self) -> None:
        self._pressure.on_stored(time.monotonic())
        if self._is_whole:
            self._pressure.on_caught_up()

    def _on_full(self, full: QueueFull, unstored: int, settings: QueueSettings, *, makes_room: bool) -> float:
        if unstored != 1:
            self._portion = max(1, unstored // 2)
            return 0.0
        if not self._pressure.on_full(time.monotonic(), settings.block_s):
            left_s = settings.block_s - self._pressure.holding_back_s(time.monotonic())
            return min(self._next_wait_s(), max(RETRY_FIRST_S, left_s))
        if makes_room or settings.after_block != "drop-oldest":
            self._give_up(full, is_refused=settings.after_block != "drop-newest")
        return 0.0

    def _give_up(self, full: QueueFull, *, is_refused: bool) -> None:
        """Refuses or drops all remaining messages for a full physical queue: most of them would not fit either."""
        unfit = self._queues.unstored(self._queue, self.feed, full).ids()
        self.feed = self.feed.only(lambda message: id(message) not in unfit)
        if is_refused:
            self.refused |= unfit
        self._pressure.on_overflow(len(unfit), is_refused=is_refused)
        self._is_whole = False

    def _next_wait_s(self) -> float:
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, RETRY_MAX_S)
        return wait_s


class QueueFeeder(Slice):
    """`carry(outputs, source)` takes the answers to the queue point. `on_failure` gets unexpected errors, which are
    bugs: the publishers of the waiting notifications would wait forever, so it must end the process."""

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
        self._tasks = SupervisedTasks(on_failure)
        # The fills that wait for each queue. A task stores them while there are any.
        self._lines: dict[str, list[Waiting]] = {}
        # Queues that other brokers feed, and until when this one follows them. The time starts with the first
        # notification; before that it is None.
        self._followed_until_s: dict[str, float | None] = {}

    def follow(self, queue: str) -> None:
        """Makes this feeder follow the other brokers that already feed the queue."""
        self._followed_until_s[queue] = None

    def on_fill(self, source: str, frame: Fill, now_s: float) -> Outputs:
        line = self._lines.get(frame.queue)
        if line is not None:
            line.append((source, frame))
        else:
            line = self._lines[frame.queue] = [(source, frame)]
            self._tasks.start(partial(self._work, frame.queue, line))
        return []

    async def close(self, deadline_s: float) -> None:
        """Waits until the deadline for pending fills. Those that a full queue has not taken by then were never
        acknowledged."""
        await self._tasks.close(deadline_s)

    async def _work(self, queue: str, line: list[Waiting]) -> None:
        while line:
            taken = _take(line)
            refused = await self._enqueue(
                queue, Feed(FeedPart(fill.messages, fill.since, fill.filter) for _source, fill in taken)
            )
            answers = [(source, fill, _ranges(queue, fill, refused)) for source, fill in taken]
            _claim_nothing_refused(line, answers)
            for source, fill, ranges in answers:
                self._carry([(source, Filled(fill.ticket, ranges))], self.name)
        del self._lines[queue]

    async def _enqueue(self, queue: str, feed: Feed) -> set[int]:
        """Waits until each message is stored, dropped or refused. Returns the `id()` of each refused message object."""
        try:
            filling = _Filling(self._queues, queue, feed)
            while len(filling.feed):
                if queue in self._followed_until_s and await self._is_put_by_others(queue, filling.feed):
                    break
                wait_s = await filling.step()
                if wait_s:
                    await asyncio.sleep(wait_s)
            filling.finish()
            return filling.refused
        except NoSuchQueue:
            return set()  # the queue was deleted meanwhile, with everything in it

    async def _is_put_by_others(self, queue: str, feed: Feed) -> bool:
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        until_s = self._followed_until_s[queue]
        if until_s is None:
            until_s = self._followed_until_s[queue] = began_s + FOLLOW_S
        while now_s() < min(until_s, began_s + FOLLOW_PATIENCE_S):
            if await self._queues.has(queue, feed):
                return True
            await asyncio.sleep(FOLLOW_LOOK_S)
        self._followed_until_s.pop(queue, None)
        return False


def _take(line: list[Waiting]) -> list[Waiting]:
    """Takes as many fills as fit a batch, but at least one."""
    count = size = 0
    for _source, fill in line:
        size += len(fill.messages)
        if count and size > BATCH_MESSAGES_MAX:
            break
        count += 1
    taken = line[:count]
    del line[:count]
    return taken


def _ranges(queue: str, fill: Fill, refused: set[int]) -> list[Refused]:
    """Returns the ranges of sequences in one batch that the queue has refused."""
    if not refused:
        return []
    ranges: list[Refused] = []
    for sequence in (message.sequence for message in fill.messages if id(message) in refused):
        if ranges and ranges[-1].last == sequence - 1:
            ranges[-1] = Refused(queue, ranges[-1].first, sequence)
        else:
            ranges.append(Refused(queue, sequence, sequence))
    return ranges


def _claim_nothing_refused(waiting: list[Waiting], answers: list[tuple[str, Fill, list[Refused]]]) -> None:
    """Limits the claims of waiting fills to notifications after those that the queue has just refused. A refused
    notification that was claimed would be taken for a duplicate when its publisher sends it again."""
    refused = {fill.messages[0].device: ranges[-1].last for _source, fill, ranges in answers if ranges}
    for _source, fill in waiting if refused else ():
        fill.since = max(fill.since, refused.get(fill.messages[0].device, 0) + 1)
