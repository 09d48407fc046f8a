"""Consuming: loops over messages or batches that keep their leases alive, delete what is done and give back the rest.

Asking for the next message says that the last one is done. It is deleted in the background: while one delete is under
way others gather, and go together; no more than a batch may wait for that. What a program has and has not asked beyond
is extended at a third of its visibility, for as long as the loop lasts, so work may take longer than a lease. A loop
that the broker refuses, as it has too much to do, comes back when it is told to, later each time.

The end: in `async with`, leaving the block without an error says that the last message is done too, and with an error
it is released, to be delivered again. A bare `async for` cannot tell one from the other: the last message of one left
early comes again. What was not handed out goes back as if it had not been delivered. A program that dies leaves
all of that to the end of its leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import msgspec

from tidegate.client.control import RetryPace
from tidegate.client.link import not_open
from tidegate.client.message import Message
from tidegate.client.queue_requests import QueueRequests
from tidegate.errors import Overloaded, TidegateError
from tidegate.messages import Dequeue

# A reply that comes early and empty is of a method that does not hold requests: it is not asked again at once.
POLL_S: Final = 0.5
BEATS_A_LEASE: Final = 3
VISIBILITY_S_MIN: Final = 0.1
CLOSE_S: Final = 3.0

T = TypeVar("T")
_decode = msgspec.msgpack.Decoder(list[Message]).decode


async def take(requests: QueueRequests, wanted: Dequeue) -> list[Message]:
    return _decode(await requests.dequeue(wanted))


class Leases:
    """The messages that a loop has, by place; a message that comes again brings its newer receipt."""

    def __init__(self, requests: QueueRequests, wanted: Dequeue) -> None:
        self._requests = requests
        self._wanted = wanted
        self._held: dict[tuple[int, int], str] = {}
        self._done: list[str] = []
        self._deleting = 0
        self._pace = RetryPace(random.random)
        self._has_done = asyncio.Event()
        self._has_deleted = asyncio.Event()
        self._keeping: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._keeping = [self._requests.tasks.create_task(work) for work in (self._delete_done(), self._extend_held())]

    async def take(self) -> list[Message]:
        """At least one."""
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
        """They will be deleted."""
        for message in messages:
            self._done.append(self._held.pop((message.queue, message.sequence), message.receipt))
        self._has_done.set()

    async def close(self, failed: Iterable[Message] = ()) -> None:
        """Deletes what is done, releases what has failed, and gives back the rest. A broker that is not there is not
        waited for: the leases end by themselves."""
        for task in self._keeping:
            task.cancel()
        if self._keeping:
            await asyncio.wait(self._keeping)
        released = [self._held.pop((message.queue, message.sequence), message.receipt) for message in failed]
        returned, self._held = list(self._held.values()), {}
        done, self._done = self._done, []
        with contextlib.suppress(TidegateError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(
                    self._settle("delete", done), self._settle("release", released), self._settle("return", returned)
                )

    async def _settle(self, action: str, receipts: list[str]) -> None:
        if receipts:
            await self._requests.settle(self._wanted.queue, action, receipts)

    async def _delete_done(self) -> None:
        while True:
            await self._has_done.wait()
            self._has_done.clear()
            receipts, self._done = self._done, []
            self._deleting = len(receipts)
            try:
                with contextlib.suppress(TidegateError):  # they are delivered again: nothing is lost
                    await self._settle("delete", receipts)
            except asyncio.CancelledError:
                self._done = receipts + self._done  # the end deletes them, the second time for nothing
                raise
            self._deleting = 0
            self._has_deleted.set()

    async def _extend_held(self) -> None:
        visibility_s = max(VISIBILITY_S_MIN, self._wanted.visibility_s)
        while True:
            await asyncio.sleep(visibility_s / BEATS_A_LEASE)
            if self._held:
                with contextlib.suppress(TidegateError):
                    receipts = list(self._held.values())
                    await self._requests.settle(self._wanted.queue, "extend", receipts, visibility_s=visibility_s)


class _Loop(Generic[T]):
    """What loops over messages and over batches have in common; `_current` is what the program works on."""

    def __init__(self, requests: QueueRequests, wanted: Dequeue) -> None:
        self._requests = requests
        self._leases = Leases(requests, wanted)
        self._current: list[Message] = []
        self._is_entered = False
        self._is_started = False
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._is_entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.done()
        await self.finish()

    def __aiter__(self) -> AsyncIterator[T]:
        return self if self._is_entered else self._until_left()

    async def __anext__(self) -> T:
        raise NotImplementedError

    def done(self) -> None:
        """What the program has been given is done with, without asking for more."""
        self._leases.done(self._take_current())

    async def finish(self) -> None:
        """Ends it; the message that the program works on is delivered again."""
        if self._is_started and not self._is_closed:
            self._is_closed = True
            try:
                await self._leases.close(self._take_current())
            finally:
                self._requests.consumers.discard(self)

    async def _until_left(self) -> AsyncIterator[T]:
        try:
            while True:
                yield await anext(self)
        finally:
            await self.finish()

    async def _next_batch(self) -> list[Message]:
        if self._is_closed:
            raise not_open()
        if not self._is_started:
            await self._requests.up()
            self._is_started = True
            self._leases.start()
            self._requests.consumers.add(self)
        return await self._leases.take()

    def _take_current(self) -> list[Message]:
        current, self._current = self._current, []
        return current


class Messages(_Loop[Message]):
    """`async for message in …`: one at a time, taken in batches."""

    def __init__(self, requests: QueueRequests, wanted: Dequeue) -> None:
        super().__init__(requests, wanted)
        self._waiting: deque[Message] = deque()

    async def __anext__(self) -> Message:
        self.done()
        if not self._waiting:
            self._waiting.extend(await self._next_batch())
        message = self._waiting.popleft()
        self._current = [message]
        return message


class Batches(_Loop[list[Message]]):
    """`async for batch in …`: as many as came together."""

    async def __anext__(self) -> list[Message]:
        self.done()
        batch = await self._next_batch()
        self._current = list(batch)
        return batch
