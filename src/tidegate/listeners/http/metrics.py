"""Metrics for Prometheus, read at each scrape from the `statistics()` of slices, connections, queues and the knowledge
base. The hot path only increments integers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from tidegate.queues.logical_queues import LogicalQueues
from tidegate.queues.statistics import QueueStatistics

# (layer, statistic) -> (metric, help). A name that ends in _total is a counter, any other a gauge.
METRICS: Final[dict[tuple[str, str], tuple[str, str]]] = {
    ("connection_point", "accepted"): ("notifications_accepted_total", "Notifications accepted from publishers"),
    ("connection_point", "duplicates"): (
        "notifications_duplicate_total",
        "Duplicate notifications that publishers sent",
    ),
    ("connection_point", "refused"): ("notifications_refused_total", "Invalid notifications that were refused"),
    ("connection_point", "refused_by_queues"): (
        "notifications_refused_by_queues_total",
        "Notifications that full queues did not store",
    ),
    ("connection_point", "delivered"): ("deliveries_total", "Notifications put into outboxes"),
    ("connection_point", "dropped"): ("deliveries_dropped_total", "Deliveries dropped for slow subscribers"),
    ("connection_point", "disconnected"): ("sessions_disconnected_total", "Sessions ended by the broker"),
    ("connection_point", "sessions"): ("sessions", "Open sessions"),
    ("connection_point", "subscriptions"): ("subscriptions", "Live subscriptions"),
    ("connection_point", "publishers"): ("publishers", "Publishers remembered"),
    ("connection_point", "outbox_notifications"): ("outbox_notifications", "Notifications waiting in outboxes"),
    ("connection_point", "outbox_bytes"): ("outbox_bytes", "Bytes waiting in outboxes"),
    ("connection_point", "bytes_under_way"): ("bytes_under_way", "Bytes not yet acknowledged to publishers"),
    ("connection_point", "blocked_outboxes"): ("outboxes_blocked", "Full outboxes that slow down their publishers"),
    ("connection_point", "filter_bytes"): ("subscription_bytes", "Bytes charged for the filters of subscriptions"),
    ("connection_point", "publisher_bytes"): ("publisher_bytes", "Bytes charged for remembered publishers"),
    ("connection_point", "publishers_forgotten"): (
        "publishers_forgotten_total",
        "Idle publishers forgotten to make room for others",
    ),
    ("access_point", "batches"): ("batches_total", "Batches that entered the layers"),
    ("access_point", "unacknowledged_batches"): ("batches_unacknowledged", "Batches in flight in the layers"),
    ("matcher", "notifications"): ("notifications_matched_total", "Notifications matched"),
    ("matcher", "matches"): ("matches_total", "Subscriptions satisfied, over all notifications"),
    ("matcher", "filters"): ("filters", "Distinct filters in the index"),
    ("matcher", "index_bytes"): ("index_bytes", "Allocated size of the index's arrays"),
    ("matcher", "index_plans"): ("index_plans_total", "Number of times the index was replanned"),
    ("matcher", "entries_scanned"): ("index_entries_scanned_total", "Index entries tested against notifications"),
    ("matcher", "entries_verified"): ("index_entries_verified_total", "Filters compared in full"),
    ("exit_point", "incomplete_batches"): ("batches_incomplete", "Batches waiting for a Matcher"),
    ("queue_point", "bindings"): ("queue_bindings", "Queues bound to a filter"),
    ("queue_point", "notifications"): (
        "notifications_queued_total",
        "Notifications that matched the filter of a queue",
    ),
    ("queue_point", "unacknowledged_batches"): ("queue_batches_unacknowledged", "Batches in flight to queues"),
    ("queues", "near_their_bound"): ("queues_near_their_bound", "Queues that are at least 80 % full"),
    ("queues", "holding_back"): ("queues_holding_back", "Full queues that hold back their publishers"),
    ("queues", "overflowing"): ("queues_overflowing", "Full queues that refuse or drop notifications"),
    ("queues", "expired"): ("queues_expired_total", "Queues and subscriptions dropped because no client read them"),
}

# statistic of a queue -> (metric, help), each with the label `queue`.
QUEUE_METRICS: Final[dict[str, tuple[str, str]]] = {
    "messages": ("messages", "Messages in the queue"),
    "bytes": ("bytes", "Bytes in the queue"),
    "waiting": ("waiting", "Messages that can be leased"),
    "leased": ("leased", "Messages that are leased"),
    "parked": ("parked", "Dequeue requests waiting for messages"),
    "dead_letters": ("dead_letters", "Messages in its dead-letter queue"),
    "oldest_age_s": ("oldest_age_seconds", "Age of the oldest message"),
    "sleep_s": ("sleep_seconds", "Sleep of a dequeue request that finds no messages now"),
    "hit_rate": ("hit_rate", "Fraction of dequeue attempts on physical queues that returned messages"),
    "messages_a_hit": ("messages_per_hit", "Mean number of messages of an attempt that returned any"),
    "predicted_cost": ("predicted_cost", "Predicted load of the store, as a fraction of one core"),
    "requests": ("requests_total", "Dequeue requests"),
    "hits": ("hits_total", "Dequeue attempts on physical queues that returned messages"),
    "misses": ("misses_total", "Dequeue attempts on physical queues that returned none"),
    "enqueued": ("enqueued_total", "Messages enqueued"),
    "duplicates": ("duplicates_total", "Duplicate messages that were not stored again"),
    "refused": ("refused_total", "Messages refused because the queue was full"),
    "dropped": ("dropped_total", "Oldest messages dropped to make room"),
    "delivered": ("delivered_total", "Messages leased to consumers"),
    "deleted": ("deleted_total", "Messages deleted by consumers"),
    "redelivered": ("redelivered_total", "Deliveries after the first"),
    "expired": ("expired_total", "Leases that expired before their messages were deleted"),
    "dead_lettered": ("dead_lettered_total", "Messages moved to the dead-letter queue"),
    "expired_messages": ("expired_messages_total", "Messages removed because they exceeded the queue's lifetime"),
    "fill_ratio": ("fill_ratio", "Used fraction of the queue's bound, in messages or bytes"),
    "holding_back_s": (
        "holding_back_seconds",
        "How long the queue has been holding back its publishers, 0 if it is not",
    ),
    "held_back_s": ("held_back_seconds_total", "How long the queue held back its publishers in earlier periods"),
    "is_overflowing": ("overflowing", "1 while the queue refuses or drops messages that do not fit"),
    "notifications_refused": ("notifications_refused_total", "Notifications refused to their publishers after block_s"),
    "notifications_dropped": ("notifications_dropped_total", "Notifications not stored after block_s"),
    "corrupt": ("corrupt_total", "Corrupt records that were set aside"),
    "unreachable": ("unreachable", "Messages that are counted but cannot be read: run tidegate queue verify"),
}


# statistic of the knowledge base -> (metric, help)
KNOWLEDGE_METRICS: Final[dict[tuple[str, ...], tuple[str, str]]] = {
    ("triples",): ("triples", "Triples in the graph"),
    ("connections",): ("connections", "Open SSAP connections"),
    ("queries", "subscriptions"): ("subscriptions", "Subscriptions of persistent queries"),
    ("queries", "queries"): ("queries_open", "Distinct persistent queries"),
    ("queries", "stale"): ("queries_stale", "Persistent queries with a pending or running evaluation"),
    ("queries", "deltas"): ("changes_total", "Updates that changed the graph"),
    ("queries", "asked"): ("queries_asked_again_total", "Evaluations of persistent queries caused by changes"),
    ("queries", "indications"): ("indications_total", "Indications sent to subscribers"),
    ("queries", "merged"): ("indications_merged_total", "Changes merged into the indication of another change"),
    ("evaluations", "seconds"): ("evaluation_seconds_total", "Processor time of evaluations of persistent queries"),
    ("evaluations", "held"): ("evaluations_held_total", "Evaluations delayed because their client's time was used up"),
    ("store", "is_writable"): ("writable", "1 while changes can be stored, 0 while the disk refuses them"),
    ("store", "failures"): ("store_failures_total", "Changes and syncs that the disk refused"),
    ("store", "damages"): ("store_damages_total", "Reads that found a damaged file"),
    ("store", "syncs"): ("syncs_total", "Syncs of the disk; one covers all waiting changes"),
    ("store", "unsynced"): ("changes_unsynced", "Changes waiting for a sync"),
    ("pool", "joined"): ("requests_joined_total", "Queries that shared the evaluation of an equal one"),
    ("pool", "cached"): ("requests_cached_total", "Queries answered from the cache"),
    ("pool", "answers"): ("answers_cached", "Answers in the cache"),
}

# statistic of a lane of its request pool -> (metric, help), each with the label `lane`.
LANE_METRICS: Final[dict[str, tuple[str, str]]] = {
    "answered": ("requests_total", "Requests answered"),
    "refused": ("requests_refused_total", "Requests refused because too many were waiting"),
    "waiting": ("requests_waiting", "Requests waiting for a worker"),
    "running": ("requests_running", "Requests being processed"),
    "processing_s": ("processing_seconds", "Mean processing time of recent requests"),
    "waiting_s": ("waiting_seconds", "Mean time that recent requests waited for a worker"),
}

# statistic of the connections of a listener -> (metric, help), each with the label `listener`.
CONNECTION_METRICS: Final[dict[str, tuple[str, str]]] = {
    "open": ("connections", "Open connections, TLS handshakes included"),
    "refused": ("connections_refused_total", "Connections refused because connections_max were open"),
    "handshakes_failed": ("connections_handshakes_failed_total", "TLS handshakes that failed or took too long"),
    "cut": ("connections_cut_total", "Connections closed because the peer sent or read nothing for too long"),
}


class BrokerCollector(Collector):
    """Reads the statistics of all layers at each scrape."""

    def __init__(self, statistics: Callable[[], dict[str, Any]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        layers = {layer: asdict(statistics) for layer, statistics in self._statistics().items()}
        for (layer, statistic), (name, text) in METRICS.items():
            family = _family(name, text, [])
            family.add_metric([], layers[layer][statistic])
            yield family


class BudgetCollector(Collector):
    """Reports refusals because of a bound, and the memory that queues use."""

    def __init__(self, refused: Sequence[Counter[str]], queues: LogicalQueues) -> None:
        self._refused = refused
        self._queues = queues

    def collect(self) -> Iterable[Metric]:
        family = _family("refused_total", "Requests refused because a bound was reached, by error code", ["code"])
        for code, count in sorted(sum(self._refused, Counter()).items()):
            family.add_metric([code], count)
        yield family
        family = _family("queue_definition_bytes", "Bytes charged for queue definitions, without messages", [])
        family.add_metric([], self._queues.budget.bytes)
        yield family
        family = _family("queue_publisher_bytes", "Memory used for the publishers that queues remember, in bytes", [])
        family.add_metric([], self._queues.publisher_bytes)
        yield family


class KnowledgeCollector(Collector):
    """Reads the statistics of the knowledge base at each scrape."""

    def __init__(self, statistics: Callable[[], Any]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        statistics = self._statistics()
        for path, (name, text) in KNOWLEDGE_METRICS.items():
            family = _family(f"knowledge_{name}", text, [])
            family.add_metric([], functools.reduce(getattr, path, statistics))
            yield family
        for statistic, (name, text) in LANE_METRICS.items():
            family = _family(f"knowledge_{name}", text, ["lane"])
            for lane, of_lane in statistics.pool.lanes.items():
                family.add_metric([lane], getattr(of_lane, statistic))
            yield family


class ConnectionCollector(Collector):
    """Reads the statistics of all listeners' connections at each scrape."""

    def __init__(self, statistics: Callable[[], dict[str, Any]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        listeners = self._statistics()
        for statistic, (name, text) in CONNECTION_METRICS.items():
            family = _family(name, text, ["listener"])
            for listener, of_listener in listeners.items():
                family.add_metric([listener], getattr(of_listener, statistic))
            yield family


class QueueCollector(Collector):
    """Reports the statistics of queues. The caller must collect them first, because that takes an await."""

    def __init__(self, statistics: Sequence[QueueStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        for statistic, (name, text) in QUEUE_METRICS.items():
            family = _family(f"queue_{name}", text, ["queue"])
            for each in self._statistics:
                family.add_metric([each.name], getattr(each, statistic))
            yield family


def make_registry(
    statistics: Callable[[], dict[str, Any]],
    connections: Callable[[], dict[str, Any]],
    knowledge: Callable[[], Any] | None,
    refused: Sequence[Counter[str]],
    queues: LogicalQueues,
) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(BrokerCollector(statistics))
    registry.register(ConnectionCollector(connections))
    registry.register(BudgetCollector(refused, queues))
    if knowledge is not None:
        registry.register(KnowledgeCollector(knowledge))
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry, queues: Sequence[QueueStatistics]) -> bytes:
    of_queues = CollectorRegistry()
    of_queues.register(QueueCollector(queues))
    return generate_latest(registry) + generate_latest(of_queues)


def _family(name: str, text: str, labels: list[str]) -> CounterMetricFamily | GaugeMetricFamily:
    if name.endswith("_total"):
        return CounterMetricFamily(f"tidegate_{name.removesuffix('_total')}", text, labels=labels)
    return GaugeMetricFamily(f"tidegate_{name}", text, labels=labels)
