"""The semantic information broker: the knowledge base of a broker, who reaches it, and its changes on the one path.

    SSAP · HTTP ─► knowledge base ─► delta ─► notifications {s, p, o, change, graph} ─► Connection Point ─► …

Every committed change is published as notifications, one a triple, in the order of the changes; so filters, queues and
pipelines see the graph as they see sensors. The publisher's name is another after each start, since its numbers begin
anew. Nobody who changes the graph waits for subscribers: when the layers have too much of it under way, further changes
are refused until there is room (L654). A change is confirmed when the graph has it; a broker that is killed at that
moment may not have published it.

What may go wrong here: the directory of the graph is in use by another process; then the broker does not start.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from tidegate.config import Config
from tidegate.errors import Overloaded
from tidegate.frames import join_maps
from tidegate.knowledge import DIRECTORY
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.knowledge_base import KnowledgeBase
from tidegate.knowledge.named_queries import NamedQueries
from tidegate.knowledge.persistent_query import PersistentQueriesStatistics, notification_of
from tidegate.knowledge.request_pool import PoolStatistics
from tidegate.layers.batch import BATCH_NOTIFICATIONS_MAX, BatchReader
from tidegate.layers.embedded_host import BrokerHost
from tidegate.layers.frames import LayerFrame
from tidegate.listeners.ssap import SsapListener
from tidegate.mirror import GraphMirror, NotificationMirror
from tidegate.notification import Value

# Four texts of so many characters are within the bounds of a notification, whatever they are; longer ones are cut.
TEXT_CHARACTERS_MAX: Final = 16_000
BATCH_BYTES: Final = 1024 * 1024
RETRY_AFTER_S: Final = 0.5

_encode = msgspec.msgpack.Encoder().encode


class KnowledgeStatistics(msgspec.Struct, frozen=True):
    triples: int
    connections: int
    spread_s: float  # of the last change
    queries: PersistentQueriesStatistics
    pool: PoolStatistics


class ChangePublisher:
    """Deltas as notifications, and what a mirror makes of them besides. The changes of one turn of the event loop
    travel together, as a batch costs about as much as a notification alone. It has a session, so that the Connection
    Point never forgets its numbers."""

    def __init__(self, host: BrokerHost, name: str, mirror: NotificationMirror) -> None:
        self._host = host
        self._mirror = mirror
        self._point = host.connection_point
        self._name = name
        self._reader = BatchReader()
        self._last = 0
        self._waiting: list[Delta] = []
        self._host.carry(self._point.attach_publisher(host.open_session(self), name)[1])

    def on_frame(self, frame: LayerFrame) -> None:
        """Acknowledgements, which nobody waits for: `check_room` looks at what is under way."""

    def check_room(self) -> None:
        if self._point.is_congested(self._name):
            raise Overloaded(
                "L654",
                "the changes of the knowledge base that were published are not delivered yet",
                "change it again in a moment, or find the subscriber that blocks",
                retry_after_s=RETRY_AFTER_S,
            )

    def publish(self, delta: Delta) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._publish_waiting)
        self._waiting.append(delta)

    def _publish_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for some in _batches(notification for delta in waiting for notification in self._notifications(delta)):
            batch = self._reader.read_array(self._name, self._last + 1, join_maps(some))
            self._last = batch.last
            self._host.carry(self._point.submit(self._name, [batch], batch.last))

    def _notifications(self, delta: Delta) -> Iterator[dict[str, Value]]:
        """Removed triples first, then those that were added, then the mirror's."""
        for triples, change in ((delta.removed, "removed"), (delta.added, "added")):
            for triple in triples:
                yield notification_of(triple, change, TEXT_CHARACTERS_MAX)
        yield from self._mirror.notifications(delta)


class SemanticBroker:
    """To be opened, then started: in between, other listeners are given the knowledge base and its named queries."""

    def __init__(self, config: Config, token: str | None, host: BrokerHost, incarnation: str) -> None:
        self._config = config
        self._token = token
        self._host = host
        self._name = f"knowledge-{incarnation}"
        self._listener: SsapListener | None = None

    async def open(self) -> NamedQueries:
        directory = Path(self._config.data) / DIRECTORY
        graph = await asyncio.to_thread(Graph, directory)
        rules = self._config.mirror
        publisher = ChangePublisher(self._host, self._name, NotificationMirror(rules))
        knowledge = KnowledgeBase(
            graph,
            publish=publisher.publish,
            check_room=publisher.check_room,
            service_kps=self._config.service_kps,
        )
        await GraphMirror(rules, self._host, knowledge, self._name).start()
        self._listener = SsapListener(knowledge, self._token, self._config.connections_max)
        named = NamedQueries(directory / "queries", knowledge)
        await named.open()
        return named

    async def start(self, tls: ssl.SSLContext | None) -> int:
        """Listens; returns the port of SSAP."""
        assert self._listener is not None
        return await self._listener.start(self._config.bind, self._config.ssap_port, tls)

    def tick(self, now_s: float) -> None:
        assert self._listener is not None
        self._listener.tick(now_s)

    def statistics(self) -> KnowledgeStatistics:
        assert self._listener is not None
        knowledge = self._listener.knowledge
        return KnowledgeStatistics(
            triples=len(knowledge.graph),
            connections=len(self._listener.connections),
            spread_s=knowledge.spread_s,
            queries=knowledge.queries.statistics(),
            pool=knowledge.pool_statistics(),
        )

    def status(self) -> dict[str, Any]:
        """The statistics, as the broker's status shows them."""
        shown: dict[str, Any] = msgspec.to_builtins(self.statistics())
        return shown

    async def stop(self) -> None:
        """Takes no more over SSAP, and tells the subscribers there that it goes; SPARQL is answered no more."""
        assert self._listener is not None
        await self._listener.stop()
        await self._listener.knowledge.stop()

    async def flush(self) -> None:
        """Returns when all changes are on the disk."""
        assert self._listener is not None
        await asyncio.to_thread(self._listener.knowledge.graph.flush)


def _batches(notifications: Iterable[dict[str, Value]]) -> Iterator[list[bytes]]:
    """Encoded notifications, as many together as travel together."""
    some: list[bytes] = []
    size_bytes = 0
    for encoded in map(_encode, notifications):
        if len(some) == BATCH_NOTIFICATIONS_MAX or (some and size_bytes + len(encoded) > BATCH_BYTES):
            yield some
            some, size_bytes = [], 0
        some.append(encoded)
        size_bytes += len(encoded)
    if some:
        yield some
