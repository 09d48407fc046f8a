"""A connection to a broker: the one object with which a program publishes, subscribes and uses queues.

async with connect("tidegate://127.0.0.1:7270") as broker:
    await broker.publish({"station": "28079004", "NO2": 212})
    async for delivery in broker.subscribe("NO2>200"):
        print(delivery.notification)
    await broker.queue("alerts").put({"station": "28079004"})
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, overload
from urllib.parse import urlsplit

import msgspec

from tidegate.client.address import DEFAULT_ADDRESS, Address
from tidegate.client.control import Control
from tidegate.client.durable import DurableSubscription
from tidegate.client.link import LinkOptions, not_open
from tidegate.client.numbered_publisher import NumberedPublisher
from tidegate.client.persistent_filter import FilterTransport
from tidegate.client.persistent_http import HttpTransport
from tidegate.client.persistent_query import PersistentQuery
from tidegate.client.persistent_ssap import SsapTransport
from tidegate.client.persistent_transport import PersistentLink, PersistentTransport
from tidegate.client.publisher import Publisher, PublisherStatistics
from tidegate.client.queue import Queue
from tidegate.client.queue_requests import QueueRequests
from tidegate.client.subscriber import Subscriber, Subscription, WantedFilter
from tidegate.errors import FilterError, Unavailable
from tidegate.filters import Filter
from tidegate.notification import Value
from tidegate.security.publisher_key import make_key


def connect(
    address: str = DEFAULT_ADDRESS,
    *,
    name: str = "client",
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    connect_timeout_s: float = 5.0,
) -> Connection:
    """Returns a connection, for use in `async with`. It sends nothing before the first publish or subscribe.

    `address` may name several brokers of a cluster, as in `tidegate://a:7270,b:7270`. The client uses the first that
    answers, and the next one when that connection is lost.

    `name` is the beginning of the publisher's name, which subscribers see. A random suffix makes each connection
    a publisher of its own. `token` is the broker's token; the default is TIDEGATE_TOKEN of the environment."""
    shown = token if token is not None else os.environ.get("TIDEGATE_TOKEN", "")
    return Connection(LinkOptions(Address.parse_all(address), shown, tls, connect_timeout_s), name)


class Connection:
    """Guarantees that a notification whose publish has returned reaches every subscription that was live before, once
    and in order."""

    def __init__(self, options: LinkOptions, name: str) -> None:
        self._options = options
        self._name = f"{name}-{secrets.token_hex(6)}"
        self._key = make_key()
        self._tasks: asyncio.TaskGroup | None = None
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        self._requests: QueueRequests | None = None
        self._numbered: set[NumberedPublisher] = set()
        self._queries: weakref.WeakSet[PersistentQuery] = weakref.WeakSet()
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._subscriber = Subscriber(self._options, self._tasks)
        # Not the publisher's name: a queue with a filter stores this connection's notifications under that name. It
        # would take a message put under the same name and number for a duplicate.
        self._requests = QueueRequests(self._options, f"{self._name}-puts", self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Returns the messages of unfinished loops to their queues. Then waits until everything published is
        acknowledged, unless the block ends with an error."""
        assert self._tasks is not None
        assert self._subscriber is not None
        assert self._requests is not None
        try:
            await self._requests.finish()
            if kind is None and self._publisher is not None:
                await self._publisher.flush()
        finally:
            tasks, self._tasks = self._tasks, None
            for query in list(self._queries):
                query.close()
            self._subscriber.close()
            self._requests.close()
            for publisher in (self._publisher, *self._numbered):
                if publisher is not None:
                    publisher.close()
            # A closed link ends its own task, so the group has nothing to cancel.
            await tasks.__aexit__(None, None, None)

    async def publish(self, notifications: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Publishes one notification or a list of them, and returns when the broker has acknowledged all.

        Concurrent calls share frames. Raises NotificationError with the first notification that the broker refused, or
        Overloaded (L611) if a full queue did not store one; the others were published."""
        await (await self._publishing()).publish(notifications)

    async def publish_soon(self, notification: Mapping[str, Any]) -> None:
        """Publishes without waiting for the acknowledgement: returns at once while the window has room. `flush`, or
        the end of the connection, waits for the acknowledgements and raises the refusals."""
        await (await self._publishing()).publish_soon(notification)

    async def flush(self) -> None:
        """Waits until everything published so far is acknowledged."""
        if self._tasks is None:
            raise not_open()
        if self._publisher is not None:
            await self._publisher.flush()

    def numbered_publisher(self, name: str, *, key: str = "") -> NumberedPublisher:
        """Returns a publisher with exactly this name, for use in `async with`. The program numbers its notifications,
        so that one that it repeats after a crash is published once.

        `key` is a secret of at least 16 characters, the same at every start of the program. With a key, nobody else can
        use the publisher's numbers; without one, anyone who may publish can."""
        if self._tasks is None:
            raise not_open()
        publisher = NumberedPublisher(self._options, name, key, self._tasks, self._numbered.discard)
        self._numbered.add(publisher)
        return publisher

    @overload
    def subscribe(
        self,
        subscription_filter: str | Filter,
        *,
        policy: str = "drop-oldest",
        context: Mapping[str, Value] | None = None,
    ) -> Subscription: ...

    @overload
    def subscribe(
        self,
        subscription_filter: str | Filter | None = None,
        *,
        name: str,
        policy: str = "block",
        expires_s: float | None = None,
    ) -> DurableSubscription: ...

    def subscribe(
        self,
        subscription_filter: str | Filter | None = None,
        *,
        name: str = "",
        policy: str = "",
        context: Mapping[str, Value] | None = None,
        expires_s: float | None = None,
    ) -> Subscription | DurableSubscription:
        """Returns the matching notifications as an async iterator. Raises FilterError if the filter is invalid.

        `context` holds the values for $name in the filter, as in floor==$floor. `subscription.context(floor=4)`
        replaces values later, atomically.

        `policy` decides what the broker does when this program is slow: drop-oldest, disconnect or block.

        With a `name` the subscription is durable: from the first call on, the broker keeps matching notifications until
        this program or its successor takes them. `policy`, then block or drop-oldest, applies when the queue is full.
        Leave out the filter to resume an existing subscription. The broker drops a durable subscription that nobody has
        read for `expires_s`: 7 days by default, 0 for never."""
        if subscription_filter is None:
            if not name:
                raise FilterError("F101", "there is no filter", "give one, or the name of a durable subscription")
            return DurableSubscription(self._queueing(), name, None, policy or "block")
        wanted = WantedFilter.of(subscription_filter, context or {})
        if name:
            return DurableSubscription(self._queueing(), name, wanted.filter, policy or "block", expires_s)
        return self._subscribing().subscribe(wanted, policy or "drop-oldest")

    def persistent_query(
        self, question: str | Filter, *, address: str = "", control: Control | None = None
    ) -> PersistentQuery:
        """Returns the changes in the result of a SPARQL query as an async iterator that detects losses. `control` paces
        its checks so that the broker stays healthy. The default is the full design of docs/active-control.md.

        `address` is the broker to query, http://… or ssap://…. The default is the HTTP address that this connection's
        broker reports. A Filter queries notifications instead, and so does a text without braces if no address is
        given: every SPARQL query has braces."""
        if self._tasks is None:
            raise not_open()
        query = PersistentQuery(
            self._persistent_transport(question, address),
            control or Control(),
            self._tasks,
            self._options.connect_timeout_s,
        )
        self._queries.add(query)
        return query

    async def subscriptions(self) -> list[dict[str, Any]]:
        """Lists the durable subscriptions with name, filter, policy, last reading and expiry of each."""
        found: list[dict[str, Any]] = msgspec.msgpack.decode(await self._queueing().call("subscriptions", ""))
        return found

    async def unsubscribe(self, name: str) -> None:
        """Ends a durable subscription and deletes its waiting notifications."""
        await self._queueing().call("unsubscribe", name)

    def queue(self, name: str) -> Queue:
        """Returns a handle for a logical queue, without asking the broker. Its `create` creates the queue."""
        return Queue(self._queueing(), name)

    async def queues(self) -> list[dict[str, Any]]:
        """Lists the queues of the broker: name and settings of each."""
        found: list[dict[str, Any]] = msgspec.msgpack.decode(await self._queueing().call("list", ""))
        return found

    async def status(self) -> dict[str, Any]:
        """Returns the broker's configuration, epoch and load."""
        return await self._subscribing().status()

    def statistics(self) -> PublisherStatistics | None:
        """Returns the counts of what this connection has published; None before the first publish."""
        return self._publisher.statistics() if self._publisher is not None else None

    def _persistent_transport(self, question: str | Filter, address: str) -> PersistentTransport:
        assert self._tasks is not None
        if isinstance(question, Filter) or (not address and "{" not in question):
            return FilterTransport(self._subscribing(), _as_filter(question), self._tasks)
        if not address:
            return _BrokersHttp(self, question, self._options)
        transport = SsapTransport if address.startswith("ssap:") else HttpTransport
        return transport(address, question, self._options.token, self._options.tls)

    async def _publishing(self) -> Publisher:
        if self._tasks is None:
            raise not_open()
        if self._publisher is not None:
            return self._publisher
        async with self._opening:
            if self._publisher is None:
                publisher = Publisher(self._options, self._name, self._key)
                await publisher.start(self._tasks)
                self._publisher = publisher
        return self._publisher

    def _subscribing(self) -> Subscriber:
        if self._subscriber is None or self._tasks is None:
            raise not_open()
        return self._subscriber

    def _queueing(self) -> QueueRequests:
        if self._requests is None or self._tasks is None:
            raise not_open()
        return self._requests


def _as_filter(question: str | Filter) -> Filter:
    return question if isinstance(question, Filter) else Filter.parse(question)


class _BrokersHttp:
    """Opens persistent queries over the HTTP listener of a connection's own broker. Asks the broker for its port each
    time, because it may differ after a restart."""

    is_resumable = True

    def __init__(self, connection: Connection, question: str, options: LinkOptions) -> None:
        self._connection = connection
        self._question = question
        self._options = options

    async def open(self, subscription: str, sequence: int) -> PersistentLink:
        http = urlsplit((await self._connection.status()).get("addresses", {}).get("http", ""))
        if not http.port:
            raise Unavailable("U740", "the broker does not report its HTTP address", "pass it: address='http://…'")
        # The broker may report an address that this program cannot reach: prefer the host that the program itself uses.
        # With several addresses it is unknown which broker answered, so the reported host is all there is.
        addresses = self._options.addresses
        host = addresses[0].host if len(addresses) == 1 else http.hostname or ""
        address = f"{http.scheme}://{f'[{host}]' if ':' in host else host}:{http.port}"
        transport = HttpTransport(address, self._question, self._options.token, self._options.tls)
        return await transport.open(subscription, sequence)
