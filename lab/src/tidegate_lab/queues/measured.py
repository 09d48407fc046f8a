"""The chapter on the real message queue: the same comparison on a broker with LMDB and with Redis, on this machine.

The cost of the simulation is measured here as CPU time of the broker and of Redis. A miss costs about as much as a hit
here, without the lock of the paper. So methods differ less in throughput and more in the cost of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidegate.broker.process import broker_process
from tidegate_lab import pictures
from tidegate_lab.queues.load import Load, Measured, Times, measure
from tidegate_lab.queues.redis_process import redis_process
from tidegate_lab.report import Chapter, Estimate, Progress


@dataclass(frozen=True)
class Extent:
    times: Times
    repetitions: int


FULL = Extent(Times(warm_up_s=1.0, measured_s=5.0), repetitions=3)
SHORT = Extent(Times(warm_up_s=0.5, measured_s=1.0), repetitions=2)


@dataclass(frozen=True)
class Variant:
    """The settings of a queue, and the smallest number of messages that a request waits for."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    least: int = 1


CONVENTIONAL = Variant("conventional", {"method": "conventional"})
RDS_SHORT = Variant("RDS 0.1 s", {"method": "rds", "sleep_s": 0.1})
RDS = Variant("RDS 0.5 s", {"method": "rds", "sleep_s": 0.5})
RDS_LONG = Variant("RDS 1 s", {"method": "rds", "sleep_s": 1.0})
WAKE_UP_AT_ONCE = Variant("wake-up at once", {"method": "wakeup"})
WAKE_UP = Variant("wake-up 20 ms", {"method": "wakeup", "linger_s": 0.02}, least=25)
WAKE_UP_PATIENT = Variant("wake-up 100 ms", {"method": "wakeup", "linger_s": 0.1}, least=25)
VARIANTS = (
    CONVENTIONAL,
    Variant("PMS", {"method": "pms"}),
    RDS_SHORT,
    RDS,
    RDS_LONG,
    Variant("RDS-adaptive", {"method": "rds", "sleep_s": 1.0, "sleep": "adaptive"}),
    WAKE_UP_AT_ONCE,
    WAKE_UP,
    WAKE_UP_PATIENT,
)
BUSY = "1,000 messages/s, λ = 200"
SPARSE = "sparse: 100 messages/s, λ = 200"
LOADS = {BUSY: Load(1000.0, 200.0), SPARSE: Load(100.0, 200.0)}
LMDB = "LMDB, fsync"
REDIS = "Redis, everysec"

Results = dict[tuple[str, str, str], list[Measured]]


def write_chapter(out: Path, extent: Extent) -> Chapter:
    chapter = Chapter(out, "The same on the real broker")
    results = asyncio.run(_measure_all(extent))
    load = LOADS[BUSY]
    chapter.say(
        f"One broker process has {load.physical_queues} physical queues with messages of 1 kB. {load.back_ends} "
        f"back-ends request up to {load.request_messages_max} messages at the times of a Poisson process, each with at "
        f"most {load.open_requests_max} open requests. Devices and back-ends are one other process on the same cores. "
        f"Methods are interleaved within each of {extent.repetitions} repetitions, and each is measured for "
        f"{extent.times.measured_s:g} s. The figures are means with 95 % intervals. CPU time is that of the broker's "
        "process, and of Redis if it is the store. Read cost and latency together: a method that sleeps longer costs "
        "less, but its messages arrive later."
    )
    for store in (LMDB, REDIS):
        for name in LOADS:
            chapter.section(f"{store}: {name}")
            chapter.table(*_table(store, {v.name: results[store, name, v.name] for v in VARIANTS}))
    _draw(chapter, results)
    chapter.data("measured", _data(results), "one per run")
    _claim(chapter, results)
    return chapter


async def _measure_all(extent: Extent) -> Results:
    results: Results = {}
    progress = Progress("measured on the real broker", extent.repetitions * len(LOADS) * len(VARIANTS) * 2)
    async with redis_process() as (redis, redis_pid):
        async with broker_process() as broker:
            await _measure_store(LMDB, broker.address, {"broker": broker.pid}, extent, results, progress)
        async with broker_process("--queue-store", redis) as broker:
            pids = {"broker": broker.pid, "store": redis_pid}
            await _measure_store(REDIS, broker.address, pids, extent, results, progress)
    return results


async def _measure_store(
    store: str, address: str, pids: Mapping[str, int], extent: Extent, results: Results, progress: Progress
) -> None:
    for seed in range(extent.repetitions):
        for name, load in LOADS.items():
            for variant in VARIANTS:
                run = await measure(address, pids, variant.settings, variant.least, load, extent.times, seed)
                results.setdefault((store, name, variant.name), []).append(run)
                progress.advance(1)


def _estimate(runs: Sequence[Measured], what: str) -> Estimate:
    return Estimate.of([getattr(run, what) for run in runs])


def _table(store: str, runs: Mapping[str, Sequence[Measured]]) -> tuple[list[str], list[list[str]]]:
    head = ["method", "messages/s", "hit rate", "messages a hit", "tries/s", "p50 ms", "p99 ms", "broker µs/message"]
    if store == REDIS:
        head.append("Redis µs/message")
    rows = []
    for method, measured in runs.items():
        row = [
            method,
            _estimate(measured, "throughput").write(),
            _estimate(measured, "hit_rate").write(2),
            _estimate(measured, "messages_a_hit").write(1),
            _estimate(measured, "tries_s").write(),
            _estimate(measured, "latency_p50_s").write(1, 1000),
            _estimate(measured, "latency_p99_s").write(1, 1000),
            _estimate(measured, "broker_us_a_message").write(),
        ]
        if store == REDIS:
            row.append(_estimate(measured, "store_us_a_message").write())
        rows.append(row)
    return head, rows


def _draw(chapter: Chapter, results: Results) -> None:
    """Draws one row per method: the cost of a message on the left, and the 99th percentile of latency on the right."""
    figure, (cost, latency) = pictures.new_figure(2, width=5.6, height=4.2)
    for store, look in ((LMDB, pictures.GREEN), (REDIS, pictures.ORANGE)):
        for panel, what, scale in ((cost, "broker_us_a_message", 1.0), (latency, "latency_p99_s", 1000.0)):
            estimates = [_estimate(results[store, BUSY, variant.name], what) for variant in VARIANTS]
            pictures.draw_dots(panel, store, look, estimates, scale)
    latency.set_xscale("log")
    pictures.set_x_ticks(latency, (5, 10, 20, 50, 100, 200, 500, 1000, 2000))
    latency.set_xlim(left=2)
    cost.set_xlim(left=0)
    pictures.name_rows(cost, [variant.name for variant in VARIANTS])
    pictures.name_rows(latency, [""] * len(VARIANTS))
    pictures.name_axes(cost, BUSY, "CPU time of the broker per message [µs]", "")
    pictures.name_axes(latency, "", "p99 of latency [ms]", "")
    cost.legend(frameon=False, fontsize=9)
    chapter.picture("measured", figure, f"Cost and latency of every method on the real broker; {BUSY}. Left is better.")


def _data(results: Results) -> pa.Table:
    rows = [
        {"store": store, "load": load, "method": method, "repetition": number} | asdict(run)
        for (store, load, method), runs in results.items()
        for number, run in enumerate(runs)
    ]
    return pa.Table.from_pylist(rows)


def _claim(chapter: Chapter, results: Results) -> None:
    missing = sum(run.missing for runs in results.values() for run in runs)
    enqueued = sum(run.enqueued for runs in results.values() for run in runs)
    chapter.claim("No acknowledged message is missing in any run", missing == 0, f"{missing} of {enqueued:,}")
    for store in (LMDB, REDIS):

        def of(variant: Variant, what: str, store: str = store) -> float:
            return _estimate(results[store, BUSY, variant.name], what).mean

        cost = "broker_us_a_message"
        chapter.claim(
            f"{store}: a message costs the broker less with wake-up 20 ms than with RDS 0.5 s or conventional",
            of(WAKE_UP, cost) < min(of(RDS, cost), of(CONVENTIONAL, cost)),
            f"{of(WAKE_UP, cost):.0f}, {of(RDS, cost):.0f} and {of(CONVENTIONAL, cost):.0f} µs",
        )
        p99 = "latency_p99_s"
        chapter.claim(
            f"{store}: p99 of latency is lower with wake-up at once than with any RDS or conventional",
            of(WAKE_UP_AT_ONCE, p99) < min(of(each, p99) for each in (CONVENTIONAL, RDS_SHORT, RDS, RDS_LONG)),
            ", ".join(
                f"{each.name} {1000 * of(each, p99):.0f} ms"
                for each in (WAKE_UP_AT_ONCE, CONVENTIONAL, RDS_SHORT, RDS, RDS_LONG)
            ),
        )
        chapter.claim(
            f"{store}: wake-up at once has a hit rate of 0.95 or more, and conventional a lower one",
            of(WAKE_UP_AT_ONCE, "hit_rate") >= 0.95 > of(CONVENTIONAL, "hit_rate"),
            f"{of(WAKE_UP_AT_ONCE, 'hit_rate'):.2f} and {of(CONVENTIONAL, 'hit_rate'):.2f}",
        )
