"""The command with a real broker: killed at random moments and restarted, it loses and duplicates nothing.

A failure prints the seed: TIDEGATE_TEST_SEED=… repeats the moments, as far as a busy machine allows.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from broker_process import BrokerProcess, clean_environment
from command import command_line, tidegate
from plain_air_quality import Message, PlainAirQuality, check, disorder, rows_of
from seeds import SEED

from tidegate.client import connect
from tidegate.devices import STATIONS, readings
from tidegate.pipeline.air_quality import Settings
from tidegate.pipeline.air_quality_job import read_totals

KILLS = int(os.environ.get("TIDEGATE_TEST_KILLS", "2"))
START = datetime(2026, 1, 1, tzinfo=UTC)
NOW = datetime(2026, 6, 1, tzinfo=UTC)
STEP = timedelta(minutes=20)
# Bodies that the source or the job cannot read.
BAD_BODIES: list[Any] = [
    "no map",
    {"station": "28005002", "time": "2026-01-01T00:00:00Z", "NO2": "high"},
    {"station": "28005002", "time": "yesterday", "NO2": 41},
    {"station": "28005002", "NO2": 41},
    {"time": "2026-01-01T00:00:00Z", "NO2": 41},
]
TABLES = ("set_aside", "readings", "late", "windows", "index", "alerts")
RUN_S = 400


@pytest.mark.crash
@pytest.mark.cold_spark
@pytest.mark.timeout(240 + RUN_S * (KILLS + 2))
def test_a_job_that_is_killed_again_and_again_has_each_reading_once(tmp_path: Path) -> None:
    random, out = Random(SEED), tmp_path / "out"
    expected = PlainAirQuality(Settings(thresholds={"NO2": 120.0}))
    notifications: list[Mapping[str, Any]] = list(islice(readings(7, START, STEP, STATIONS[:4]), 4 * 3 * 48 + 12))
    days, later = notifications[: 4 * 3 * 48], notifications[4 * 3 * 48 :]
    sent = disorder(random, days, timedelta(minutes=90))
    for place in range(len(sent) - 1, 0, -20):
        sent.insert(place, sent[place - random.randrange(1, 10)])
    with BrokerProcess() as broker:
        options = (
            *("--queue", "air", "--out", str(out), "--address", broker.native, "--threshold", "NO2=120"),
            *("--master", "local[2,4]"),
        )
        expected.feed(asyncio.run(publish(broker.native, sent, BAD_BODIES)))
        kills = sum(run_or_kill((*options, "--once", "--batch", "250"), out, random) for _ in range(KILLS))

        # Then the first day arrives again, much too late. The job processes the rest, and continues until Ctrl-C.
        expected.feed(asyncio.run(publish(broker.native, [*days[:100], *later], [])))
        totals = run_until((*options, "--every", "1 second"), out, expected.messages)
        # It publishes now what it had not published when it was interrupted.
        run_or_kill((*options, "--once"), out, None)
        told = asyncio.run(take_all(broker.native, "told"))

    assert kills == KILLS, f"seed {SEED}: it ended before it could be killed"
    check(out, expected)
    assert totals == msgspec.to_builtins(read_totals(out))
    bodies = Counter(json.dumps(msgspec.msgpack.decode(row["body"])) for row in rows_of(out, "set_aside"))
    assert bodies == Counter(map(json.dumps, BAD_BODIES))
    assert len(expected.late) > 300
    assert expected.duplicates
    assert expected.alerts()
    alerts = [
        (row["alert"], row["state"], row["station"], row["windows"], row["peak"]) for row in rows_of(out, "alerts")
    ]
    names = ("alert", "state", "station", "windows", "peak")
    assert Counter(tuple(body[name] for name in names) for body in told) == Counter(alerts)
    assert all(body["since"].endswith("Z") for body in told)


async def take_all(address: str, queue: str) -> list[Any]:
    taken: list[Any] = []
    async with connect(address) as broker:
        while messages := await broker.queue(queue).take(max=1000, wait_s=1.0):
            taken += [message.body for message in messages]
            await broker.queue(queue).delete(messages)
    return taken


async def publish(address: str, notifications: Sequence[Mapping[str, Any]], bad: Sequence[Any]) -> list[Message]:
    """Publishes notifications, puts bad bodies into the queue, and returns all messages as the job will see them."""
    async with connect(address) as broker, connect(address) as somebody:
        await broker.queue("air").create(filter="station^=28;!alert")
        await broker.queue("told").create(filter="alert")
        await broker.publish(notifications)
        if bad:
            await somebody.queue("air").put(list(bad))
    bodies = [(body, None) for body in notifications] + [(None, str(body)) for body in bad]
    return [Message(body, 0, number, NOW, error) for number, (body, error) in enumerate(bodies)]


def start(options: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command_line("pipeline", "air-quality", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )


def run_or_kill(options: Sequence[str], out: Path, random: Random | None) -> bool:
    """Runs the job to its end, or kills it some time after it has written something. Returns whether it was killed."""
    with start(options) as process:
        try:
            if random is not None and wait_for_more(process, out):
                time.sleep(2 * random.random())
                process.kill()
            _out, errors = process.communicate(timeout=RUN_S)
        finally:
            process.kill()
    assert process.returncode in (0, -signal.SIGKILL), f"seed {SEED}: {errors}"
    return process.returncode != 0


def wait_for_more(process: subprocess.Popen[str], out: Path) -> bool:
    """Waits for a new part of a table or a new state. Returns False if the process ends before."""
    before = parts(out)
    while process.poll() is None:
        if not parts(out) <= before:
            return True
        time.sleep(0.02)
    return False


def parts(out: Path) -> set[Path]:
    tables = (part for table in TABLES for part in (out / table).glob("day=*/batch=*"))
    return {*tables, *(out / "state").glob("batch=*")}


def run_until(options: Sequence[str], out: Path, messages: int) -> Any:
    """Runs the job until it has seen so many messages, interrupts it, and returns what it prints."""
    with start(options) as process:
        try:
            deadline_s = time.monotonic() + RUN_S
            while process.poll() is None and read_totals(out).messages < messages and time.monotonic() < deadline_s:
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            printed, errors = process.communicate(timeout=RUN_S)
        finally:
            process.kill()
    assert process.returncode == 0, f"seed {SEED}: {errors}"
    return json.loads(printed)


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--window", "soon"], "C417", "--window is 'soon'"),
        (["--window", "0 hours"], "C413", "--window is '0 hours'"),
        (["--ahead", "2 years"], "C417", "--ahead is '2 years'"),
        (["--threshold", "XY=1"], "C417", "'XY=1' is not a threshold"),
        (["--threshold", "NO2=nan"], "C417", "'NO2=nan' is not a threshold"),
        (["--windows", "0"], "C413", "--windows is 0"),
        (["--filter", "NO2>"], "F102", "expected a value"),
    ],
)
def test_options_are_checked_before_anything_is_started(options: list[str], code: str, told: str) -> None:
    outcome = tidegate("pipeline", "air-quality", "--queue", "air", "--out", "/nowhere", *options)

    assert outcome.code == 2
    assert f" {code}" in outcome.err
    assert told in outcome.err
