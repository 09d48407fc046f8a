"""Metrics for Prometheus, made from the slices' `statistics()` when somebody asks: the hot path counts integers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

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
}


class BrokerCollector(Collector):
    """Reads the statistics of all layers at each scrape."""

    def __init__(self, statistics: Callable[[], dict[str, Any]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        layers = {layer: asdict(statistics) for layer, statistics in self._statistics().items()}
        for (layer, statistic), (name, text) in METRICS.items():
            value = layers[layer][statistic]
            if name.endswith("_total"):
                yield CounterMetricFamily(f"tidegate_{name.removesuffix('_total')}", text, value=value)
            else:
                yield GaugeMetricFamily(f"tidegate_{name}", text, value=value)


def make_registry(statistics: Callable[[], dict[str, Any]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(BrokerCollector(statistics))
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)
