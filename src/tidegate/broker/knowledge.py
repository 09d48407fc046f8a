"""The semantic information broker: opens the knowledge base, serves it over SSAP, and publishes its changes.

    SSAP · HTTP ─► knowledge base ─► delta ─► notifications {s, p, o, change, graph} ─► Connection Point ─► …

Every committed change is published as notifications, one per triple, in the order of the changes. Filters, queues and
pipelines therefore see the graph as they see sensors. The publisher gets a new name at each start, because its sequence
numbers start again.

A client that changes the graph never waits for subscribers. When too many published changes are in flight in the
layers, the broker refuses further changes until there is room (L654). A change is confirmed once the graph has stored
it with the configured durability. If the broker is killed at that moment, the change may not have been published.

What may go wrong: the directory of the graph is in use by another process, damaged, or has lost its content (K107).
The broker then does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from tidegate.broker.mirror import GraphMirror, NotificationMirror
from tidegate.config import Config
from tidegate.errors import Overloaded, Refusals, TidegateError
from tidegate.frames import join_maps
from tidegate.hosts.embedded_host import BrokerHost
from tidegate.hosts.session import Session
from tidegate.knowledge import DIRECTORY
from tidegate.knowledge.evaluation_schedule import EvaluationBudget, EvaluationStatistics
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.knowledge_base import KnowledgeBase
from tidegate.knowledge.named_queries import NamedQueries
from tidegate.knowledge.persistent_query import PersistentQueriesStatistics, notification_of
from tidegate.knowledge.request_pool import PoolStatistics
from tidegate.knowledge.store_files import Damaged
from tidegate.knowledge.store_identity import check_identity, write_identity
from tidegate.layers.batch import BATCH_NOTIFICATIONS_MAX, BatchReader
from tidegate.layers.session_events import PublishRefused, SessionEvent, refused_by_queue
from tidegate.listeners.connections import ConnectionStatistics
from tidegate.listeners.ssap import SsapListener
from tidegate.notification import Value
from tidegate.security.publisher_key import make_key, whole_name

log = logging.getLogger(__name__)

# Four texts of this length fit into a notification, whatever their characters. Longer texts are truncated.
TEXT_CHARACTERS_MAX: Final = 16_000
BATCH_BYTES: Final = 1024 * 1024
RETRY_AFTER_S: Final = 0.5

_encode = msgspec.msgpack.Encoder().encode


class StoreStatistics(msgspec.Struct, frozen=True):
    is_writable: bool
    failures: int  # changes and syncs that failed on the disk
    damages: int  # reads that found a damaged file
    syncs: int
    unsynced: int  # changes that wait for a sync


class KnowledgeStatistics(msgspec.Struct, frozen=True):
    triples: int
    connections: int
    spread_s: float  # of the last change
    queries: PersistentQueriesStatistics
    evaluations: EvaluationStatistics
    pool: PoolStatistics
    store: StoreStatistics


class ChangePublisher:
    """Publishes deltas as notifications, together with the notifications that the mirror derives from them.

    All changes of one event-loop iteration travel as one batch, because a batch costs about as much as a single
    notification. The publisher holds a session open, so that the Connection Point never forgets its sequence numbers.
    """

    def __init__(self, host: BrokerHost, name: str, mirror: NotificationMirror) -> None:
        self._host = host
        self._mirror = mirror
        self._reader = BatchReader()
        self._last = 0
        self._waiting: list[Delta] = []
        self._session = Session(host, self)
        self._session.open()
        self._session.attach_publisher(name)

    def on_event(self, event: SessionEvent) -> None:
        """Logs changes that a full queue refused. Acknowledgements are ignored: `check_room` limits what is in
        flight."""
        if isinstance(event, PublishRefused):
            for queue in sorted({refused.queue for refused in event.refused}):
                log.warning("a published change of the knowledge base was refused: %s", refused_by_queue(queue))

    def check_room(self) -> None:
        if self._host.is_congested(self._session.publisher):
            raise Overloaded(
                "L654",
                "too many published changes of the knowledge base are not delivered yet",
                "retry in a moment, or find the subscriber that blocks",
                retry_after_s=RETRY_AFTER_S,
            )

    def publish(self, delta: Delta) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._publish_waiting)
        self._waiting.append(delta)

    def _publish_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for some in _batches(notification for delta in waiting for notification in self._notifications(delta)):
            batch = self._reader.read_array(self._session.publisher, self._last + 1, join_maps(some))
            self._last = batch.last
            self._session.submit([batch], batch.last)

    def _notifications(self, delta: Delta) -> Iterator[dict[str, Value]]:
        """Yields the removed triples first, then the added ones, then the mirror's notifications."""
        for triples, change in ((delta.removed, "removed"), (delta.added, "added")):
            for triple in triples:
                yield notification_of(triple, change, TEXT_CHARACTERS_MAX)
        yield from self._mirror.notifications(delta)


class SemanticBroker:
    """The knowledge base of a broker with its SSAP listener.

    Call `open`, then `start`. In between, the HTTP listener gets the knowledge base and its named queries.
    """

    def __init__(self, config: Config, token: str | None, host: BrokerHost, incarnation: str) -> None:
        self._config = config
        self._token = token
        self._host = host
        self._name = whole_name(f"knowledge-{incarnation}", make_key())
        self.refusals = Refusals()
        self._listener: SsapListener | None = None
        self._triples = 0

    async def open(self) -> NamedQueries:
        directory = Path(self._config.data) / DIRECTORY
        check_identity(directory)
        graph = await asyncio.to_thread(Graph, directory)
        if graph.failure is None:
            write_identity(directory)
        else:
            log.warning("the knowledge base is read-only: %s", graph.failure)
        rules = self._config.mirror
        publisher = ChangePublisher(self._host, self._name, NotificationMirror(rules))
        knowledge = KnowledgeBase(
            graph,
            publish=publisher.publish,
            check_room=publisher.check_room,
            service_kps=self._config.service_kps,
            refusals=self.refusals,
            durability=self._config.knowledge_durability,
            budget=EvaluationBudget(share=self._config.knowledge_evaluation_share),
        )
        await GraphMirror(rules, self._host, knowledge, self._name).start()
        self._listener = SsapListener(
            knowledge,
            self._token,
            self._config.connections_max,
            hello_timeout_s=self._config.hello_timeout_s,
            idle_timeout_s=self._config.idle_timeout_s,
        )
        named = NamedQueries(directory / "queries", knowledge)
        await named.open()
        return named

    async def start(self, tls: ssl.SSLContext | None) -> int:
        """Starts the SSAP listener and returns its port."""
        assert self._listener is not None
        return await self._listener.start(self._config.bind, self._config.ssap_port, tls)

    def tick(self, now_s: float) -> None:
        assert self._listener is not None
        self._listener.tick(now_s)

    def statistics(self) -> KnowledgeStatistics:
        assert self._listener is not None
        knowledge = self._listener.knowledge
        graph, confirmations = knowledge.graph, knowledge.confirmations
        with contextlib.suppress(Damaged):  # then the last known count is reported
            self._triples = len(graph)
        return KnowledgeStatistics(
            triples=self._triples,
            connections=len(self._listener.connections),
            spread_s=knowledge.spread_s,
            queries=knowledge.queries.statistics(),
            evaluations=knowledge.schedule.statistics(),
            pool=knowledge.pool_statistics(),
            store=StoreStatistics(
                is_writable=graph.failure is None,
                failures=graph.failures,
                damages=graph.damages,
                syncs=confirmations.syncs,
                unsynced=len(confirmations),
            ),
        )

    def connections(self) -> ConnectionStatistics:
        """Returns the statistics of the SSAP connections."""
        assert self._listener is not None
        return self._listener.places.statistics()

    def status(self) -> dict[str, Any]:
        """Returns the statistics in the form that the broker's status shows."""
        shown: dict[str, Any] = msgspec.to_builtins(self.statistics())
        return shown

    async def stop(self) -> None:
        """Closes the SSAP listener, which notifies its subscribers, and stops the SPARQL workers."""
        assert self._listener is not None
        await self._listener.stop()
        await self._listener.knowledge.stop()

    async def flush(self) -> None:
        """Writes all changes to the disk. If that fails, logs a warning and returns."""
        assert self._listener is not None
        try:
            await asyncio.to_thread(self._listener.knowledge.graph.flush)
        except TidegateError as error:
            log.warning("the knowledge base could not flush its changes before closing: %s", error)


def _batches(notifications: Iterable[dict[str, Value]]) -> Iterator[list[bytes]]:
    """Encodes notifications and groups them into batches within the bounds of count and size."""
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
