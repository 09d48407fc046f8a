"""Consuming: loops over messages or batches that keep leases alive, delete finished messages and return the rest.

Asking for the next message marks the last one as done. Done messages are deleted in the background: while one delete is
in flight, others gather and are sent together, at most one batch of them. Leases of all other messages are extended at
a third of their visibility while the loop lasts, so work may take longer than a lease. A loop that an overloaded broker
refuses retries after the time that the broker asks for, later each time.

At the end of `async with`, the last message is done if the block ends without an error; otherwise it is released and
delivered again. A bare `async for` cannot tell one from the other, so the last message of a loop that is left early is
delivered again. Messages that the program has not seen are returned without counting the delivery.

What may go wrong: a program dies. The broker delivers its messages again when their leases expire, so make consumers
idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Final, NoReturn, TypeVar

import msgspec

from tidegate.client.control import RetryPace
from tidegate.client.link import not_open
from tidegate.client.message import Message
from tidegate.client.queue_requests import QueueRequests
from tidegate.client.stream import Stream
from tidegate.errors import Overloaded, TidegateError
from tidegate.messages import Dequeue

# Some dequeue methods do not hold requests: after an early empty reply, a loop waits this long before it asks again.
POLL_S: Final = 0.5
EXTENSIONS_PER_LEASE: Final = 3
VISIBILITY_S_MIN: Final = 0.1
CLOSE_S: Final = 3.0

T = TypeVar("T")
_decode = msgspec.msgpack.Decoder(list[Message]).decode


async def take(requests: QueueRequests, wanted: Dequeue) -> list[Message]:
    return _decode(await requests.dequeue(wanted))


class Leases:
    """The leased messages of a loop, by place: a redelivered message replaces its older receipt."""

    def __init__(self, requests: QueueRequests, wanted: Dequeue) -> None:
        self._requests = requests
        self._wanted = wanted
        self._held: dict[tuple[int, int], str] = {}
        self._done: list[str] = []
        self._deleting = 0
        self._pace = RetryPace()
        self._has_done = asyncio.Event()
        self._has_deleted = asyncio.Event()
        self._keeping: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._keeping = [self._requests.tasks.create_task(work) for work in (self._delete_done(), self._extend_held())]

    async def take(self) -> list[Message]:
        """Waits for messages and returns at least one."""
        loop = asyncio.get_running_loop()
        while len(self._done) + self._deleting > self._wanted.max:
            self._has_deleted.clear()
            await self._has_deleted.wait()
        while True:
            asked_s = loop.time()
            try:
                messages = await take(self._requests, self._wanted)
            except Overloaded as error:
                await asyncio.sleep(self._pace.on_refusal(error.retry_after_s))
                continue
            self._pace.on_success()
            if messages:
                self._held.update({(message.queue, message.sequence): message.receipt for message in messages})
                return messages
            await asyncio.sleep(min(POLL_S, max(0.0, asked_s + self._wanted.wait_s - loop.time())))

    def done(self, messages: Iterable[Message]) -> None:
        """Marks messages as done; they are deleted in the background."""
        for message in messages:
            self._done.append(self._held.pop((message.queue, message.sequence), message.receipt))
        self._has_done.set()

    async def close(self, failed: Iterable[Message] = ()) -> None:
        """Deletes done messages, releases failed ones and returns the rest. Gives up after CLOSE_S if the broker does
        not answer: the leases then expire."""
        for task in self._keeping:
            task.cancel()
        if self._keeping:
            await asyncio.wait(self._keeping)
        released = [self._held.pop((message.queue, message.sequence), message.receipt) for message in failed]
        returned, self._held = list(self._held.values()), {}
        done, self._done = self._done, []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S), asyncio.TaskGroup() as tasks:
                for action, receipts in (("delete", done), ("release", released), ("return", returned)):
                    tasks.create_task(self._settle(action, receipts))

    async def _settle(self, action: str, receipts: list[str], **seconds: float) -> None:
        """Settles messages. Ignores refusals, because nothing is lost: the messages are delivered again."""
        if receipts:
            with contextlib.suppress(TidegateError):
                await self._requests.settle(self._wanted.queue, action, receipts, **seconds)

    async def _delete_done(self) -> None:
        while True:
            await self._has_done.wait()
            self._has_done.clear()
            receipts, self._done = self._done, []
            self._deleting = len(receipts)
            try:
                await self._settle("delete", receipts)
            except asyncio.CancelledError:
                self._done = receipts + self._done  # `close` deletes them again, in case this delete was not sent
                raise
            self._deleting = 0
            self._has_deleted.set()

    async def _extend_held(self) -> None:
        visibility_s = max(VISIBILITY_S_MIN, self._wanted.visibility_s)
        while True:
            await asyncio.sleep(visibility_s / EXTENSIONS_PER_LEASE)
            await self._settle("extend", list(self._held.values()), visibility_s=visibility_s)


class LeasedStream(Stream[T]):
    """A stream of leased messages, which the client takes in batches when none waits. `_current` is what the program is
    working on; it is done when the program asks for more."""

    def __init__(self, requests: QueueRequests, wanted: Dequeue) -> None:
        super().__init__()
        self._requests = requests
        self._leases = Leases(requests, wanted)
        self._waiting: deque[Message] = deque()
        self._current: list[Message] = []
        self._starting = asyncio.Lock()
        self._taking: asyncio.Timeout | None = None
        self._is_started = False

    def done(self) -> None:
        """Marks the current messages as done, without asking for more."""
        self._leases.done(self._take_current())

    async def finish(self) -> None:
        """Ends the stream. The message that the program is working on is delivered again."""
        if self._is_started and not self._is_closed:
            self._is_closed = True
            self._waiting.clear()  # their leases are returned
            if self._taking is not None:
                self._taking.reschedule(0.0)
            try:
                await self._leases.close(self._take_current())
            finally:
                self._requests.consumers.discard(self)

    async def _leave(self, *, is_done: bool) -> None:
        if is_done:
            self.done()
        await self.finish()

    async def _next_message(self) -> Message:
        self.done()
        if not self._waiting:  # checked here too, because awaiting costs more than taking a message
            await self._wait_for_some()
        self._current = [self._waiting.popleft()]
        return self._current[0]

    async def _next_messages(self) -> list[Message]:
        self.done()
        await self._wait_for_some()
        self._current = list(self._waiting)
        self._waiting.clear()
        return list(self._current)

    async def _wait_for_some(self) -> None:
        while not self._waiting:
            if self._is_closed:
                self._raise_closed()
            if not self._is_started:
                await self._start()
            self._waiting.extend(self._accepted(await self._take_batch()))

    async def _start(self) -> None:
        """Starts the stream with the first call; concurrent calls wait for that."""
        async with self._starting:
            if not self._is_started:
                await self._begin()
                self._is_started = True
                self._leases.start()
                self._requests.consumers.add(self)

    async def _take_batch(self) -> list[Message]:
        """Waits for messages. `finish` expires the timeout, so that a waiting program learns of the end."""
        try:
            async with asyncio.timeout(None) as self._taking:
                return await self._leases.take()
        except TimeoutError:
            if not self._is_closed:
                raise
            return []
        finally:
            self._taking = None

    def _take_current(self) -> list[Message]:
        current, self._current = self._current, []
        return current

    async def _begin(self) -> None:
        """Prepares the broker for the first dequeue."""
        await self._requests.wait_until_up()

    def _accepted(self, messages: list[Message]) -> list[Message]:
        """Returns those of the messages that the program is to receive."""
        return messages

    def _raise_closed(self) -> NoReturn:
        raise not_open()


class Messages(LeasedStream[Message]):
    """`async for message in …`: yields one message at a time, but dequeues in batches."""

    __anext__ = LeasedStream._next_message


class Batches(LeasedStream[list[Message]]):
    """`async for batch in …`: yields the messages of one reply together."""

    __anext__ = LeasedStream._next_messages
