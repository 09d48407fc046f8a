"""Queue requests of a native connection: each runs as a task, and gets one answer, a REPLY or a FAILED.

Only a dequeue waits for long, so only a dequeue is ever cancelled: by CANCEL, which is answered with no messages, or
because the connection has gone. Messages that a reply cannot carry any more are given back as if they had not been
delivered.

What may go wrong: the peer does not read. Then no more messages are leased for it: its dequeues are held until the
transport can take more, and what one brings that was parked before is given back when too much is unsent. The peer
enqueues faster than the disk takes it: beyond a window its connection is not read. It asks without end: L610.

The queue of a named subscription has one reader, which wants order: what is leased to it and not settled when its
connection goes is given back at once, so that it comes first when the reader is back. A reader who comes, perhaps from
a broker that has died, takes over what the one before had.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from tidegate.errors import Overloaded, ProtocolError, TidegateError, Unavailable
from tidegate.frames import ErrorBody, Kind, decode_body
from tidegate.listeners.queue_calls import QueueCalls
from tidegate.messages import Dequeue, Enqueue, Enqueued, Leased, QueueCall, Settle, Settled
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import SUBSCRIPTION

log = logging.getLogger(__name__)

REQUESTS_MAX: Final = 10_000
# With one more reply of REPLY_BYTES_MAX this stays below what a connection is cut off for.
UNSENT_BYTES_MAX: Final = 1024 * 1024


class Wire(Protocol):
    """The connection that requests came by."""

    @property
    def is_writable(self) -> bool: ...

    def answer(self, kind: Kind, body: Any, sequence: int) -> bool:
        """False when the connection is gone or closing, and nothing was written."""

    def unsent_bytes(self) -> int: ...

    def on_room(self) -> None:
        """Requests are no longer congested."""


class QueueRequests:
    """Of one connection. `tasks` is the listener's: it keeps every task until it has ended."""

    def __init__(self, queues: LogicalQueues, wire: Wire, tasks: set[asyncio.Task[None]], window_bytes: int) -> None:
        self._queues = queues
        self._calls = QueueCalls(queues)
        self._wire = wire
        self._tasks = tasks
        self._window_bytes = window_bytes
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, asyncio.Task[None]] = {}
        self._dequeues: set[int] = set()
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._calling = asyncio.Lock()
        self._enqueued_bytes = 0
        self._lent: dict[str, set[str]] = {}
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether an answer is due soon: all but those of dequeues are."""
        return len(self._open) > len(self._dequeues)

    @property
    def is_congested(self) -> bool:
        return self._enqueued_bytes > self._window_bytes

    def on_frame(self, kind: int, number: int, body: memoryview) -> None:
        """A body of the wrong shape fails its request; the frames around it are sound."""
        if kind == Kind.CANCEL:
            if number in self._dequeues:
                self._open[number].cancel()
            return
        try:
            self._check_number(number)
            work = self._work(kind, number, body)
        except TidegateError as error:
            self._fail(number, error)
            return
        task = self._open[number] = self._start(work)
        task.add_done_callback(partial(self._on_done, number))

    def on_paused(self) -> None:
        self._can_write.clear()

    def on_writable(self) -> None:
        self._can_write.set()

    def close(self) -> None:
        """The connection has gone. Other requests than dequeues end by themselves, and their answers go nowhere."""
        if self._is_closed:
            return
        self._is_closed = True
        self._can_write.set()
        for number in self._dequeues:
            self._open[number].cancel()
        for queue, receipts in self._lent.items():
            if receipts:
                self._start(self._give_back(queue, list(receipts)))

    # Requests.

    def _check_number(self, number: int) -> None:
        if number in self._open:
            raise ProtocolError(
                "P330", f"{number} is the number of an open request", "give each open request a number of its own"
            )
        if len(self._open) >= REQUESTS_MAX:
            raise Overloaded(
                "L610", f"{REQUESTS_MAX} requests of this connection are open", "wait for answers, or cancel some"
            )

    def _work(self, kind: int, number: int, body: memoryview) -> Coroutine[Any, Any, None]:
        match kind:
            case Kind.ENQUEUE:
                enqueue: Enqueue = decode_body(body, Enqueue)
                self._enqueued_bytes += len(body)
                return self._answer(number, self._enqueue(enqueue, len(body)))
            case Kind.DEQUEUE:
                dequeue: Dequeue = decode_body(body, Dequeue)
                self._dequeues.add(number)
                return self._dequeue(number, dequeue)
            case Kind.SETTLE:
                return self._answer(number, self._settle(decode_body(body, Settle)))
            case _:
                return self._answer(number, self._call(decode_body(body, QueueCall)))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        self._reply(number, await work)

    async def _enqueue(self, enqueue: Enqueue, size_bytes: int) -> Enqueued:
        try:
            return await self._queues.enqueue(
                enqueue.queue, enqueue.messages, producer=enqueue.producer, number=enqueue.number
            )
        finally:
            was_congested = self.is_congested
            self._enqueued_bytes -= size_bytes
            if was_congested and not self.is_congested:
                self._wire.on_room()

    async def _settle(self, settle: Settle) -> Settled:
        settled = await self._queues.settle(settle)
        if settle.action != "extend" and (lent := self._lent.get(settle.queue)) is not None:
            lent.difference_update(settle.receipts)
        return settled

    async def _call(self, asked: QueueCall) -> Any:
        """One at a time, when the connection can carry its answer: a range read may be as large as a reply can be."""
        async with self._calling:
            await self._until_writable()
            return await self._calls.answer(asked)

    async def _dequeue(self, number: int, wanted: Dequeue) -> None:
        leased = await self._lease(wanted)
        self._dequeues.discard(number)
        receipts = [message.receipt for message in leased]
        if self._reply(number, leased):
            if (lent := self._lent.get(wanted.queue)) is not None:
                lent.update(receipts)
        elif receipts:
            await self._give_back(wanted.queue, receipts)

    async def _lease(self, wanted: Dequeue) -> list[Leased]:
        """Messages that the connection can carry. A request that was parked when the transport filled gives back what
        it got, and is held like those that come later."""
        deadline_s = self._loop.time() + wanted.wait_s
        if wanted.queue.startswith(SUBSCRIPTION) and wanted.queue not in self._lent:
            self._lent[wanted.queue] = set()
            await self._queues.take_over(wanted.queue)
        while True:
            await self._until_writable()
            leased = await self._queues.dequeue(wanted)
            if not leased or self._wire.unsent_bytes() <= UNSENT_BYTES_MAX:
                return leased
            await self._give_back(wanted.queue, [message.receipt for message in leased])
            wanted = msgspec.structs.replace(wanted, wait_s=max(0.0, deadline_s - self._loop.time()))

    async def _until_writable(self) -> None:
        while not self._wire.is_writable and not self._is_closed:
            await self._can_write.wait()

    async def _give_back(self, queue: str, receipts: list[str]) -> None:
        """When it fails their leases end by themselves."""
        with contextlib.suppress(TidegateError):
            await self._queues.settle(Settle(queue, "return", receipts))

    # Answers.

    def _reply(self, number: int, body: Any) -> bool:
        """The number is free from now on: the client may use it as soon as it hears."""
        is_written = self._wire.answer(Kind.REPLY, body, number)
        if is_written:
            del self._open[number]
        return is_written

    def _on_done(self, number: int, task: asyncio.Task[None]) -> None:
        """Answers those that have not answered themselves: the cancelled and the failed."""
        if self._open.get(number) is not task:
            return
        del self._open[number]
        self._dequeues.discard(number)
        if task.cancelled():
            self._wire.answer(Kind.REPLY, [], number)
        elif (error := task.exception()) is not None:
            self._fail(number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        if not isinstance(error, TidegateError):
            log.error("a queue request has failed", exc_info=error)
            error = Unavailable("U709", "the broker has made a mistake", "see its log, and report it")
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
        body = ErrorBody(error.code, error.message, error.remedy, error.column, retry_after_s=retry_after_s)
        self._wire.answer(Kind.FAILED, body, number)
