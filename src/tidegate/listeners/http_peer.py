"""The client of a request that is held: it may go away at any time, and what was meant for it must not go with it.

ASGI tells of a lost connection in `receive`, to whoever waits there; `send` to a client that has left does nothing and
says nothing. So somebody waits in `receive` while the request is held, and while its answer is on the way.

A client that has its answer may close the connection at once, and many do. So a loss counts only while some of the
answer has not been handed to the system; what happens to it after that, nobody can tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidegate.listeners.http_connection import IS_ALL_SENT, IS_CLOSING

T = TypeVar("T")

# The socket, the transport, the protocol and the waiting task each pass on in the next turn what they hear in this one.
TURNS: Final = 5


class Peer:
    """Use it in `async with`, after the body of the request was read."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._is_all_sent: Callable[[], bool] = scope["extensions"][IS_ALL_SENT]
        self._is_closing: Callable[[], bool] = scope["extensions"][IS_CLOSING]
        self._receive = receive
        self._waiting: asyncio.Task[Any] | None = None
        self._is_gone = False

    async def __aenter__(self) -> Self:
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.cancel()

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work, which is cancelled when the client goes away: then ClientDisconnect."""
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
        """Whether the client was there until its answer had been handed to the system."""
        await hear_of_losses()
        if self._is_gone:
            return False
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        # The client may have left between head and body. No turn has passed since, in which one that has got all could
        # have closed.
        if self._is_closing():
            await hear_of_losses()
            return False
        # Waits until all is handed over, or the connection is lost.
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


async def hear_of_losses() -> None:
    """Returns when the loss of a connection that the system knows of has come to whoever waits for it."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
