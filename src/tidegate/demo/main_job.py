"""Runs the main job until it is interrupted, or for some minutes; the counts at its end decide how it ends.

What may go wrong here: a process ends before its time, or does not keep up. Then the job ends as well, with the
summary of what it has, and says where the counts differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tidegate.broker_process import RunningBroker, broker_process, end_process
from tidegate.client import Connection, Subscription, connect
from tidegate.demo.counts import Counts
from tidegate.demo.persistent_queries import MIRROR
from tidegate.demo.picture import count_alerts, draw_history
from tidegate.devices import STATIONS, readings
from tidegate.errors import Unavailable
from tidegate.terminal import note

START: Final = datetime(2026, 1, 12, tzinfo=UTC)
STEP: Final = timedelta(hours=1)
STEPS_PER_S: Final = 6
QUEUE: Final = "air"
READINGS: Final = "station^=28;!alert"
ALERTS: Final = "alert"
# What the page shows of the time before it was opened: by the filters that it listens with, the latest of each.
REMEMBERED: Final = {
    "recent-readings": {"filter": "station;longitude;latitude", "messages_max": 7 * 24 * len(STATIONS)},
    "recent-alerts": {"filter": ALERTS, "messages_max": 50},
    "recent-batches": {"filter": "pipeline;query;batch", "messages_max": 300},
}
LATEST: Final = {"policy": "drop-oldest", "durability": "memory", "physical_queues": 1}
HISTORY: Final = "history"
PICTURE: Final = "history.png"
PIPELINE_LOG: Final = "pipeline.log"
SPARK_EVERY: Final = "2 seconds"
LOOK_S: Final = 0.5
# How long nothing may come to any end, after the last reading, before the counts are taken as they are. Spark's first
# batch takes a minute on a busy machine.
STILL_S: Final = 180.0
END_S: Final = 60.0


@dataclass(frozen=True)
class Options:
    seed: int
    out: Path
    is_headless: bool
    # 0 for any free one.
    http_port: int
    # None for until Ctrl-C.
    seconds: float | None


async def run_demo(options: Options) -> int:
    """0 when the counts agree, 1 when they do not."""
    options.out.mkdir(parents=True, exist_ok=True)
    counts = Counts()
    stopping = asyncio.Event()
    with _interrupts(stopping):
        flags = ("--ssap-port", "0", "--mirror", MIRROR, "--http-port", str(options.http_port))
        async with broker_process(*flags) as process, connect(process.address, name="demo") as broker:
            await broker.queue(QUEUE).create(filter=READINGS)
            for name, settings in REMEMBERED.items():
                await broker.queue(name).create(**settings, **LATEST)
            if not options.is_headless:
                _tell(options, process.http)
            async with _pipeline(process.address, options.out) as pipeline:
                await _while_it_lives(process, _let_flow(broker, pipeline, options, counts, stopping))
    draw_history(options.out / HISTORY, options.out / PICTURE)
    return _conclude(counts, options)


async def _while_it_lives(broker: RunningBroker, work: Coroutine[Any, Any, None]) -> None:
    """Clients would wait for ever for a broker that has died to come back."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(broker.until_ended())
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Unavailable("U701", f"the broker has ended with {ending.result()}", "see its message above")
        await working
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


async def _let_flow(
    broker: Connection, pipeline: Pipeline, options: Options, counts: Counts, stopping: asyncio.Event
) -> None:
    async with (
        broker.subscribe(READINGS) as everything,
        broker.subscribe(ALERTS) as alerts,
        counts.queries.opened(broker),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(_count_readings(everything, counts))
        tasks.create_task(_count_alerts(alerts, counts, options))
        watching = tasks.create_task(_watch(broker, pipeline, counts, options, stopping))
        await _publish(broker, options, counts, stopping)
        await _wait_until_all_came(broker, pipeline, counts, options)
        watching.cancel()
        counts.totals = await pipeline.end()
        alerts.close()
        everything.close()


async def _publish(broker: Connection, options: Options, counts: Counts, stopping: asyncio.Event) -> None:
    """A step of readings, all stations at once, every 1/STEPS_PER_S seconds."""
    loop = asyncio.get_running_loop()
    stream = readings(options.seed, START, STEP)
    began_s = loop.time()
    step = 0
    while not stopping.is_set() and (options.seconds is None or step < max(1, options.seconds * STEPS_PER_S)):
        batch = list(islice(stream, len(STATIONS)))
        await broker.publish(batch)
        counts.on_published(batch)
        step += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(began_s + step / STEPS_PER_S):
                await stopping.wait()


async def _count_readings(everything: Subscription, counts: Counts) -> None:
    with contextlib.suppress(StopAsyncIteration):
        while True:
            for delivery in await everything.take():
                counts.on_delivered(delivery)


async def _count_alerts(alerts: Subscription, counts: Counts, options: Options) -> None:
    with contextlib.suppress(StopAsyncIteration):
        while True:
            taken = [delivery.notification for delivery in await alerts.take()]
            counts.alerts += len(taken)
            # Spark does not keep the order of rows within a batch.
            begun = sorted(write_alert(alert) for alert in taken if alert["state"] == "begins")
            if begun and not options.is_headless:
                _clear_line()
                print("\n".join(begun), flush=True)


def write_alert(alert: dict[str, Any]) -> str:
    return (
        f"{alert['until']}  {alert['alert']} above {alert['threshold']:.0f} µg/m³ for {alert['windows']} hours at "
        f"{alert['name']}, {alert['peak']:.0f} at most"
    )


async def _watch(
    broker: Connection, pipeline: Pipeline, counts: Counts, options: Options, stopping: asyncio.Event
) -> None:
    """Shows how far everybody is; a pipeline that has ended ends everything."""
    while not pipeline.has_ended:
        counts.queue = await broker.queue(QUEUE).stats()
        if not options.is_headless and sys.stderr.isatty():
            line = (
                f"{counts.last_time}  published {counts.published:,}  delivered {counts.delivered:,}  "
                f"queued {counts.queue['enqueued']:,}  Spark {counts.queue['deleted']:,}  alerts {counts.alerts:,}"
            )
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(LOOK_S)
    stopping.set()


async def _wait_until_all_came(broker: Connection, pipeline: Pipeline, counts: Counts, options: Options) -> None:
    """Until the queue is empty and the alerts that Spark has found are here."""
    loop = asyncio.get_running_loop()
    came, came_s = (-1, -1, -1, -1), 0.0
    while not pipeline.has_ended:
        counts.queue = await broker.queue(QUEUE).stats()
        is_done = counts.queue["messages"] == 0 and counts.delivered == counts.published and counts.queries.are_right
        if is_done and counts.alerts == await asyncio.to_thread(count_alerts, options.out / HISTORY):
            return
        now = (counts.queue["deleted"], counts.delivered, counts.alerts, counts.queries.told)
        if now != came:
            came, came_s = now, loop.time()
        elif loop.time() - came_s > STILL_S:
            return
        await asyncio.sleep(LOOK_S)


class Pipeline:
    """`tidegate pipeline air-quality` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def end(self) -> dict[str, int]:
        """As Ctrl-C does; what the history has by then, or nothing when the pipeline has failed."""
        if not self.has_ended:
            self._process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(END_S):
                printed, _errors = await self._process.communicate()
        except TimeoutError:
            printed = b""
        if self._process.returncode != 0 or not printed:
            note(f"the pipeline has failed: see {self._log}")
            return {}
        totals: dict[str, int] = json.loads(printed)
        return totals


@contextlib.asynccontextmanager
async def _pipeline(address: str, out: Path) -> AsyncIterator[Pipeline]:
    history, log = out / HISTORY, out / PIPELINE_LOG
    # The readings of the model are of another time than now.
    flags = ("--queue", QUEUE, "--out", str(history), "--ahead", "any", "--every", SPARK_EVERY, "--address", address)
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tidegate", "pipeline", "air-quality", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    try:
        yield Pipeline(process, log)
    finally:
        await end_process(process)


@contextlib.contextmanager
def _interrupts(stopping: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C ends the publishing, the second everything."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        _clear_line()
        note("no more readings; waiting until Spark has processed what is queued (Ctrl-C again ends at once)")
        stopping.set()

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _tell(options: Options, http: str) -> None:
    ends = "Ctrl-C ends it" if options.seconds is None else f"it ends after {options.seconds:g} s"
    print(f"look at {http}/   ({len(STATIONS)} stations, seed {options.seed}; {ends})")
    print(f"Spark begins in a minute or less; it logs to {options.out / PIPELINE_LOG}", flush=True)


def _conclude(counts: Counts, options: Options) -> int:
    _clear_line()
    print(counts.summary())
    differences = counts.differences()
    for difference in differences:
        print(f"COUNTS DISAGREE: {difference}")
    if not differences:
        print("all counts agree")
    print(f"the history is in {options.out / HISTORY}, a picture of it in {options.out / PICTURE}", flush=True)
    return 1 if differences else 0


def _clear_line() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
