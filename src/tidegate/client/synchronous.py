"""The client for programs without an event loop: the same calls, blocking. A thin face over one loop in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from tidegate.client.connection import Connection, connect
from tidegate.client.subscriber import Delivery, Subscription

T = TypeVar("T")


def connect_sync(address: str = "tidegate://127.0.0.1:7270", **options: Any) -> SyncConnection:
    """As `connect`, with the same options, for use in a plain `with`."""
    return SyncConnection(address, options)


class SyncConnection:
    """Calls may come from any thread; each blocks until its answer is there."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        self._address = address
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tidegate-client", daemon=True)
        self._connection: Connection | None = None
        self._closing = asyncio.Event()
        self._life: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        is_open: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._life = asyncio.run_coroutine_threadsafe(self._live(is_open), self._loop)
        is_open.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._life is not None
        try:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._life.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def publish(self, notifications: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self._call(self._open().publish(notifications))

    def publish_soon(self, notification: Mapping[str, Any]) -> None:
        self._call(self._open().publish_soon(notification))

    def flush(self) -> None:
        self._call(self._open().flush())

    def subscribe(self, subscription_filter: str, *, policy: str = "drop-oldest") -> SyncSubscription:
        """An iterator of deliveries; live when this returns."""
        subscription = self._open().subscribe(subscription_filter, policy=policy)
        self._call(subscription.__aenter__())
        return SyncSubscription(self, subscription)

    def status(self) -> dict[str, Any]:
        return self._call(self._open().status())

    async def _live(self, is_open: concurrent.futures.Future[None]) -> None:
        """The connection lives in one task, as its task group demands."""
        try:
            async with connect(self._address, **self._options) as connection:
                self._connection = connection
                is_open.set_result(None)
                await self._closing.wait()
        except BaseException as error:
            if not is_open.done():
                is_open.set_exception(error)
            raise
        finally:
            self._connection = None

    def _open(self) -> Connection:
        assert self._connection is not None, "use it inside: with connect_sync(…) as broker"
        return self._connection

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
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
                yield from self._connection._call(self._subscription.take())
            except StopAsyncIteration:
                return

    def take(self, timeout_s: float | None = None) -> list[Delivery]:
        """All deliveries that wait, at least one; TimeoutError when none comes in time."""

        async def within() -> list[Delivery]:
            async with asyncio.timeout(timeout_s):
                return await self._subscription.take()

        return self._connection._call(within())

    def close(self) -> None:
        self._connection._loop.call_soon_threadsafe(self._subscription.close)
