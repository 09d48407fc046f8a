"""Queue requests of a native connection: each runs as a task and gets one answer, a REPLY or a FAILED.

Only a dequeue waits for long, so only a dequeue is ever cancelled: by a CANCEL frame, which is answered with no
messages, or because the connection was lost. Leased messages that can no longer be sent are returned to their queue,
and the delivery does not count.

What may go wrong:
- The peer does not read. Its dequeues wait until the transport is writable again. If a dequeue that was already
  parked in a queue gets messages while too much is unsent, they are returned.
- The peer sends requests faster than they are answered. Once its unanswered requests exceed the window in bytes, its
  connection is not read. Dequeues do not count: one may wait for an hour, and holds only the name of a queue.
- The peer has more than `REQUESTS_MAX` open requests: L610.

The queue of a named subscription has one reader, and delivers in order. When the reader's connection is lost, its
unsettled messages are returned at once, so that they come first when it reconnects. A new reader takes over the
messages of the one before, which may have read from a broker that died.
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
# Leaves room for one more reply of REPLY_BYTES_MAX below the size at which a connection is cut off.
UNSENT_BYTES_MAX: Final = 1024 * 1024


class Wire(Protocol):
    """The connection that requests arrive on and answers leave by."""

    @property
    def is_writable(self) -> bool: ...

    def answer(self, kind: Kind, body: Any, sequence: int) -> bool:
        """Writes an answer. Returns False if the connection is lost or closing, and nothing was written."""

    def unsent_bytes(self) -> int: ...

    def on_room(self) -> None:
        """Called when the requests are no longer congested, so reading may resume."""


class QueueRequests:
    """Runs the queue requests of one connection. `tasks` belongs to the listener and holds every task until it ends:
    asyncio itself keeps only weak references."""

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
        self._call_lock = asyncio.Lock()
        self._request_bytes = 0
        self._unsettled: dict[str, set[str]] = {}
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether an answer is due soon. Every open request except a dequeue is answered soon."""
        return len(self._open) > len(self._dequeues)

    @property
    def is_congested(self) -> bool:
        return self._request_bytes > self._window_bytes

    def on_frame(self, kind: int, number: int, body: memoryview) -> None:
        """Starts the request of a frame. An invalid body fails its request only: the frames around it are valid."""
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
        """Cancels dequeues and returns the unsettled messages of named subscriptions, because the connection is lost
        or closing. Other requests run to their end, and their answers are dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._can_write.set()
        for number in self._dequeues:
            self._open[number].cancel()
        for queue, receipts in self._unsettled.items():
            if receipts:
                self._start(self._give_back(queue, list(receipts)))

    # Requests.

    def _check_number(self, number: int) -> None:
        if number in self._open:
            raise ProtocolError(
                "P330", f"request {number} is already open", "give each open request a different number"
            )
        if len(self._open) >= REQUESTS_MAX:
            raise self._queues.refusals.note(
                Overloaded(
                    "L610", f"this connection has {REQUESTS_MAX} open requests", "wait for answers, or cancel some"
                )
            )

    def _work(self, kind: int, number: int, body: memoryview) -> Coroutine[Any, Any, None]:
        match kind:
            case Kind.ENQUEUE:
                return self._answer(number, self._enqueue(decode_body(body, Enqueue)), len(body))
            case Kind.DEQUEUE:
                dequeue: Dequeue = decode_body(body, Dequeue)
                self._queues.definition(dequeue.queue)
                self._dequeues.add(number)
                return self._dequeue(number, dequeue)
            case Kind.SETTLE:
                return self._answer(number, self._settle(decode_body(body, Settle)), len(body))
            case _:
                return self._answer(number, self._call(decode_body(body, QueueCall)), len(body))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # Not in a TaskGroup: frames start requests, and a failing one must fail alone (`_on_done`).
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _answer(self, number: int, work: Coroutine[Any, Any, Any], size_bytes: int) -> Coroutine[Any, Any, None]:
        """Counts the bytes of a request now, before its task first runs, until it is answered."""
        self._request_bytes += size_bytes
        return self._answer_counted(number, work, size_bytes)

    async def _answer_counted(self, number: int, work: Coroutine[Any, Any, Any], size_bytes: int) -> None:
        try:
            answer = await work
        finally:
            was_congested = self.is_congested
            self._request_bytes -= size_bytes
            if was_congested and not self.is_congested:
                self._wire.on_room()
        self._reply(number, answer)

    async def _enqueue(self, enqueue: Enqueue) -> Enqueued:
        return await self._queues.enqueue_from_client(
            enqueue.queue, enqueue.messages, producer=enqueue.producer, number=enqueue.number
        )

    async def _settle(self, settle: Settle) -> Settled:
        settled = await self._queues.settle(settle)
        if settle.action != "extend" and (unsettled := self._unsettled.get(settle.queue)) is not None:
            unsettled.difference_update(settle.receipts)
        return settled

    async def _call(self, asked: QueueCall) -> Any:
        """Runs calls one at a time, each once the connection is writable: one range read may fill a whole reply."""
        async with self._call_lock:
            await self._until_writable()
            return await self._calls.answer(asked)

    async def _dequeue(self, number: int, wanted: Dequeue) -> None:
        leased = await self._lease(wanted)
        self._dequeues.discard(number)
        receipts = [message.receipt for message in leased]
        if self._reply(number, leased):
            if (unsettled := self._unsettled.get(wanted.queue)) is not None:
                unsettled.update(receipts)
        elif receipts:
            await self._give_back(wanted.queue, receipts)

    async def _lease(self, wanted: Dequeue) -> list[Leased]:
        """Returns leased messages once the connection can carry them.

        A request that was already parked when the transport filled up returns its messages to the queue and waits
        until the connection is writable, as later requests do."""
        deadline_s = self._loop.time() + wanted.wait_s
        if wanted.queue.startswith(SUBSCRIPTION) and wanted.queue not in self._unsettled:
            self._unsettled[wanted.queue] = set()
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
        """Returns messages to their queue. If that fails, they become visible again when their leases expire."""
        with contextlib.suppress(TidegateError):
            await self._queues.settle(Settle(queue, "return", receipts))

    # Answers.

    def _reply(self, number: int, body: Any) -> bool:
        """Sends the reply and frees the request's number, which the client may reuse as soon as it has the reply."""
        is_written = self._wire.answer(Kind.REPLY, body, number)
        if is_written:
            del self._open[number]
        return is_written

    def _on_done(self, number: int, task: asyncio.Task[None]) -> None:
        """Answers a request whose task was cancelled or failed; the others have replied already."""
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
            log.error("queue request failed", exc_info=error)
            error = Unavailable(
                "U709", "the broker failed with an internal error", "look in its log, and report the error"
            )
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
        body = ErrorBody(error.code, error.message, error.remedy, error.column, retry_after_s=retry_after_s)
        self._wire.answer(Kind.FAILED, body, number)
