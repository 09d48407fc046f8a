"""What a logical queue tells of itself: levels, the paper's measures, and the cost that the paper's equations predict.

Counts are since the controllers' start in this process; levels are the store's, whoever has changed it. Rates are over
the time since they were last asked for, at least a second.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec

from tidegate.messages import Level
from tidegate.queues.costs import Costs
from tidegate.queues.definition import Definition
from tidegate.queues.dequeue_controller import DequeueController
from tidegate.queues.store import StoreCounts

RATE_PERIOD_S: Final = 1.0


@dataclass
class Rates:
    """Rates a second of counters, from two looks at them."""

    _before: dict[str, float] = field(default_factory=dict)
    _before_s: float = 0.0
    _rates: dict[str, float] = field(default_factory=dict)

    def of(self, counters: dict[str, float], now_s: float) -> dict[str, float]:
        elapsed_s = now_s - self._before_s
        if elapsed_s >= RATE_PERIOD_S:
            if self._before:
                self._rates = {name: (value - self._before[name]) / elapsed_s for name, value in counters.items()}
            self._before, self._before_s = counters, now_s
        return self._rates or dict.fromkeys(counters, 0.0)


@dataclass(frozen=True)
class QueueStatistics:
    """`hit_rate`, `messages_a_hit` and `missed_dequeues_s` are the paper's; `predicted_cost` is the part of a core that
    equation (4), for PMS (5), predicts for the store's work at the present rates, from `unit_costs`."""

    name: str
    method: str
    durability: str
    physical: list[dict[str, Any]]
    messages: int
    bytes: int
    waiting: int
    leased: int
    dead_letters: int
    oldest_age_s: float
    parked: int
    sleep_s: float
    requests: int
    empty_replies: int
    hits: int
    misses: int
    hit_rate: float
    messages_a_hit: float
    missed_dequeues_s: float
    enqueued_s: float
    delivered_s: float
    enqueued: int
    duplicates: int
    refused: int
    dropped: int
    delivered: int
    given_back: int
    deleted: int
    redelivered: int
    expired: int
    dead_lettered: int
    corrupt: int
    unit_costs: dict[str, float]
    predicted_cost: float


def make_statistics(
    definition: Definition,
    levels: list[Level],
    dead_letters: int,
    stored: StoreCounts,
    controller: DequeueController,
    costs: Costs,
    rates: Rates,
) -> QueueStatistics:
    counts = controller.counts
    now_s = time.time()
    oldest_at = min((level.oldest_at for level in levels if level.oldest_at is not None), default=now_s)
    units = costs.units()
    a_second = rates.of(
        {
            "enqueued": stored.enqueued,
            "hits": counts.hits,
            "messages": counts.delivered,
            "misses": counts.misses,
            "monitored": counts.monitored,
        },
        now_s,
    )
    return QueueStatistics(
        name=definition.name,
        method=definition.settings.method,
        durability=definition.settings.durability or "",
        physical=[msgspec.structs.asdict(level) for level in levels],
        messages=sum(level.messages for level in levels),
        bytes=sum(level.bytes for level in levels),
        waiting=sum(level.waiting for level in levels),
        leased=sum(level.leased for level in levels),
        dead_letters=dead_letters,
        oldest_age_s=round(max(0.0, now_s - oldest_at), 3),
        parked=controller.parked,
        sleep_s=controller.sleep_s,
        requests=counts.requests,
        empty_replies=counts.empty_replies,
        hits=counts.hits,
        misses=counts.misses,
        hit_rate=counts.hits / max(1, counts.hits + counts.misses),
        messages_a_hit=counts.delivered / max(1, counts.hits),
        missed_dequeues_s=a_second["misses"],
        enqueued_s=a_second["enqueued"],
        delivered_s=a_second["messages"],
        delivered=counts.delivered,
        given_back=counts.given_back,
        **asdict(stored),
        unit_costs=asdict(units),
        predicted_cost=units.predict(**a_second),
    )
