"""The client of a request that waits for messages. It may disconnect at any time, and its messages must not be lost.

ASGI reports a lost connection only to a task that waits in `receive`; `send` to a client that has left does nothing and
raises nothing. So a task waits in `receive` while the request waits, and while its answer is being sent.

Many clients close the connection as soon as they have their answer. So a lost connection counts as a failure only while
the operating system has not taken all of the answer. After that, nobody can tell whether the client received it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidegate.listeners.http.connection import IS_ALL_SENT, IS_CLOSING

T = TypeVar("T")

# A loss takes one iteration of the event loop for each step: socket, transport, protocol and waiting task.
LOOP_ITERATIONS: Final = 5


class Peer:
    """Watches the client of one request. Use it in `async with`, after reading the body of the request."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._is_all_sent: Callable[[], bool] = scope["extensions"][IS_ALL_SENT]
        self._is_closing: Callable[[], bool] = scope["extensions"][IS_CLOSING]
        self._receive = receive
        self._waiting: asyncio.Task[Any] | None = None
        self._is_gone = False

    async def __aenter__(self) -> Self:
        # Not in a TaskGroup: that would wrap the errors of the request in an ExceptionGroup, and lose its status.
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.cancel()

    async def run_while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. If the client disconnects, cancels the work and raises ClientDisconnect."""
        if self._is_gone:
            work.close()
            raise ClientDisconnect
        self._waiting = asyncio.current_task()
        assert self._waiting is not None
        try:
            return await work
        except asyncio.CancelledError:
            if not self._is_gone:
                raise
            self._waiting.uncancel()
            raise ClientDisconnect from None
        finally:
            self._waiting = None

    async def send(self, response: Response, send: Send) -> bool:
        """Sends a response. Returns whether the client stayed connected until the operating system took all of it."""
        await detect_disconnect()
        if self._is_gone:
            return False
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        # The client may have left between head and body. The event loop has not run since, so this is not a client that
        # received everything and then closed.
        if self._is_closing():
            await detect_disconnect()
            return False
        # An empty part waits until the operating system has taken everything, or the connection is lost.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        if not self._is_all_sent():
            return False
        await send({"type": "http.response.body", "body": b""})
        return True

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        if self._waiting is not None:
            self._waiting.cancel()


async def detect_disconnect() -> None:
    """Runs the event loop until a loss that the operating system knows of has reached the task that waits for it."""
    for _ in range(LOOP_ITERATIONS):
        await asyncio.sleep(0)
