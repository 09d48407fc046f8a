"""A stream: an async iterator of what a program receives from its broker, one item after another.

`async with` starts a stream and ends it with the block. A bare `async for` starts it with the first item and ends it
when the loop is left: the items of an abandoned stream would pile up, or stay leased.

A `PushedStream` keeps items that the broker sends unasked. They wait here until the program takes them. When
`waiting_max` items wait, the stream is behind, and its owner stops reading from the broker. A closed stream stops, and
a failed one raises its error, after the waiting items.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Generic, Self, TypeVar

from tidegate.errors import TidegateError

T = TypeVar("T")


class Stream(ABC, Generic[T]):
    """How a program uses every stream. A kind of stream defines `__anext__`, `_enter` and `_leave`."""

    def __init__(self) -> None:
        self._is_entered = False
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._is_entered = True
        await self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(is_done=kind is None)

    def __aiter__(self) -> AsyncIterator[T]:
        return self if self._is_entered else self._until_left()

    @abstractmethod
    async def __anext__(self) -> T: ...

    async def _enter(self) -> None:
        """Prepares the stream at the beginning of `async with`."""

    @abstractmethod
    async def _leave(self, *, is_done: bool) -> None:
        """Ends the stream. `is_done` is true if the program has finished its work on the last item."""

    async def _until_left(self) -> AsyncIterator[T]:
        try:
            while True:
                yield await anext(self)
        except StopAsyncIteration:
            return
        finally:
            await self._leave(is_done=False)


class PushedStream(Stream[T]):
    """A stream of items that arrive unasked, with the places for a kind of stream to start, resume and end them."""

    def __init__(self, waiting_max: int) -> None:
        super().__init__()
        self._waiting: deque[T] = deque()
        self._waiting_max = waiting_max
        self._wake = asyncio.Event()
        self._error: TidegateError | None = None

    @property
    def is_behind(self) -> bool:
        return len(self._waiting) >= self._waiting_max

    async def __anext__(self) -> T:
        if not self._waiting:  # checked here too, because awaiting costs more than taking an item
            await self._wait_for_some()
        item = self._waiting.popleft()
        self._on_taken()
        return item

    def close(self) -> None:
        """Ends the stream at the broker. Iteration stops after the waiting items."""
        if not self._is_closed:
            self._is_closed = True
            self._wake.set()
            self._on_closed()

    async def _leave(self, *, is_done: bool) -> None:
        self.close()

    @abstractmethod
    async def _start(self) -> None:
        """Asks the broker for the items, if nothing has done so yet."""

    @abstractmethod
    def _on_taken(self) -> None:
        """Resumes reading if the stream is no longer behind."""

    @abstractmethod
    def _on_closed(self) -> None: ...

    def _add(self, items: Iterable[T]) -> None:
        self._waiting.extend(items)
        self._wake.set()

    def _fail(self, error: TidegateError) -> None:
        self._error = error
        self._wake.set()

    async def _wait_for_some(self) -> None:
        if not self._waiting:
            await self._start()
            await self._wait_until(lambda: bool(self._waiting))

    async def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Waits for a condition. Raises StopAsyncIteration if the stream is closed first, or the error that ended
        it."""
        while not is_so():
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
