"""Queue requests of a connection, over a link of their own: each has a number, and waits here for its one answer.

When the link breaks, what is open is sent again under the same numbers once it is back. That is safe for every kind: an
enqueue's messages are named by device and sequence, or all together by a number, and the broker keeps them once; a
delete finds its message gone; a dequeue has leased nothing that this program has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from tidegate.client.link import Link, LinkOptions, not_open, to_exception
from tidegate.errors import TidegateError
from tidegate.frames import FRAME_BYTES_MAX, LONG_FRAME_BYTES, ErrorBody, Kind, Welcome, decode_body, encode_frame
from tidegate.messages import Dequeue, Leased, QueueCall, Settle, Settled

# A receipt has about thirty bytes; so many stay below any broker's frame_bytes_max.
SETTLE_RECEIPTS_MAX: Final = 4000
SHUTTING_DOWN: Final = "U702"


@dataclass(slots=True)
class _Request:
    """`encode` makes its frame, each time that it is sent."""

    encode: Callable[[], bytes]
    answer: asyncio.Future[memoryview]


class Consumer(Protocol):
    """Whoever has leased messages, and gives them back when the connection ends."""

    def finish(self) -> Awaitable[None]: ...


class QueueRequests:
    """`name` is this connection's own as a device: messages that have no other are numbered under it."""

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
        # Dequeues that nobody waits for any more, and their queues: what they bring is given back.
        self._cancelled: dict[int, str] = {}
        self._window_bytes = FRAME_BYTES_MAX
        self._enqueued_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def next_sequence(self) -> int:
        self._next_sequence += 1
        return self._next_sequence - 1

    # Asking.

    async def up(self) -> None:
        """The link is opened by whoever needs it first; the others wait for that."""
        if self._is_closed:
            raise not_open()
        if not self._is_up:
            async with self._opening:
                if not self._is_up:
                    await self._link.start(self.tasks)
                    self._is_up = True

    async def call(self, action: str, name: str, arguments: dict[str, Any] | None = None) -> memoryview:
        """Everything about queues that is not in the hot path."""
        return await self._ask(Kind.QUEUE_CALL, QueueCall(action, name, arguments or {}))

    async def settle(self, queue: str, action: str, receipts: list[str], **seconds: float) -> Settled:
        done = stale = 0
        for start in range(0, len(receipts), SETTLE_RECEIPTS_MAX):
            part = Settle(queue, action, receipts[start : start + SETTLE_RECEIPTS_MAX], **seconds)
            settled: Settled = decode_body(await self._ask(Kind.SETTLE, part), Settled)
            done, stale = done + settled.done, stale + settled.stale
        return Settled(done, stale)

    async def enqueue(self, body: bytes) -> memoryview:
        """Sends an Enqueue that is encoded already. No more is under way than the broker's window: it slows its callers
        to the speed of the broker's disk."""
        while not self._has_room.is_set():
            await self._has_room.wait()
        self._count_enqueued(len(body))
        try:
            return await self._ask(Kind.ENQUEUE, msgspec.Raw(body))
        finally:
            self._count_enqueued(-len(body))

    async def dequeue(self, wanted: Dequeue) -> memoryview:
        """What is sent again after a reconnection waits for what is left of the time."""
        await self.up()
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
        """Consumers that were not left give their messages back."""
        await asyncio.gather(*(consumer.finish() for consumer in list(self.consumers)))

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
                # A short answer must not keep all alive that was read together with it.
                request.answer.set_result(body if len(body) >= LONG_FRAME_BYTES else memoryview(bytes(body)))
            elif kind == Kind.FAILED:
                error: ErrorBody = decode_body(body, ErrorBody)
                if error.code != SHUTTING_DOWN:  # the next broker, or this one when it is back, is asked again
                    request.answer.set_exception(to_exception(error))

    def on_failed(self, error: TidegateError) -> None:
        """The link has ended for good; the next request begins a new one."""
        self._is_up = False
        self._fail_all(error)

    def on_writable(self) -> None:
        """What is under way is bounded; nothing waits for this."""

    # Inside.

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    async def _ask(self, kind: Kind, body: Any) -> memoryview:
        await self.up()
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
        """Nobody waits for a dequeue any more: not for its answer, should it be on its way or here already."""
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
        """Nobody waits for the answer; when it is lost, the leases end by themselves."""
        if leased:
            settle = Settle(queue, "return", [message.receipt for message in leased])
            self._link.write(encode_frame(Kind.SETTLE, settle, self._take_number()))

    def _fail_all(self, error: TidegateError) -> None:
        for request in self._open.values():
            if not request.answer.done():
                request.answer.set_exception(error)
