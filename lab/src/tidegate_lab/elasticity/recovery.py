"""The chapter on recovery: kills a slice while notifications flow, and a spare slice replaces it.

The recovery time starts with the signal. It ends when no change of the configuration is pending and the dead slice is
no longer part of it. The longest delay is what a subscriber notices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from tidegate.client import connect
from tidegate.cluster.probe import Findings, Probe
from tidegate_lab.elasticity.cluster_processes import ClusterProcesses, cluster_processes
from tidegate_lab.elasticity.load import client, reading
from tidegate_lab.report import Chapter, Progress

KINDS: Final = ("matcher", "access-point", "exit-point")
BATCHES_S: Final = 100
CALM_S: Final = 2.0
RECOVER_S: Final = 120.0
# The limit for a Matcher with as many subscriptions as in a full run.
MATCHER_S_MAX: Final = 2.0


@dataclass(frozen=True)
class Extent:
    subscriptions: int
    notifications_s: int
    repetitions: int


FULL = Extent(100_000, 2000, 3)
SHORT = Extent(10_000, 1000, 1)


@dataclass(frozen=True)
class Recovery:
    kind: str
    seconds: float
    findings: Findings

    @property
    def longest_ms(self) -> float:
        return max(self.findings.delays_s) * 1000


def write_chapter(out: Path, extent: Extent) -> Chapter:
    chapter = Chapter(out, "Recovery from kill -9")
    recoveries = asyncio.run(_measure_all(extent))
    chapter.say(
        f"In 1-1-1 with {extent.subscriptions:,} subscriptions and {extent.notifications_s:,} notifications/s, each "
        "matched by sixteen subscriptions of one program, one slice is killed, and a spare replaces it. A new Matcher "
        "reads its subscriptions from the registry. The Connection Points resend the batches of a killed Access Point, "
        "and the Access Points those of a killed Exit Point."
    )
    chapter.table(
        ("killed", "recovered s", "longest delay ms", "lost", "doubled", "out of order"),
        [
            (
                each.kind, f"{each.seconds:.2f}", f"{each.longest_ms:,.0f}", str(each.findings.lost),
                str(each.findings.doubled), str(each.findings.disordered),
            )
            for each in recoveries
        ],
    )  # fmt: skip
    chapter.data("recovery", _as_table(recoveries), "one per killed slice")
    _claim(chapter, extent, recoveries)
    return chapter


def _claim(chapter: Chapter, extent: Extent, recoveries: Sequence[Recovery]) -> None:
    matchers = [each.seconds for each in recoveries if each.kind == "matcher"]
    chapter.claim(
        f"A killed Matcher with {extent.subscriptions:,} subscriptions is replaced within {MATCHER_S_MAX:g} s",
        max(matchers) <= MATCHER_S_MAX,
        ", ".join(f"{seconds:.2f}" for seconds in matchers) + " s",
    )
    faults = [sum(getattr(each.findings, name) for each in recoveries) for name in ("lost", "doubled", "disordered")]
    chapter.claim(
        "When a slice is killed, no notification is lost, duplicate or out of order",
        not any(faults),
        ", ".join(map(str, faults)),
    )


def _as_table(recoveries: Sequence[Recovery]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "kind": each.kind,
                "seconds": each.seconds,
                "longest_ms": each.longest_ms,
                "lost": each.findings.lost,
                "doubled": each.findings.doubled,
                "disordered": each.findings.disordered,
            }
            for each in recoveries
        ]
    )


async def _measure_all(extent: Extent) -> list[Recovery]:
    progress = Progress("recovery", len(KINDS) * extent.repetitions)
    recoveries = []
    async with cluster_processes() as cluster, client("subscribe", cluster.address, extent.subscriptions, 0):
        for _ in range(extent.repetitions):
            for kind in KINDS:
                recoveries.append(await _measure(cluster, kind, extent))
                progress.advance(1)
    return recoveries


async def _measure(cluster: ClusterProcesses, kind: str, extent: Extent) -> Recovery:
    await cluster.start(kind)
    state = cluster.directory.state()
    assert state is not None
    victim = next(name for name in state.current.slices if name.startswith(f"{kind}-"))
    async with (
        connect(cluster.address, name="probe") as connection,
        Probe(connection, extent.notifications_s // BATCHES_S, reading) as probe,
    ):
        await asyncio.sleep(CALM_S)
        began_s = time.monotonic()
        await cluster.kill(victim)
        async with asyncio.timeout(RECOVER_S):
            while (state := cluster.directory.state()) is None or (
                state.transaction is not None or victim in state.current.slices
            ):
                await cluster.directory.wait_change()
        seconds = time.monotonic() - began_s
        await asyncio.sleep(CALM_S)
        findings = await probe.finish()
    return Recovery(kind, seconds, findings)
