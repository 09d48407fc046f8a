"""The client for programs without an event loop: the same calls, blocking. A thin face over one loop in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from tidegate.client.address import DEFAULT_ADDRESS
from tidegate.client.connection import Connection, connect
from tidegate.client.link import not_open
from tidegate.client.subscriber import Delivery, Subscription
from tidegate.errors import Unavailable
from tidegate.filters import Filter

T = TypeVar("T")


def connect_sync(address: str = DEFAULT_ADDRESS, **options: Any) -> SyncConnection:
    """As `connect`, with the same options, for use in a plain `with`."""
    return SyncConnection(connect(address, **options))


class _Abandoned(Exception):
    """The block ended with an error: nothing more is waited for."""


class SyncConnection:
    """Calls may come from any thread; each blocks until its answer is there."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self._is_abandoned = False
        self._life: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tidegate-client", daemon=True)
        self._thread.start()
        is_open: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._life = asyncio.run_coroutine_threadsafe(self._live(is_open), self._loop)
        is_open.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the acknowledgement of what was published, unless the block ends with an error."""
        assert self._life is not None
        assert self._loop is not None
        loop = self._loop
        try:
            self._is_abandoned = kind is not None
            loop.call_soon_threadsafe(self._closing.set)
            self._life.result()
        finally:
            self._loop = None
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()

    def publish(self, notifications: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self.call(self._connection.publish(notifications))

    def publish_soon(self, notification: Mapping[str, Any]) -> None:
        self.call(self._connection.publish_soon(notification))

    def flush(self) -> None:
        self.call(self._connection.flush())

    def subscribe(self, subscription_filter: str | Filter, *, policy: str = "drop-oldest") -> SyncSubscription:
        """An iterator of deliveries; live when this returns."""
        subscription = self._connection.subscribe(subscription_filter, policy=policy)
        self.call(subscription.__aenter__())
        return SyncSubscription(self, subscription)

    def status(self) -> dict[str, Any]:
        return self.call(self._connection.status())

    async def _live(self, is_open: concurrent.futures.Future[None]) -> None:
        """The connection lives in one task, as its task group demands."""
        with contextlib.suppress(_Abandoned):
            async with self._connection:
                is_open.set_result(None)
                await self._closing.wait()
                if self._is_abandoned:
                    raise _Abandoned

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it on the connection's loop; any thread may ask."""
        if self._loop is None:
            coroutine.close()
            raise not_open()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class SyncSubscription:
    """Iterates over deliveries as they come; `close`, from another thread, ends the iteration."""

    def __init__(self, connection: SyncConnection, subscription: Subscription) -> None:
        self._connection = connection
        self._subscription = subscription

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Delivery]:
        while True:
            try:
                yield from self._connection.call(self._subscription.take())
            except StopAsyncIteration:
                return

    def take(self, timeout_s: float | None = None) -> list[Delivery]:
        """All deliveries that wait, at least one; TimeoutError when none comes in time."""

        async def within() -> list[Delivery]:
            async with asyncio.timeout(timeout_s):
                return await self._subscription.take()

        return self._connection.call(within())

    def close(self) -> None:
        async def close() -> None:
            self._subscription.close()

        with contextlib.suppress(Unavailable):  # the end of the connection has closed it already
            self._connection.call(close())
