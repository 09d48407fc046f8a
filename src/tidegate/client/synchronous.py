"""The client for programs without an event loop: the same calls, blocking. A thin layer over one loop in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from tidegate.client.address import DEFAULT_ADDRESS
from tidegate.client.connection import Connection, connect
from tidegate.client.control import Control
from tidegate.client.durable import DurableSubscription
from tidegate.client.link import not_open
from tidegate.client.message import Message
from tidegate.client.persistent_query import PersistentQuery, PersistentQueryStatistics
from tidegate.client.persistent_result import Change
from tidegate.client.queue import READ_MESSAGES_MAX, Queue
from tidegate.client.subscriber import Delivery, Subscription
from tidegate.errors import Unavailable
from tidegate.filters import Filter
from tidegate.messages import Enqueued, Level, NewMessage, Settled
from tidegate.notification import Value

T = TypeVar("T")
S = TypeVar("S", bound=Subscription | DurableSubscription | PersistentQuery)


def connect_sync(address: str = DEFAULT_ADDRESS, **options: Any) -> SyncConnection:
    """Returns a blocking connection, for use in a plain `with`. The options are those of `connect`."""
    return SyncConnection(connect(address, **options))


class _Abandoned(Exception):
    """Ends the connection without waiting for acknowledgements, because the block ended with an error."""


class SyncConnection:
    """A blocking connection. Any thread may call it; each call blocks until its answer arrives. For methods of
    `connection` that are missing here, use `call`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
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
        self.call(self.connection.publish(notifications))

    def publish_soon(self, notification: Mapping[str, Any]) -> None:
        self.call(self.connection.publish_soon(notification))

    def flush(self) -> None:
        self.call(self.connection.flush())

    def subscribe(
        self,
        subscription_filter: str | Filter | None = None,
        *,
        name: str = "",
        policy: str = "",
        context: Mapping[str, Value] | None = None,
        expires_s: float | None = None,
    ) -> SyncSubscription:
        """Returns an iterator of deliveries, whose subscription is live. With a name it is durable."""

        async def begin() -> Subscription | DurableSubscription:
            given = (("name", name), ("policy", policy), ("context", context))
            options: dict[str, Any] = {key: value for key, value in given if value}
            if expires_s is not None:
                options["expires_s"] = expires_s
            subscription: Subscription | DurableSubscription
            subscription = self.connection.subscribe(subscription_filter, **options)
            return await subscription.__aenter__()

        return SyncSubscription(self, self.call(begin()))

    def persistent_query(
        self, question: str | Filter, *, address: str = "", control: Control | None = None
    ) -> SyncPersistentQuery:
        """Returns an iterator of changes, whose query is open."""

        async def begin() -> PersistentQuery:
            query = self.connection.persistent_query(question, address=address, control=control)
            return await query.__aenter__()

        return SyncPersistentQuery(self, self.call(begin()))

    def subscriptions(self) -> list[dict[str, Any]]:
        return self.call(self.connection.subscriptions())

    def unsubscribe(self, name: str) -> None:
        self.call(self.connection.unsubscribe(name))

    def queue(self, name: str) -> SyncQueue:
        return SyncQueue(self, self.connection.queue(name))

    def queues(self) -> list[dict[str, Any]]:
        return self.call(self.connection.queues())

    def status(self) -> dict[str, Any]:
        return self.call(self.connection.status())

    async def _live(self, is_open: concurrent.futures.Future[None]) -> None:
        """Holds the connection open. One task must enter and exit it, as its task group requires."""
        with contextlib.suppress(_Abandoned):
            async with self.connection:
                is_open.set_result(None)
                await self._closing.wait()
                if self._is_abandoned:
                    raise _Abandoned

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the connection's loop and returns its result. Any thread may call this."""
        return self.start(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine on the connection's loop and returns its future."""
        if self._loop is None:
            coroutine.close()
            raise not_open()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class _SyncStream(Generic[S]):
    """A blocking stream. `close`, called from another thread, ends the iteration."""

    def __init__(self, connection: SyncConnection, stream: S) -> None:
        self._connection = connection
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        async def close() -> None:
            self._stream.close()

        with contextlib.suppress(Unavailable):  # the end of the connection has closed it already
            self._connection.call(close())


class SyncSubscription(_SyncStream[Subscription | DurableSubscription]):
    """Iterates over deliveries as they arrive."""

    def __iter__(self) -> Iterator[Delivery]:
        while True:
            try:
                yield from self._connection.call(self._stream.take())
            except StopAsyncIteration:
                return

    def take(self, timeout_s: float | None = None) -> list[Delivery]:
        """Waits for deliveries and returns all of them, at least one. Raises TimeoutError if none arrives in time."""

        async def within() -> list[Delivery]:
            async with asyncio.timeout(timeout_s):
                return await self._stream.take()

        return self._connection.call(within())

    def context(self, **values: Value) -> None:
        """Replaces values as `Subscription.context` does. Durable subscriptions have no context."""
        assert isinstance(self._stream, Subscription)
        self._connection.call(self._stream.context(**values))


class SyncPersistentQuery(_SyncStream[PersistentQuery]):
    """Iterates over changes as they arrive, while checks continue in the background."""

    def __iter__(self) -> Iterator[Change]:
        async def take() -> Change | None:
            return await anext(self._stream, None)

        while (change := self._connection.call(take())) is not None:
            yield change

    def statistics(self) -> PersistentQueryStatistics:
        return self._stream.statistics()


class SyncQueue:
    """A blocking `Queue`. If a loop is left early, its last message is delivered again."""

    def __init__(self, connection: SyncConnection, queue: Queue) -> None:
        self.name = queue.name
        self._connection = connection
        self._queue = queue

    def create(self, **settings: Any) -> dict[str, Any]:
        return self._connection.call(self._queue.create(**settings))

    def drop(self) -> None:
        self._connection.call(self._queue.drop())

    def describe(self) -> dict[str, Any]:
        return self._connection.call(self._queue.describe())

    def stats(self) -> dict[str, Any]:
        return self._connection.call(self._queue.stats())

    def levels(self) -> list[Level]:
        return self._connection.call(self._queue.levels())

    def redrive(self, max: int = READ_MESSAGES_MAX) -> int:  # noqa: A002
        return self._connection.call(self._queue.redrive(max))

    def put(self, bodies: Any, **options: Any) -> Enqueued:
        return self._connection.call(self._queue.put(bodies, **options))

    def put_messages(self, messages: Sequence[NewMessage], *, wait_s: float = 0.0) -> Enqueued:
        return self._connection.call(self._queue.put_messages(messages, wait_s=wait_s))

    def put_batch(
        self, messages: Sequence[NewMessage | msgspec.Raw], *, producer: str, number: int, wait_s: float = 0.0
    ) -> Enqueued:
        return self._connection.call(self._queue.put_batch(messages, producer=producer, number=number, wait_s=wait_s))

    def take(self, **options: Any) -> list[Message]:
        return self._connection.call(self._queue.take(**options))

    def delete(self, messages: Message | Iterable[Message]) -> Settled:
        return self._connection.call(self._queue.delete(messages))

    def extend(self, messages: Message | Iterable[Message], visibility_s: float = 30.0) -> Settled:
        return self._connection.call(self._queue.extend(messages, visibility_s))

    def release(self, messages: Message | Iterable[Message], delay_s: float = 0.0) -> Settled:
        return self._connection.call(self._queue.release(messages, delay_s))

    def read(self, physical: int, start: int, stop: int, max: int = READ_MESSAGES_MAX) -> list[Message]:  # noqa: A002
        return self._connection.call(self._queue.read(physical, start, stop, max))

    def delete_below(self, physical: int, sequence: int) -> int:
        return self._connection.call(self._queue.delete_below(physical, sequence))

    def __iter__(self) -> Iterator[Message]:
        messages = self._queue.messages()
        try:
            while True:
                yield self._connection.call(messages.__anext__())
        finally:
            with contextlib.suppress(Unavailable):  # the end of the connection has already returned them
                self._connection.call(messages.finish())
