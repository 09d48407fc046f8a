"""The chapter on real clients: knowledge processors and a broker process of this machine, in overload and in calm.

The broker is Tidegate's own, which always merges what waits for a subscriber and numbers it on one connection: it
loses no notification when it is overloaded, as the simulated one does. So losses are injected, and what the arms
differ in is how clients are paced and whether they listen to the broker's hints. W1, in which a notification asks for a
fetch, has no counterpart: a notification brings the change itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa

from tidegate.broker_process import broker_process
from tidegate.client.control import Control, Strategy
from tidegate.client.control.estimates import mean_interval_s
from tidegate.evaluation import pictures
from tidegate.evaluation.control_load import Measured, Times, Workload, measure, prepare
from tidegate.evaluation.control_simulated import RESTARTED, printed, repaired
from tidegate.evaluation.report import Chapter, Estimate, Progress

LAG_S_MAX = 0.1
"""A run in which one look in a hundred at the clock was later than this is thrown away, and made again."""
TRIES_MAX = 3
"""The last one stays, and its lag is in the table."""
STALE_RATIO = 0.6
REQUESTS_RATIO = 0.1


@dataclass(frozen=True)
class Extent:
    times: Times
    repetitions: int
    processors: int


FULL = Extent(Times(warm_up_s=20.0, measured_s=160.0), repetitions=5, processors=1000)
SHORT = Extent(Times(warm_up_s=1.0, measured_s=3.0), repetitions=2, processors=150)


@dataclass(frozen=True)
class Arm:
    name: str
    control: Control
    is_hinted: bool = False


NONE = Arm("none", printed(Strategy.NONE))
FIXED = Arm("basic, fixed", printed(Strategy.FIXED))
AST = Arm("AST", printed())
RBT = Arm("AST+RBT mediate", repaired())
NO_HINTS = Arm("client only, no hints", RESTARTED)
FULL_DESIGN = Arm("full design", RESTARTED, is_hinted=True)
ARMS = (NONE, FIXED, AST, RBT, NO_HINTS, FULL_DESIGN)

OVERLOAD = "W2: overload 1.5, an update a second, 20 % lost"
IMPATIENT = "W4: the same, clients give up after 1 s"
CALM = "W5: calm, an update in 5 s, 20 % lost"

Results = dict[tuple[str, str], list[Measured]]


def workloads(processors: int) -> tuple[Workload, ...]:
    """The load is that of AST in the long run, for the losses there are."""
    updates_per_s, loss = 1.0, 0.2
    interval = AST.control.interval
    interval_s = mean_interval_s(updates_per_s * loss, interval.alpha, interval.delta_s)
    overload = Workload(OVERLOAD, processors, 1.5, interval_s, updates_per_s, loss)
    return (
        overload,
        replace(overload, name=IMPATIENT, request_timeout_s=1.0),
        replace(overload, name=CALM, overload=0.15, updates_per_s=0.2),
    )


def write_chapter(out: Path, extent: Extent) -> Chapter:
    chapter = Chapter(out, "Real clients and a real broker")
    results, thrown_away = asyncio.run(_measure_all(extent))
    chapter.say(
        f"A broker process and {extent.processors} knowledge processors over SSAP in one other process, on the same "
        "machine. A check asks the question again, which takes the broker's two workers as long as it needs for the "
        "load to be what the workload says; answers are not used twice. Indications are dropped on arrival, at "
        f"random. Arms are interleaved, forwards and backwards, within each of {extent.repetitions} repetitions, each "
        f"measured for {extent.times.measured_s:g} s after {extent.times.warm_up_s:g} s; means with 95 % intervals. "
        "*Full design* listens to the broker's slots; the other arms hear none. This broker merges what waits for a "
        "subscriber in all arms, and loses nothing when it is overloaded: what the simulation shows of that is not "
        "to be seen here. "
        f"{thrown_away} runs were thrown away and made again, as the clients' own process was late by over "
        f"{1000 * LAG_S_MAX:.0f} ms."
    )
    names = [workload.name for workload in workloads(extent.processors)]
    for name in names:
        chapter.section(name)
        chapter.table(*_table({arm.name: results[name, arm.name] for arm in ARMS}))
    _draw(chapter, results)
    chapter.data("control_measured", _data(results), "one run each")
    _claim(chapter, results)
    return chapter


async def _measure_all(extent: Extent) -> tuple[Results, int]:
    results: Results = {}
    thrown_away = 0
    loads = workloads(extent.processors)
    progress = Progress("measured on the real broker", extent.repetitions * len(loads) * len(ARMS))
    async with broker_process("--ssap-port", "0") as broker:
        for workload in loads:
            await asyncio.to_thread(prepare, broker, workload.query_s)
            for seed in range(extent.repetitions):
                for arm in ARMS if seed % 2 == 0 else reversed(ARMS):
                    interval = replace(arm.control.interval, first_s=workload.interval_s)
                    control = replace(arm.control, interval=interval)
                    for tries_left in reversed(range(TRIES_MAX)):
                        run = await measure(broker, control, arm.is_hinted, workload, extent.times, seed)
                        if run.lag_s <= LAG_S_MAX or not tries_left:
                            break
                        thrown_away += 1
                    results.setdefault((workload.name, arm.name), []).append(run)
                    progress.advance(1)
    return results, thrown_away


def _estimate(runs: Sequence[Measured], what: str) -> Estimate:
    return Estimate.of([getattr(run, what) for run in runs])


_COLUMNS = (
    ("stale [%]", "stale_share", 1, 100.0),
    ("p50 [ms]", "response_p50_s", 0, 1000.0),
    ("p99 [ms]", "response_p99_s", 0, 1000.0),
    ("requests a minute", "requests_per_minute", 1, 1.0),
    ("answered [1/s]", "answered_per_s", 0, 1.0),
    ("late or never [%]", "late_share", 1, 100.0),
    ("refused [%]", "refused_share", 1, 100.0),
    ("bystander p99 [ms]", "bystander_p99_s", 0, 1000.0),
    ("broker's cores", "broker_cpu_share", 2, 1.0),
    ("lag of clients [ms]", "lag_s", 0, 1000.0),
)


def _table(runs: Mapping[str, Sequence[Measured]]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [arm, *(_estimate(measured, what).write(digits, scale) for _, what, digits, scale in _COLUMNS)]
        for arm, measured in runs.items()
    ]
    return ["arm", *(title for title, *_ in _COLUMNS)], rows


def _draw(chapter: Chapter, results: Results) -> None:
    figure, (stale, bystander) = pictures.new_figure(2, width=5.6, height=3.2)
    for name, look in ((OVERLOAD, pictures.ORANGE), (CALM, pictures.GREEN)):
        for panel, what, scale in ((stale, "stale_share", 100.0), (bystander, "bystander_p99_s", 1000.0)):
            estimates = [_estimate(results[name, arm.name], what) for arm in ARMS]
            pictures.draw_dots(panel, name.split(":")[0], look, estimates, scale)
    pictures.name_rows(stale, [arm.name for arm in ARMS])
    pictures.name_rows(bystander, [""] * len(ARMS))
    pictures.name_axes(stale, "", "stale time [%]", "")
    pictures.name_axes(bystander, "", "p99 of bystanders [ms]", "")
    stale.set_xlim(left=0)
    bystander.set_xlim(left=0)
    stale.legend(frameon=False, fontsize=9)
    chapter.picture("control_measured", figure, "Staleness of clients, and what others feel of them. Left is better.")


def _data(results: Results) -> pa.Table:
    rows = [
        {"workload": workload, "arm": arm, "repetition": number} | asdict(run)
        for (workload, arm), runs in results.items()
        for number, run in enumerate(runs)
    ]
    return pa.Table.from_pylist(rows)


def _ratio(ours: float, theirs: float) -> float:
    """NaN, which holds no claim, where there is nothing to compare with."""
    return ours / theirs if theirs else float("nan")


def _claim(chapter: Chapter, results: Results) -> None:
    def of(workload: str, arm: Arm, what: str) -> float:
        return _estimate(results[workload, arm.name], what).mean

    def claim_ratio(text: str, workload: str, ours: Arm, theirs: Arm, what: str, at_most: float) -> None:
        ratio = _ratio(of(workload, ours, what), of(workload, theirs, what))
        chapter.claim(f"{text} (at most {at_most:.2g} times)", ratio <= at_most, f"{ratio:.2f} times")

    stale, p50 = "stale_share", "response_p50_s"
    claim_ratio("W2: full design's stale time to AST's", OVERLOAD, FULL_DESIGN, AST, stale, STALE_RATIO)
    claim_ratio(
        "W2: full design's requests to AST's", OVERLOAD, FULL_DESIGN, AST, "requests_per_minute", REQUESTS_RATIO
    )
    claim_ratio("W2: median response, AST+RBT to AST", OVERLOAD, RBT, AST, p50, 1 / 3)
    claim_ratio("W2: p99 of bystanders, full design to AST", OVERLOAD, FULL_DESIGN, AST, "bystander_p99_s", 0.5)
    excess = _ratio(of(OVERLOAD, AST, stale), of(OVERLOAD, NONE, stale))
    chapter.claim(
        "W2: AST's clients are staler than those that never check (1.5 times)", excess >= 1.5, f"{excess:.2f} times"
    )
    late = {arm.name: of(IMPATIENT, arm, "late_share") for arm in (AST, RBT, FULL_DESIGN)}
    chapter.claim(
        "W4: over 90 % of AST's checks are late, of AST+RBT's and the full design's under 10 %",
        late[AST.name] > 0.9 and max(late[RBT.name], late[FULL_DESIGN.name]) < 0.1,
        ", ".join(f"{name} {100 * share:.0f} %" for name, share in late.items()),
    )
    chapter.claim(
        "W5: checks make clients fresher where losses are random: AST below none",
        of(CALM, AST, stale) < of(CALM, NONE, stale),
        f"{100 * of(CALM, AST, stale):.1f} and {100 * of(CALM, NONE, stale):.1f} %",
    )
    worse = of(CALM, FULL_DESIGN, stale) - of(CALM, AST, stale)
    chapter.claim(
        "W5: the full design's stale time is within 0.5 points of AST's", worse <= 0.005, f"{100 * worse:+.1f} points"
    )
