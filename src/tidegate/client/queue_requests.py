"""Queue requests of a connection, over their own link. Each has a number and waits here for its one answer.

When the link reconnects, pending requests are sent again under the same numbers. That is safe for every kind. Messages
of an enqueue are identified by device and sequence, or all together by a batch number, so the broker keeps them once.
A repeated delete finds its message gone. A dequeue has leased nothing that this program has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from tidegate.client.link import Link, LinkOptions, not_open, to_exception
from tidegate.errors import TidegateError
from tidegate.frames import FRAME_BYTES_MAX, LONG_FRAME_BYTES, ErrorBody, Kind, Welcome, decode_body, encode_frame
from tidegate.messages import Dequeue, Leased, QueueCall, Settle, Settled

# A receipt has about thirty bytes; this many stay below any broker's frame_bytes_max.
SETTLE_RECEIPTS_MAX: Final = 4000
SHUTTING_DOWN: Final = "U702"


@dataclass(slots=True)
class _Request:
    """A pending request. `encode` returns its frame, anew each time that it is sent."""

    encode: Callable[[], bytes]
    answer: asyncio.Future[memoryview]


class Consumer(Protocol):
    """A loop or subscription that holds leases, and returns them when the connection ends."""

    async def finish(self) -> None: ...


class QueueRequests:
    """All queue requests of a connection. Messages without a device are numbered under `name`, the connection's own."""

    def __init__(self, options: LinkOptions, name: str, tasks: asyncio.TaskGroup) -> None:
        self.name = name
        self.tasks = tasks
        self.consumers: set[Consumer] = set()
        self.frame_bytes_max = FRAME_BYTES_MAX
        self._link = Link(options, "", self)
        self._opening = asyncio.Lock()
        self._is_up = False
        self._is_closed = False
        self._next_number = 1
        self._next_sequence = 1
        self._open: dict[int, _Request] = {}
        # Cancelled dequeues and their queues. Messages that still arrive for them are returned to the queue.
        self._cancelled: dict[int, str] = {}
        self._window_bytes = FRAME_BYTES_MAX
        self._enqueued_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def next_sequence(self) -> int:
        self._next_sequence += 1
        return self._next_sequence - 1

    # Requests.

    async def wait_until_up(self) -> None:
        """Waits until the link is up. The first caller opens it; concurrent callers wait for that."""
        if self._is_closed:
            raise not_open()
        if not self._is_up:
            async with self._opening:
                if not self._is_up:
                    await self._link.start(self.tasks)
                    self._is_up = True

    async def call(self, action: str, name: str, arguments: dict[str, Any] | None = None) -> memoryview:
        """Sends a queue request outside the hot path and returns its reply."""
        return await self._ask(Kind.QUEUE_CALL, QueueCall(action, name, arguments or {}))

    async def settle(self, queue: str, action: str, receipts: list[str], **seconds: float) -> Settled:
        done = stale = 0
        for start in range(0, len(receipts), SETTLE_RECEIPTS_MAX):
            part = Settle(queue, action, receipts[start : start + SETTLE_RECEIPTS_MAX], **seconds)
            settled: Settled = decode_body(await self._ask(Kind.SETTLE, part), Settled)
            done, stale = done + settled.done, stale + settled.stale
        return Settled(done, stale)

    async def enqueue(self, body: bytes) -> memoryview:
        """Sends an encoded Enqueue and returns its reply. Waits while the broker's window of bytes in flight is full,
        which slows producers to the speed of the broker's disk."""
        while not self._has_room.is_set():
            await self._has_room.wait()
        self._count_enqueued(len(body))
        try:
            return await self._ask(Kind.ENQUEUE, msgspec.Raw(body))
        finally:
            self._count_enqueued(-len(body))

    async def dequeue(self, wanted: Dequeue) -> memoryview:
        """Sends a dequeue and returns its reply. After a reconnection it waits only for the rest of `wait_s`."""
        await self.wait_until_up()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wanted.wait_s
        number = self._take_number()

        def encode() -> bytes:
            left_s = min(wanted.wait_s, max(0.0, deadline_s - loop.time()))
            return encode_frame(Kind.DEQUEUE, msgspec.structs.replace(wanted, wait_s=left_s), number)

        answer = self._send(number, encode)
        try:
            return await answer
        except asyncio.CancelledError:
            self._abandon(number, wanted.queue, answer)
            raise
        finally:
            del self._open[number]

    async def finish(self) -> None:
        """Ends all unfinished consumers, which return their messages."""
        async with asyncio.TaskGroup() as tasks:
            for consumer in list(self.consumers):
                tasks.create_task(consumer.finish())

    def close(self) -> None:
        self._is_closed = True
        self._has_room.set()
        self._link.close()
        self._fail_all(not_open())

    # The link calls these.

    def on_welcome(self, welcome: Welcome) -> None:
        self.frame_bytes_max = welcome.frame_bytes_max
        self._window_bytes = welcome.window_bytes
        self._cancelled.clear()
        for request in self._open.values():
            self._link.write(request.encode())

    def on_frame(self, kind: int, sequence: int, body: memoryview) -> None:
        if (queue := self._cancelled.pop(sequence, None)) is not None:
            if kind == Kind.REPLY:
                self._give_back(queue, decode_body(body, list[Leased]))
        elif (request := self._open.get(sequence)) is not None and not request.answer.done():
            if kind == Kind.REPLY:
                # A view would keep the whole read buffer alive: short answers are copied out of it.
                request.answer.set_result(body if len(body) >= LONG_FRAME_BYTES else memoryview(bytes(body)))
            elif kind == Kind.FAILED:
                error: ErrorBody = decode_body(body, ErrorBody)
                # A request that a stopping broker refuses stays pending: it is sent again after the reconnection.
                if error.code != SHUTTING_DOWN:
                    request.answer.set_exception(to_exception(error))

    def on_failed(self, error: TidegateError) -> None:
        """Fails all requests after a final error of the link. The next request opens the link again."""
        self._is_up = False
        self._fail_all(error)

    def on_writable(self) -> None:
        """Does nothing: the bytes in flight are bounded by the window, so no request waits for the transport."""

    # Internals.

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    async def _ask(self, kind: Kind, body: Any) -> memoryview:
        await self.wait_until_up()
        number = self._take_number()
        frame = encode_frame(kind, body, number)
        try:
            return await self._send(number, lambda: frame)
        finally:
            del self._open[number]

    def _send(self, number: int, encode: Callable[[], bytes]) -> asyncio.Future[memoryview]:
        answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._open[number] = _Request(encode, answer)
        if self._is_closed:
            answer.set_exception(not_open())
        else:
            self._link.write(encode())
        return answer

    def _abandon(self, number: int, queue: str, answer: asyncio.Future[memoryview]) -> None:
        """Cancels a dequeue. Returns its messages to the queue, now or when they arrive."""
        if answer.done() and not answer.cancelled():
            if answer.exception() is None:
                self._give_back(queue, decode_body(answer.result(), list[Leased]))
        else:
            self._cancelled[number] = queue
            self._link.write(encode_frame(Kind.CANCEL, sequence=number))

    def _count_enqueued(self, size_bytes: int) -> None:
        self._enqueued_bytes += size_bytes
        if self._enqueued_bytes < self._window_bytes or self._is_closed:
            self._has_room.set()
        else:
            self._has_room.clear()

    def _give_back(self, queue: str, leased: list[Leased]) -> None:
        """Returns messages to their queue without waiting for the answer. If the request is lost, the leases expire."""
        if leased:
            settle = Settle(queue, "return", [message.receipt for message in leased])
            self._link.write(encode_frame(Kind.SETTLE, settle, self._take_number()))

    def _fail_all(self, error: TidegateError) -> None:
        for request in self._open.values():
            if not request.answer.done():
                request.answer.set_exception(error)
