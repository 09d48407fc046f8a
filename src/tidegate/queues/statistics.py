"""Statistics of a logical queue: levels, the paper's measures, and the cost that the paper's equations predict.

Counts start with the controllers in this process. Levels come from the store, whichever process has changed it. Rates
cover the time since they were last requested, at least a second.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec

from tidegate.messages import Level
from tidegate.queues.costs import Costs
from tidegate.queues.definition import Definition, QueueSettings
from tidegate.queues.dequeue_controller import DequeueController
from tidegate.queues.pressure import Pressure
from tidegate.queues.store import StoreCounts

RATE_PERIOD_S: Final = 1.0


@dataclass
class Rates:
    """Rates of counters per second, from two observations."""

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
    """`hit_rate`, `messages_a_hit` and `missed_dequeues_s` are the paper's. `predicted_cost` is the share of a core
    that equation (4), for PMS (5), predicts for the store's work at the present rates, from `unit_costs`. `fill_ratio`
    is the used part of the queue's bound. `holding_back_s` is how long the queue has been holding back its publishers,
    and `held_back_s` adds up earlier such periods. `publishers` is the largest number of publishers that one of its
    physical queues remembers."""

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
    expired_messages: int
    corrupt: int
    unreachable: int
    forgotten_publishers: int
    publishers: int
    fill_ratio: float
    holding_back_s: float
    held_back_s: float
    is_overflowing: bool
    notifications_refused: int
    notifications_dropped: int
    last_read_at: float | None
    expires_at: float | None
    unit_costs: dict[str, float]
    predicted_cost: float


@dataclass(frozen=True)
class QueuesStatistics:
    """Totals over all queues of a broker; `expired` queues were dropped because no consumer read them."""

    queues: int
    near_their_bound: int
    holding_back: int
    overflowing: int
    expired: int


def fill_ratio(settings: QueueSettings, levels: list[Level], *, is_divided: bool) -> float:
    """Returns the used part of a queue's bound, by messages or by bytes, whichever is higher. With `is_divided` each
    physical queue has an equal part of the bound, and the fullest one counts."""
    parts = [levels] if not is_divided else [[level] for level in levels]
    return max(
        max(
            sum(level.messages for level in part) * len(parts) / settings.messages_max,
            sum(level.bytes for level in part) * len(parts) / settings.bytes_max,
        )
        for part in parts
    )


def make_statistics(
    definition: Definition,
    levels: list[Level],
    dead_letters: int,
    stored: StoreCounts,
    controller: DequeueController,
    costs: Costs,
    rates: Rates,
    pressure: Pressure,
    last_read_at: float | None,
    expires_at: float | None,
) -> QueueStatistics:
    counts = controller.counts
    now_s = time.time()
    oldest_at = min((level.oldest_at for level in levels if level.oldest_at is not None), default=now_s)
    units = costs.units()
    per_second = rates.of(
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
        missed_dequeues_s=per_second["misses"],
        enqueued_s=per_second["enqueued"],
        delivered_s=per_second["messages"],
        delivered=counts.delivered,
        given_back=counts.given_back,
        **asdict(stored),
        fill_ratio=round(pressure.fill_ratio, 4),
        holding_back_s=round(pressure.holding_back_s(time.monotonic()), 3),
        held_back_s=round(pressure.held_back_s, 3),
        is_overflowing=pressure.is_overflowing,
        notifications_refused=pressure.notifications_refused,
        notifications_dropped=pressure.notifications_dropped,
        last_read_at=last_read_at,
        expires_at=expires_at,
        publishers=max(level.publishers for level in levels),
        unit_costs=asdict(units),
        predicted_cost=units.predict(**per_second),
    )
