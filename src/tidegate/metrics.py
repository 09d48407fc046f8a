"""Metrics for Prometheus, made from the `statistics()` of slices, queues and the knowledge base when somebody asks: the
hot path counts integers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from tidegate.queues.statistics import QueueStatistics

# (layer, statistic) -> (metric, help). A name that ends in _total is a counter, any other a gauge.
METRICS: Final[dict[tuple[str, str], tuple[str, str]]] = {
    ("connection_point", "accepted"): ("notifications_accepted_total", "Notifications taken from publishers"),
    ("connection_point", "duplicates"): ("notifications_duplicate_total", "Notifications that publishers sent again"),
    ("connection_point", "refused"): ("notifications_refused_total", "Notifications that broke the rules"),
    ("connection_point", "delivered"): ("deliveries_total", "Notifications put into outboxes"),
    ("connection_point", "dropped"): ("deliveries_dropped_total", "Deliveries dropped for slow subscribers"),
    ("connection_point", "disconnected"): ("sessions_disconnected_total", "Sessions that the broker has ended"),
    ("connection_point", "sessions"): ("sessions", "Open sessions"),
    ("connection_point", "subscriptions"): ("subscriptions", "Live subscriptions"),
    ("connection_point", "publishers"): ("publishers", "Publishers remembered"),
    ("connection_point", "outbox_notifications"): ("outbox_notifications", "Notifications waiting in outboxes"),
    ("connection_point", "outbox_bytes"): ("outbox_bytes", "Bytes waiting in outboxes"),
    ("connection_point", "bytes_under_way"): ("bytes_under_way", "Bytes that are not acknowledged to publishers"),
    ("connection_point", "blocked_outboxes"): ("outboxes_blocked", "Full outboxes that hold up their publishers"),
    ("access_point", "batches"): ("batches_total", "Batches that entered the layers"),
    ("access_point", "unacknowledged_batches"): ("batches_unacknowledged", "Batches under way in the layers"),
    ("matcher", "notifications"): ("notifications_matched_total", "Notifications matched"),
    ("matcher", "matches"): ("matches_total", "Subscriptions satisfied, over all notifications"),
    ("matcher", "filters"): ("filters", "Distinct filters in the index"),
    ("matcher", "index_bytes"): ("index_bytes", "Size of the index's arrays, used or not"),
    ("matcher", "index_plans"): ("index_plans_total", "How often the index was planned anew"),
    ("matcher", "entries_scanned"): ("index_entries_scanned_total", "Entries of the index that notifications met"),
    ("matcher", "entries_verified"): ("index_entries_verified_total", "Filters compared in full"),
    ("exit_point", "incomplete_batches"): ("batches_incomplete", "Batches that wait for a Matcher"),
    ("queue_point", "bindings"): ("queue_bindings", "Queues that are bound to a filter"),
    ("queue_point", "notifications"): (
        "notifications_queued_total",
        "Notifications that matched the filter of a queue",
    ),
    ("queue_point", "unacknowledged_batches"): ("queue_batches_unacknowledged", "Batches on their way into queues"),
}

# statistic of a queue -> (metric, help), each with the label `queue`.
QUEUE_METRICS: Final[dict[str, tuple[str, str]]] = {
    "messages": ("messages", "Messages in the queue"),
    "bytes": ("bytes", "Bytes in the queue"),
    "waiting": ("waiting", "Messages that can be leased"),
    "leased": ("leased", "Messages that are leased"),
    "parked": ("parked", "Dequeue requests that are held"),
    "dead_letters": ("dead_letters", "Messages in its dead-letter queue"),
    "oldest_age_s": ("oldest_age_seconds", "Age of the oldest message"),
    "sleep_s": ("sleep_seconds", "How long a dequeue request that misses now would sleep"),
    "hit_rate": ("hit_rate", "Part of the tries of physical queues that brought messages"),
    "messages_a_hit": ("messages_per_hit", "Messages that such a try brought"),
    "predicted_cost": ("predicted_cost", "Part of a core that the store's work is predicted to take"),
    "requests": ("requests_total", "Dequeue requests"),
    "hits": ("hits_total", "Tries of physical queues that brought messages"),
    "misses": ("misses_total", "Tries of physical queues that brought none"),
    "enqueued": ("enqueued_total", "Messages enqueued"),
    "duplicates": ("duplicates_total", "Messages that were sent again"),
    "refused": ("refused_total", "Messages refused because the queue was full"),
    "dropped": ("dropped_total", "Oldest messages dropped to make room"),
    "delivered": ("delivered_total", "Messages leased to consumers"),
    "deleted": ("deleted_total", "Messages deleted by consumers"),
    "redelivered": ("redelivered_total", "Deliveries after the first"),
    "expired": ("expired_total", "Leases that ended before their messages were deleted"),
    "dead_lettered": ("dead_lettered_total", "Messages moved to the dead-letter queue"),
    "corrupt": ("corrupt_total", "Records set aside because the disk has spoilt them"),
}


# statistic of the knowledge base -> (metric, help)
KNOWLEDGE_METRICS: Final[dict[tuple[str, ...], tuple[str, str]]] = {
    ("triples",): ("triples", "Triples in the graph"),
    ("connections",): ("connections", "Open connections of SSAP"),
    ("queries", "subscriptions"): ("subscriptions", "Subscriptions of persistent queries"),
    ("queries", "queries"): ("queries_open", "Distinct persistent queries"),
    ("queries", "deltas"): ("changes_total", "Changes that changed something"),
    ("queries", "asked"): ("queries_asked_again_total", "Evaluations of persistent queries that a change has caused"),
    ("queries", "indications"): ("indications_total", "Indications given to subscribers"),
    ("queries", "merged"): ("indications_merged_total", "Changes that were merged into one indication with others"),
    ("pool", "joined"): ("requests_joined_total", "Queries that joined an equal one"),
    ("pool", "cached"): ("requests_cached_total", "Queries that were answered from the cache"),
    ("pool", "answers"): ("answers_cached", "Answers in the cache"),
}

# statistic of a lane of its request pool -> (metric, help), each with the label `lane`.
LANE_METRICS: Final[dict[str, tuple[str, str]]] = {
    "answered": ("requests_total", "Requests answered"),
    "refused": ("requests_refused_total", "Requests refused because too many waited"),
    "waiting": ("requests_waiting", "Requests that wait for a worker"),
    "running": ("requests_running", "Requests that a worker works on"),
    "processing_s": ("processing_seconds", "Mean processing time of the last requests"),
    "waiting_s": ("waiting_seconds", "Mean time that the last requests have waited for a worker"),
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


class QueueCollector(Collector):
    """Statistics of queues, which must be asked for before."""

    def __init__(self, statistics: Sequence[QueueStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        for statistic, (name, text) in QUEUE_METRICS.items():
            family = _family(f"queue_{name}", text, ["queue"])
            for each in self._statistics:
                family.add_metric([each.name], getattr(each, statistic))
            yield family


def make_registry(
    statistics: Callable[[], dict[str, Any]], knowledge: Callable[[], Any] | None = None
) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(BrokerCollector(statistics))
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
