"""Memory: the growth of a broker's resident memory per subscription, compared with brokers that hold topics only.

Measured: resident memory of a new server before and after one client has made many distinct subscriptions, and the
time that this took (with Tidegate: parsed by the client and by the broker, indexed, confirmed one by one).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Final

from benchmarks import over_mosquitto, over_nats, over_tidegate
from benchmarks.batching_client import BatchingClient
from benchmarks.batching_mqtt import BatchingMqtt
from benchmarks.batching_nats import BatchingNats
from benchmarks.job import Effort, show_progress
from benchmarks.processes import resident_bytes
from benchmarks.tables import ratio, write_table
from benchmarks.workload import STATIONS, alerts, station_name

REFERENCE: Final = "NATS, a subject each"
_ROUNDS_MAX: Final = 3
_HEAD: Final = (
    "server", "subscriptions", "before MB", "after MB", "bytes a subscription", "added in s", "added/s",
    f"bytes / {REFERENCE}",
)  # fmt: skip
_NOTES: Final = (
    "resident memory of a fresh server, one client; medians of {rounds} interleaved rounds",
    "unequal: a filter has two constraints on contents, a topic is one string",
    "unequal: Tidegate confirms each subscription to its stock client, the peers get topics in large writes",
)


@dataclass(frozen=True)
class Grown:
    before_bytes: int
    after_bytes: int
    took_s: float


def run(effort: Effort) -> str:
    count, rounds = effort.many_subscriptions, min(effort.rounds, _ROUNDS_MAX)
    runs: dict[str, list[Grown]] = {}
    for number in range(rounds):
        for name, grow in _GROWERS.items():
            show_progress(f"round {number + 1}  {name}")
            runs.setdefault(name, []).append(grow(count))
    reference = _bytes_each(runs[REFERENCE], count)
    rows = [_row(name, grown, count, reference) for name, grown in runs.items()]
    return write_table("Memory", _HEAD, rows, [note.format(rounds=rounds) for note in _NOTES])


def _grow_tidegate(count: int) -> Grown:
    with over_tidegate.tidegate_broker() as broker:
        before = resident_bytes(broker.pid)
        with over_tidegate.subscribed(broker.native, alerts(count)) as took_s:
            return Grown(before, resident_bytes(broker.pid), took_s)


def _grow_nats(count: int) -> Grown:
    return _grow_peer(over_nats.nats_server(), BatchingNats, count)


def _grow_mosquitto(count: int) -> Grown:
    return _grow_peer(over_mosquitto.mosquitto(), BatchingMqtt, count)


def _grow_peer(
    starting: AbstractContextManager[tuple[int, int]], client_type: type[BatchingClient], count: int
) -> Grown:
    with starting as (pid, port), client_type(port) as client:
        topics = list(_topics(client.separator, count))
        before, began_s = resident_bytes(pid), time.monotonic()
        client.subscribe(topics)
        return Grown(before, resident_bytes(pid), time.monotonic() - began_s)


def _topics(separator: str, count: int) -> Iterator[str]:
    for number in range(count):
        level, station = divmod(number, STATIONS)
        yield f"alert{separator}{station_name(station)}{separator}{level}"


_GROWERS: Final = {
    "Tidegate, a filter each": _grow_tidegate,
    REFERENCE: _grow_nats,
    "Mosquitto, a topic each": _grow_mosquitto,
}


def _bytes_each(runs: Sequence[Grown], count: int) -> float:
    return median(grown.after_bytes - grown.before_bytes for grown in runs) / count


def _row(name: str, runs: Sequence[Grown], count: int, reference: float) -> list[str]:
    took_s = median(grown.took_s for grown in runs)
    each = _bytes_each(runs, count)
    return [
        name,
        f"{count:,}",
        f"{median(grown.before_bytes for grown in runs) / 1e6:.1f}",
        f"{median(grown.after_bytes for grown in runs) / 1e6:.1f}",
        f"{each:,.0f}",
        f"{took_s:.2f}",
        f"{count / took_s:,.0f}",
        ratio(each, reference),
    ]
