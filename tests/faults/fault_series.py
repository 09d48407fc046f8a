"""A series of faults against real brokers under load, with ledgers that share no code with them.

    python tests/faults/fault_series.py --faults 200 [--seed S] [--page docs/results/reliability.md]

For each fault, both publishers send a burst without waiting for acknowledgements. During the burst a process is killed,
paused, disconnected, or its clock jumps. Then every process that has ended is restarted, and everything sent must be
acknowledged. Every few faults a new world starts (`fault_worlds`). At the end of each world the ledgers are compared
(`ledger_checker`), and the page is rewritten. The seed determines the faults, their moments, and the length of pauses.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "integration")]

from fault_worlds import Fault, OneBroker, TwoBrokers, World  # noqa: E402
from ledger_checker import is_kept  # noqa: E402

WORLDS: tuple[type[World], ...] = (OneBroker, TwoBrokers)
PUBLISHERS = 2
BURST = 150_000
FAULTS_PER_WORLD = 25
ACKNOWLEDGED_S = 180.0
DRAINED_S = 600.0
COLUMNS = (
    "world", "faults", "acknowledged", "lost", "doubled", "out of order", "altered", "redelivered", "deepest window",
    "longest gap",
)  # fmt: skip
BEGIN, END = "<!-- figures: written by fault_series.py -->", "<!-- end of figures -->"


class Planned(NamedTuple):
    """A fault, and whether it happens during a whole burst or a tenth of one."""

    fault: Fault
    is_deep: bool


class Stuck(Exception):
    """Notifications were not acknowledged in time. This is a broken promise, not a mistake of the harness."""


class Clients:
    """The processes of one world's publishers and reader."""

    def __init__(self, world: World, directory: Path, burst: int) -> None:
        self._directory = directory
        self._burst = burst
        self._wanted = 0
        names = [f"publisher-{number}" for number in range(PUBLISHERS)]
        self._ledgers = [directory / f"{name}.ledger" for name in names]
        self.publishers = [
            self._start("ledger_publisher.py", name, world.addresses, str(ledger), str(burst))
            for name, ledger in zip(names, self._ledgers, strict=True)
        ]
        ledger = str(directory / "reader.ledger")
        self.reader = self._start("ledger_reader.py", world.way, world.queue, world.addresses, ledger)

    def _start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / script), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", script
        return process

    def burst(self, *, is_deep: bool) -> None:
        self._wanted += self._burst if is_deep else self._burst // 10
        for publisher in self.publishers:
            publisher.send_signal(signal.SIGUSR2 if is_deep else signal.SIGHUP)

    def cut(self, role: str) -> None:
        for process in self.publishers if role == "publishers" else [self.reader]:
            process.send_signal(signal.SIGUSR1)

    def wait_until_acknowledged(self, world: World) -> None:
        """Waits for all acknowledgements, and repairs the world meanwhile. A process may end later than the fault, for
        example when it learns that it was declared dead."""
        deadline_s = time.monotonic() + ACKNOWLEDGED_S
        while any(_last_acknowledged(ledger) < self._wanted for ledger in self._ledgers):
            for process in [*self.publishers, self.reader]:
                if process.poll() is not None:
                    raise Stuck(f"{process.args!r} has ended with {process.returncode}")
            if time.monotonic() > deadline_s:
                acknowledged = [_last_acknowledged(ledger) for ledger in self._ledgers]
                raise Stuck(f"of {self._wanted} sent, {acknowledged} are acknowledged after {ACKNOWLEDGED_S:.0f} s")
            time.sleep(0.05)
            world.repair()

    def longest_gap_s(self, since_s: float) -> float:
        """Returns the longest time between two acknowledgements of one publisher since `since_s`, while some were
        pending."""
        longest = 0.0
        for ledger in self._ledgers:
            before_s = since_s
            for line in _tail(ledger).splitlines()[1:]:
                at_s = float(line.split()[0])
                if at_s > since_s:
                    longest, before_s = max(longest, at_s - before_s), at_s
        return longest

    def finish(self) -> None:
        """Ends the publishers once everything is acknowledged, and the reader once the queue is empty."""
        for process, patience_s in [(each, ACKNOWLEDGED_S) for each in self.publishers] + [(self.reader, DRAINED_S)]:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(patience_s)
            except subprocess.TimeoutExpired as error:
                raise Stuck(f"{process.args!r} does not end") from error
            if code:
                raise Stuck(f"{process.args!r} has ended with {code}")

    def end(self) -> None:
        for process in [*self.publishers, self.reader]:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _tail(ledger: Path, size_bytes: int = 1 << 20) -> str:
    """Returns the last lines of a ledger. The first of them may be incomplete."""
    with ledger.open("rb") as file:
        file.seek(max(0, ledger.stat().st_size - size_bytes))
        return file.read().decode()


def _last_acknowledged(ledger: Path) -> int:
    whole_lines = _tail(ledger, 400).rpartition("\n")[0].splitlines()
    return int(whole_lines[-1].split()[2]) if whole_lines else 0


@dataclass
class Figures:
    """The results of a series, by world and by fault."""

    seed: str
    faults: Counter[tuple[str, Fault]] = field(default_factory=Counter)
    gaps_s: dict[tuple[str, Fault], float] = field(default_factory=lambda: defaultdict(float))
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, world: str, verdict: dict[str, Any]) -> None:
        known = self.verdicts.setdefault(world, dict.fromkeys(verdict, 0))
        for name, value in verdict.items():
            known[name] = (
                max(known[name], value) if name in ("longest_gap_s", "deepest_window") else known[name] + value
            )

    @property
    def is_kept(self) -> bool:
        return not self.troubles and all(map(is_kept, self.verdicts.values()))

    def count(self, world: str | None = None) -> int:
        return sum(count for (each, _fault), count in self.faults.items() if world in (None, each))


class Series:
    def __init__(self, seed: str, burst: int = BURST) -> None:
        self.rng = random.Random(seed)
        self.figures = Figures(seed)
        self._burst = burst

    def run_world(self, kind: type[World], faults: list[Planned]) -> dict[str, Any]:
        """Runs faults in one new world, and compares the ledgers."""
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tidegate-faults-") as text:
            directory = Path(text)
            with kind(directory, self.rng) as world:
                clients = Clients(world, directory, self._burst)
                try:
                    for planned in faults:
                        self._run_fault(world, clients, *planned)
                    clients.finish()
                except Stuck as stuck:
                    self.figures.troubles.append(f"{world.name}: {stuck}")
                finally:
                    clients.end()
            done = subprocess.run(
                [sys.executable, str(HERE / "ledger_checker.py"), text], stdout=subprocess.PIPE, check=False
            )
        verdict: dict[str, Any] = json.loads(done.stdout)
        self.figures.add(kind.name, verdict)
        self.figures.seconds += time.monotonic() - began_s
        print(f"  {kind.name}: {json.dumps(verdict)}", flush=True)
        return verdict

    def _run_fault(self, world: World, clients: Clients, fault: Fault, is_deep: bool) -> None:
        began_s = time.monotonic()
        clients.burst(is_deep=is_deep)
        time.sleep(self.rng.uniform(0.05, 1.5))
        if fault.kind == "cut":
            clients.cut(fault.role)
        else:
            world.harm(fault)
        world.repair()
        self.figures.faults[world.name, fault] += 1
        clients.wait_until_acknowledged(world)
        gap_s = clients.longest_gap_s(began_s)
        gaps = self.figures.gaps_s
        gaps[world.name, fault] = max(gaps[world.name, fault], gap_s)
        print(
            f"fault {self.figures.count()}: {fault.kind} {fault.role}, {world.name}; "
            f"{time.monotonic() - began_s:.1f} s, longest gap {gap_s:.1f} s",
            flush=True,
        )

    def choose(self, kind: type[World], count: int) -> list[Planned]:
        """Returns faults of a world, each once in random order before any is repeated."""
        chosen: list[Fault] = []
        while len(chosen) < count:
            chosen += self.rng.sample(kind.faults, len(kind.faults))
        return [Planned(fault, self.rng.random() < kind.deep) for fault in chosen[:count]]


def write_page(page: Path, figures: Figures, command: str) -> None:
    """Replaces the figures of a page, and keeps the text around them."""
    text = page.read_text()
    before, _begin, rest = text.partition(BEGIN)
    _old, _end, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{render(figures, command)}\n{END}{after}")


def render(figures: Figures, command: str) -> str:
    lines = [
        f"`{command}`, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, seed `{figures.seed}`.",
        f"{figures.count()} faults took {figures.seconds / 60:.0f} minutes. {machine()}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    for world, found in figures.verdicts.items():
        lines.append(
            f"| {world} | {figures.count(world)} | {found['acknowledged']:,} | {found['lost']:,} | "
            f"{found['doubled']:,} | {found['disordered']:,} | {found['altered']:,} | {found['redelivered']:,} | "
            f"{found['deepest_window']:,} | {found['longest_gap_s']:.1f} s |"
        )
    lines += ["", "| fault | world | times | longest gap between acknowledgements |", "|---|---|---|---|"]
    for (world, fault), count in sorted(figures.faults.items()):
        gap_s = figures.gaps_s[world, fault]
        lines.append(f"| {fault.kind} {fault.role} | {world} | {count} | {gap_s:.1f} s |")
    if figures.troubles:
        lines += ["", "Not acknowledged in time:", "", *(f"- {trouble}" for trouble in figures.troubles)]
    return "\n".join(lines)


def machine() -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = platform.release().partition("-")[0]
    return f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, Linux {kernel}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", default="", help="repeats the choices of a series")
    parser.add_argument("--burst", type=int, default=BURST, help="notifications of each publisher for a fault")
    parser.add_argument("--world", choices=["lmdb", "redis"], help="only one of the two")
    parser.add_argument("--minutes", type=float, default=45.0, help="no new world begins after so long")
    parser.add_argument("--page", type=Path, help="a page whose figures are replaced")
    wanted = parser.parse_args()
    seed = wanted.seed or secrets.token_hex(4)
    print(f"seed {seed}", flush=True)
    series = Series(seed, wanted.burst)
    worlds = WORLDS if wanted.world is None else (WORLDS[["lmdb", "redis"].index(wanted.world)],)
    left, number = wanted.faults, 0
    deadline_s = time.monotonic() + 60 * wanted.minutes
    while left > 0:
        kind = worlds[number % len(worlds)]
        # In a series that is too short for whole rounds, both worlds get their share.
        count = min(FAULTS_PER_WORLD, -(-left // 2) if number == 0 and len(worlds) > 1 else left)
        if time.monotonic() > deadline_s:
            print(f"after {wanted.minutes} minutes {left} faults are left out", flush=True)
            break
        series.run_world(kind, series.choose(kind, count))
        left, number = left - count, number + 1
        if wanted.page is not None:
            write_page(wanted.page, series.figures, f"make faults FAULTS={wanted.faults}")
    print(render(series.figures, " ".join(["python", *sys.argv])))
    sys.exit(0 if series.figures.is_kept else 1)


if __name__ == "__main__":
    main()
