"""Runs the main job until it is interrupted, or for some minutes. The exit code reports whether the counts agree.

What may go wrong: a process ends early or falls behind. Then the job ends too. It prints the summary of what it has
counted, and where the counts differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tidegate.broker.process import RunningBroker, broker_process, end_process
from tidegate.client import Connection, Subscription, connect
from tidegate.commands.terminal import note
from tidegate.demo.counts import Counts
from tidegate.demo.persistent_queries import MIRROR
from tidegate.demo.picture import count_alerts, draw_history
from tidegate.devices import STATIONS, readings
from tidegate.errors import Unavailable
from tidegate.pipeline.java import OPTIONS_FOR_FEW_ROWS, SUBMIT_OPTIONS

START: Final = datetime(2026, 1, 12, tzinfo=UTC)
STEP: Final = timedelta(hours=1)
STEPS_PER_S: Final = 6
QUEUE: Final = "air"
READINGS: Final = "station^=28;!alert"
ALERTS: Final = "alert"
# Queues with the latest notifications, by the filters of the page: it shows them for the time before it was opened.
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
# After the last reading: if nothing arrives at any end for this long, the counts are final. Spark's first batch takes a
# minute on a busy machine.
IDLE_S: Final = 180.0
END_S: Final = 60.0
# How much of a failed pipeline's log is shown.
LOG_LINES: Final = 20


@dataclass(frozen=True)
class Options:
    seed: int
    out: Path
    is_headless: bool
    # 0 means any free port.
    http_port: int
    # None means until Ctrl-C.
    seconds: float | None


async def run_demo(options: Options) -> int:
    """Returns 0 if the counts agree, otherwise 1."""
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
                _show_start(options, process.http)
            async with _pipeline(process.address, options.out) as pipeline:
                await _while_broker_lives(process, _run_clients(broker, pipeline, options, counts, stopping))
    draw_history(options.out / HISTORY, options.out / PICTURE)
    return _conclude(counts, options)


async def _while_broker_lives(broker: RunningBroker, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work, and fails if the broker dies: its clients would try to reconnect forever."""

    async def watch() -> None:
        raise Unavailable(
            "U701", f"the broker ended with exit code {await broker.until_ended()}", "see its message above"
        )

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            await work
            watching.cancel()
    except BaseExceptionGroup as group:
        # A task group wraps the error that ends it. The caller needs that one error, which carries its remedy.
        raise group.exceptions[0] from None


async def _run_clients(
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
        await _wait_until_processed(broker, pipeline, counts, options)
        watching.cancel()
        counts.totals = await pipeline.end()
        alerts.close()
        everything.close()


async def _publish(broker: Connection, options: Options, counts: Counts, stopping: asyncio.Event) -> None:
    """Publishes the readings of all stations every 1/STEPS_PER_S seconds."""
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
            # Sorted, because Spark does not keep the order of rows within a batch.
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
    """Shows the progress. Stops the publishing if the pipeline ends."""
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


async def _wait_until_processed(broker: Connection, pipeline: Pipeline, counts: Counts, options: Options) -> None:
    """Waits until the queue is empty and all alerts that Spark found have arrived, or until nothing moves for
    IDLE_S."""
    loop = asyncio.get_running_loop()
    progress, progressed_s = (-1, -1, -1, -1), 0.0
    while not pipeline.has_ended:
        counts.queue = await broker.queue(QUEUE).stats()
        is_done = counts.queue["messages"] == 0 and counts.delivered == counts.published and counts.queries.are_complete
        if is_done and counts.alerts == await asyncio.to_thread(count_alerts, options.out / HISTORY):
            return
        now = (counts.queue["deleted"], counts.delivered, counts.alerts, counts.queries.reported)
        if now != progress:
            progress, progressed_s = now, loop.time()
        elif loop.time() - progressed_s > IDLE_S:
            return
        await asyncio.sleep(LOOK_S)


class Pipeline:
    """`tidegate pipeline air-quality` in a separate process."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def end(self) -> dict[str, int]:
        """Interrupts the pipeline, as Ctrl-C does. Returns its totals, or nothing if it has failed."""
        if not self.has_ended:
            self._process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(END_S):
                printed, _errors = await self._process.communicate()
        except TimeoutError:
            return self._failed(f"did not end within {END_S:.0f} s of its interrupt")
        if self._process.returncode != 0 or not printed:
            return self._failed(f"ended with exit code {self._process.returncode}")
        totals: dict[str, int] = json.loads(printed)
        return totals

    def _failed(self, how: str) -> dict[str, int]:
        note(f"the pipeline {how}; the end of its log, {self._log}:")
        for line in self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]:
            note(f"  {line}")
        return {}


@contextlib.asynccontextmanager
async def _pipeline(address: str, out: Path) -> AsyncIterator[Pipeline]:
    history, log = out / HISTORY, out / PIPELINE_LOG
    # --ahead any: the times of the model's readings are not the current time.
    flags = ("--queue", QUEUE, "--out", str(history), "--ahead", "any", "--every", SPARK_EVERY, "--address", address)
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tidegate", "pipeline", "air-quality", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={SUBMIT_OPTIONS: OPTIONS_FOR_FEW_ROWS, **os.environ},
            start_new_session=True,
        )
    try:
        yield Pipeline(process, log)
    finally:
        await end_process(process)


@contextlib.contextmanager
def _interrupts(stopping: asyncio.Event) -> Iterator[None]:
    """Handles Ctrl-C: the first one ends the publishing, the second one everything."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        _clear_line()
        note("no more readings; waiting until Spark has processed the queue (press Ctrl-C again to stop at once)")
        stopping.set()

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _show_start(options: Options, http: str) -> None:
    ends = "press Ctrl-C to stop" if options.seconds is None else f"stops after {options.seconds:g} s"
    print(f"open {http}/   ({len(STATIONS)} stations, seed {options.seed}; {ends})")
    print(f"Spark starts within a minute; its log is {options.out / PIPELINE_LOG}", flush=True)


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
