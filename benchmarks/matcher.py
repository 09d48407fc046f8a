"""The matcher's index alone: PUBLISH frames in, ids of subscriptions out; compared with counting and brute force.

Every load is measured in a new process that receives it ready-made, so memory that its creation leaves behind does not
count. For a sample of the notifications, the index must return what the references return: after it has settled, and
again while a tenth of the subscriptions is removed. Otherwise the benchmark reports an error instead of figures.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

# In a script, Python finds the modules beside this file, but not the package that contains them.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.counting_index import CountingIndex
from benchmarks.job import FULL, QUICK, Effort, show_progress
from benchmarks.machine import describe_machine
from benchmarks.matcher_workloads import DENSE, MAIN, SEED, WORKLOADS, Load, as_frames, make_load
from benchmarks.processes import Failed, Line, Worker, resident_bytes
from benchmarks.tables import ratio, write_table
from tidegate.index import SubscriptionIndex

SIZES: Final = (10_000, 100_000, 1_000_000)
SIZE_DIFFICULT: Final = 100_000
SIZE_QUICK: Final = 2_000
BATCH: Final = 256
SMALLER_BATCHES: Final = (1, 16)
FRAMES_PER_CALL: Final = 4
CHANGES_PER_CALL: Final = 1000

# Goals per second of CPU: notifications by workload and size, then subscriptions. Last, CPU seconds by size.
RATE_GOALS: Final = {
    (MAIN, 10_000): 1_000_000,
    (MAIN, 100_000): 500_000,
    (MAIN, 1_000_000): 150_000,
    (DENSE, 1_000_000): 80_000,
}
ADDS_GOAL: Final = 300_000
REMOVES_GOAL: Final = 500_000
BYTES_GOAL: Final = 160
LOADED_GOALS_S: Final = {1_000_000: 10}

INDEX: Final = "index"
COUNTING: Final = "counting"
COUNTING_LOOP: Final = "counting, its loop"
BRUTE_FORCE: Final = "brute force"
REMOVES: Final = "removes"
ADDS: Final = "adds when full"

_NOTIFICATIONS: Final = 8192
_NOTIFICATIONS_QUICK: Final = 1024
_WARM_UP_SUBSCRIPTIONS: Final = 20_000
_FORCED_MAX: Final = 10_000
_SAMPLE: Final = 256
_SAMPLE_FORCED: Final = 64
# The share of the time that a run of the other benchmarks takes, because there are many contenders and loads here.
_RUN_SHARE: Final = 0.2
_RESULT_S: Final = 1800.0
_EPILOG: Final = """examples:
  python benchmarks/matcher.py --quick                          check that everything works
  python benchmarks/matcher.py --workload mixed --sizes 10000   the main load at one size, half a minute
  python benchmarks/matcher.py --report matcher.md              everything, several minutes; use a quiet machine

loads:
"""

_HEAD: Final = (
    "workload", "subscriptions", "matches", "notifications/s", "goal", "/ goal", "counting/s", "/ this",
    "its loop/s", "/ this", "brute force/s", "/ this", "visited", "scanned", "verified",
)  # fmt: skip
_NOTES: Final = (
    "rates are per second of CPU, medians of {rounds} interleaved rounds; each call has a frame of 256 notifications",
    "matches, visited nodes, scanned and verified entries: means per notification",
    "counting: benchmarks/counting_index.py, notifications decoded before; its loop: only the compiled part",
    "brute force: Filter.matches, notifications decoded before; extrapolated: measured with the first 10,000 filters",
    "checked: the ids of 256 notifications are those of counting, and for 64 of them, up to 10,000, of brute force",
)
_BATCHES_HEAD: Final = (
    "workload", "subscriptions", *(f"frame of {batch}" for batch in (*SMALLER_BATCHES, BATCH)),
    f"{FRAMES_PER_CALL} frames of {BATCH}",
)  # fmt: skip
_CHANGES_HEAD: Final = (
    "workload", "subscriptions", "adds/s", "when full", "goal", "removes/s", "goal", "loaded s", "of it settling",
    "goal", "bytes resident", "in arrays", "goal",
)  # fmt: skip
_CHANGES_NOTES: Final = (
    "per second of CPU, in calls of 1000; full: a tenth removed and added again, medians of {rounds} rounds",
    "loaded: CPU seconds for all adds and for settling",
    "settling: maintain() until it is done, after the adds and again after as many other notifications as are measured",
    "bytes per subscription: growth of the process's resident memory; in arrays: from statistics()",
)

Integers = NDArray[np.int64]
Changes = list[tuple[Integers, bytes]]


class Case(NamedTuple):
    workload: str
    size: int


@dataclass(frozen=True)
class Measured:
    """The result of a load. Rates are medians per second of CPU, by contender. Counts are means per notification."""

    workload: str
    size: int
    rates: dict[str, float]
    matches: float
    visited: float
    scanned: float
    verified: float
    adds_s: float
    settling_s: float
    bytes_resident: float
    bytes_in_arrays: float


def run(effort: Effort) -> str:
    sizes, size_difficult = ((SIZE_QUICK,), SIZE_QUICK) if effort == QUICK else (SIZES, SIZE_DIFFICULT)
    return measure(every_case(sizes, size_difficult), effort)


def every_case(sizes: Sequence[int], size_difficult: int) -> list[Case]:
    difficult = [name for name in WORKLOADS if name not in (MAIN, DENSE)]
    return [
        *(Case(MAIN, size) for size in sizes),
        Case(DENSE, max(sizes)),
        *(Case(name, size_difficult) for name in difficult),
    ]


def measure(cases: Sequence[Case], effort: Effort) -> str:
    """Returns the tables. A quick run measures all cases in one process, whose start takes longer than they do."""
    groups = [cases] if effort == QUICK else [[case] for case in cases]
    return _write_tables([each for group in groups for each in _measure_apart(group, effort)], effort.rounds)


def _measure_apart(cases: Sequence[Case], effort: Effort) -> list[Measured]:
    loads = []
    for case in cases:
        show_progress(f"{case.workload} {case.size:,}: drawing filters and notifications")
        loads.append(make_load(*case, _NOTIFICATIONS_QUICK if effort == QUICK else _NOTIFICATIONS))
    with Worker(measure_loads, loads, effort) as worker:
        measured: list[Measured] = worker.result(_RESULT_S)
        return measured


def measure_loads(_line: Line, loads: Sequence[Load], effort: Effort) -> list[Measured]:
    """Measures the loads, in the process of a worker."""
    show_progress("loading the kernels; after a change of their source they are compiled, which takes minutes")
    _warm_up()
    return [_measure_load(load, effort) for load in loads]


def _warm_up() -> None:
    """Uses all kernels, so that neither their compilation nor their code in memory is measured."""
    load = make_load(MAIN, _WARM_UP_SUBSCRIPTIONS, BATCH)
    index, changes = SubscriptionIndex(), _changes(load, np.arange(load.size))
    _add(index, changes)
    _settle(index)
    _match_all(index, as_frames(load.maps, BATCH))
    _settle(index)
    _remove(index, changes)
    CountingIndex(load.constraints(1)).match({})


def _measure_load(load: Load, effort: Effort) -> Measured:
    show_progress(f"{load.workload} {load.size:,}: adding")
    earlier, frames = as_frames(load.earlier, BATCH), as_frames(load.maps, BATCH)
    changes = _changes(load, np.arange(load.size))
    before_bytes = _resident_bytes()
    index = SubscriptionIndex()
    adds_s = _cpu_s(lambda: _add(index, changes))
    settling_s = _cpu_s(lambda: _settle(index))
    _match_all(index, earlier)
    settling_s += _cpu_s(lambda: _settle(index))
    grown_bytes = _resident_bytes() - before_bytes
    before = index.statistics()
    matches = _match_all(index, frames)
    after = index.statistics()
    count = len(load.maps)
    return Measured(
        workload=load.workload,
        size=load.size,
        rates=_measure_rates(index, load, effort),
        matches=matches / count,
        visited=(after.visited - before.visited) / count,
        scanned=(after.scanned - before.scanned) / count,
        verified=(after.verified - before.verified) / count,
        adds_s=adds_s,
        settling_s=settling_s,
        bytes_resident=grown_bytes / load.size,
        bytes_in_arrays=after.bytes / load.size,
    )


def _measure_rates(index: SubscriptionIndex, load: Load, effort: Effort) -> dict[str, float]:
    show_progress(f"{load.workload} {load.size:,}: building the references and checking")
    references = _References(load)
    # Otherwise the garbage collector would walk through the millions of objects of the references repeatedly.
    gc.freeze()
    sample = as_frames(load.maps, _SAMPLE)[0]
    expected = references.match_sample()
    _check(index, sample, expected)
    contenders = _index_contenders(index, load) | references.contenders()
    runs: dict[str, list[float]] = {name: [] for name in (*contenders, REMOVES, ADDS)}
    for number in range(effort.rounds):
        for name, work in contenders.items():
            runs[name].append(_rate(work, effort.run_s * _RUN_SHARE))
        show_progress(f"{load.workload} {load.size:,}: round {number + 1}, {runs[INDEX][-1]:,.0f}/s")
    away = np.random.default_rng(SEED).permutation(load.size)[: max(load.size // 10, 1)]
    changes = _changes(load, away)
    for _ in range(effort.rounds):
        runs[REMOVES].append(len(away) / _cpu_s(lambda: _remove(index, changes)))
        _check(index, sample, [ids - set(away.tolist()) for ids in expected])
        runs[ADDS].append(len(away) / _cpu_s(lambda: _add(index, changes)))
        _settle(index)
    _check(index, sample, expected)
    return {name: median(rates) for name, rates in runs.items()}


class _References:
    """The same filters in a counting index, and the first 10,000 of them for brute force, which is slow."""

    def __init__(self, load: Load) -> None:
        self._notifications = load.notifications()
        self._counting = CountingIndex(load.constraints(load.size))
        self._filters = load.make_filters(_FORCED_MAX)
        self._share_forced = len(self._filters) / load.size

    def match_sample(self) -> list[set[int]]:
        """Returns the matches that counting finds, after checking that brute force finds the same."""
        found = [set(self._counting.match(notification)) for notification in self._notifications[:_SAMPLE]]
        for notification, ids in zip(self._notifications[:_SAMPLE_FORCED], found, strict=False):
            if set(self._force(notification)) != {number for number in ids if number < len(self._filters)}:
                raise Failed(f"WRONG: counting and brute force disagree on {notification}")
        return found

    def contenders(self) -> dict[str, Callable[[], float]]:
        """Returns functions that each match one notification per call and return how much of one they did.

        Brute force tries only some of the filters, so it does only that share of a notification."""
        counted, forced = cycle(self._notifications), cycle(self._notifications)
        selected = cycle([self._counting.select(notification) for notification in self._notifications[:_SAMPLE]])

        def count() -> float:
            self._counting.match(next(counted))
            return 1.0

        def count_selected() -> float:
            self._counting.count(next(selected))
            return 1.0

        def force() -> float:
            self._force(next(forced))
            return self._share_forced

        return {COUNTING: count, COUNTING_LOOP: count_selected, BRUTE_FORCE: force}

    def _force(self, notification: dict[str, Any]) -> list[int]:
        return [number for number, each in enumerate(self._filters) if each.matches(notification)]


def _index_contenders(index: SubscriptionIndex, load: Load) -> dict[str, Callable[[], float]]:
    """Returns functions that match all notifications. The main loads are also matched in calls of other sizes."""
    frames = as_frames(load.maps, BATCH)
    calls = {INDEX: frames}
    if load.workload in (MAIN, DENSE):
        calls |= {_in_batches(batch): as_frames(load.maps, batch) for batch in SMALLER_BATCHES}
        starts = range(0, len(frames), FRAMES_PER_CALL)
        calls[_in_batches(BATCH * FRAMES_PER_CALL)] = [
            b"".join(frames[start : start + FRAMES_PER_CALL]) for start in starts
        ]

    def match(calls: Sequence[bytes]) -> float:
        _match_all(index, calls)
        return len(load.maps)

    return {name: partial(match, each) for name, each in calls.items()}


def _in_batches(batch: int) -> str:
    return f"{INDEX}, {batch} a call"


def _match_all(index: SubscriptionIndex, calls: Iterable[bytes]) -> int:
    return sum(len(index.match_frames(data)[1]) for data in calls)


def _changes(load: Load, ids: Integers) -> Changes:
    """Returns subscriptions and their packed filters, in parts of 1000 for one call each."""
    parts = [ids[start : start + CHANGES_PER_CALL] for start in range(0, len(ids), CHANGES_PER_CALL)]
    return [(part, load.packed(part)) for part in parts]


def _add(index: SubscriptionIndex, changes: Changes) -> None:
    for ids, filters in changes:
        index.add_packed(ids, filters)


def _remove(index: SubscriptionIndex, changes: Changes) -> None:
    for ids, _ in changes:
        if index.remove_many(ids) != len(ids):
            raise Failed("WRONG: subscriptions that were added could not be removed")


def _settle(index: SubscriptionIndex) -> None:
    while index.maintain():
        pass


def _check(index: SubscriptionIndex, sample: bytes, expected: Sequence[set[int]]) -> None:
    offsets, ids = index.match_frames(sample)
    for number, wanted in enumerate(expected):
        found = ids[offsets[number] : offsets[number + 1]].tolist()
        if len(found) != len(wanted) or set(found) != wanted:
            raise Failed(
                f"WRONG: for notification {number} the index finds {len(found)} subscriptions and the references "
                f"{len(wanted)}; the first differences: {sorted(set(found) ^ wanted)[:10]}"
            )


def _rate(work: Callable[[], float], at_least_s: float) -> float:
    """Returns notifications per second of CPU. `work` returns how many it did."""
    done, took_s, began_s = 0.0, 0.0, time.process_time()
    while not done or took_s < at_least_s:
        done += work()
        took_s = time.process_time() - began_s
    return done / took_s


def _cpu_s(work: Callable[[], None]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def _resident_bytes() -> int:
    """Returns the resident memory after giving free memory back to the system. Otherwise the index would fill that
    memory, and its growth would not be noticed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes(os.getpid())


def _write_tables(all_measured: Sequence[Measured], rounds: int) -> str:
    main = [each for each in all_measured if each.workload in (MAIN, DENSE)]
    difficult = [each for each in all_measured if each not in main]
    about = [f"{each.workload}: {WORKLOADS[each.workload].about}" for each in difficult]
    tables = (
        ("Matching", _HEAD, _row, main, _NOTES),
        ("Matching by frames a call, notifications/s", _BATCHES_HEAD, _batches_row, main, ()),
        ("Difficult loads", _HEAD, _row, difficult, about if main else (*about, *_NOTES)),
        ("Changes and memory", _CHANGES_HEAD, _changes_row, all_measured, _CHANGES_NOTES),
    )
    return "\n".join(
        write_table(title, head, [row(each) for each in shown], [note.format(rounds=rounds) for note in notes])
        for title, head, row, shown, notes in tables
        if shown
    )


def _row(measured: Measured) -> list[str]:
    rate, counting, loop, forced = (measured.rates[name] for name in (INDEX, COUNTING, COUNTING_LOOP, BRUTE_FORCE))
    goal = RATE_GOALS.get((measured.workload, measured.size))
    return [
        measured.workload,
        f"{measured.size:,}",
        f"{measured.matches:.1f}",
        f"{rate:,.0f}",
        f"{goal:,}" if goal else "-",
        ratio(rate, goal or 0),
        f"{counting:,.0f}",
        ratio(rate, counting),
        f"{loop:,.0f}",
        ratio(rate, loop),
        f"{forced:,.1f}{' extrapolated' if measured.size > _FORCED_MAX else ''}",
        ratio(rate, forced),
        f"{measured.visited:,.0f}",
        f"{measured.scanned:,.0f}",
        f"{measured.verified:,.0f}",
    ]


def _batches_row(measured: Measured) -> list[str]:
    names = (*map(_in_batches, SMALLER_BATCHES), INDEX, _in_batches(BATCH * FRAMES_PER_CALL))
    return [measured.workload, f"{measured.size:,}", *(f"{measured.rates[name]:,.0f}" for name in names)]


def _changes_row(measured: Measured) -> list[str]:
    goal_s = LOADED_GOALS_S.get(measured.size)
    return [
        measured.workload,
        f"{measured.size:,}",
        f"{measured.size / measured.adds_s:,.0f}",
        f"{measured.rates[ADDS]:,.0f}",
        f"{ADDS_GOAL:,}",
        f"{measured.rates[REMOVES]:,.0f}",
        f"{REMOVES_GOAL:,}",
        f"{measured.adds_s + measured.settling_s:.2f}",
        f"{measured.settling_s:.2f}",
        f"{goal_s}" if goal_s else "-",
        f"{measured.bytes_resident:,.0f}",
        f"{measured.bytes_in_arrays:,.0f}",
        f"{BYTES_GOAL}",
    ]


def main() -> int:
    options = _parse_options()
    effort = QUICK if options.quick else FULL
    machine = describe_machine()
    print(machine, end="\n\n", flush=True)
    try:
        tables = measure(_choose_cases(options.sizes, options.workload, options.quick), effort)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    print(tables)
    if options.report:
        command = shlex.join(["python", *sys.argv])
        day = datetime.now(UTC).date().isoformat()
        options.report.write_text(f"# The matcher's index\n\n{machine}; {day}: `{command}`\n\n{tables}")
    return 0


def _choose_cases(sizes: Sequence[int] | None, workload: str | None, is_quick: bool) -> list[Case]:
    if workload is None:
        return every_case(sizes or ((SIZE_QUICK,) if is_quick else SIZES), SIZE_QUICK if is_quick else SIZE_DIFFICULT)
    usual = SIZES if workload == MAIN else (SIZES[-1] if workload == DENSE else SIZE_DIFFICULT,)
    return [Case(workload, size) for size in sizes or ((SIZE_QUICK,) if is_quick else usual)]


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=_EPILOG + "\n".join(f"  {name:16} {each.about}" for name, each in WORKLOADS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one short round with 2,000 subscriptions, takes seconds")
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(size) for size in text.split(",")],
        metavar="N,N",
        help="numbers of subscriptions (default: 10000,100000,1000000); difficult loads have 100000 unless --workload "
        "names one",
    )
    parser.add_argument("--workload", choices=WORKLOADS, metavar="NAME", help="run one load only, with all --sizes")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the tables to this file, as Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
