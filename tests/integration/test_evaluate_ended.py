"""An evaluation that receives SIGTERM leaves none of its processes running."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WAIT_S = 60
PROCESSES = 4
"""The minimum number of processes that each experiment starts."""
ELASTICITY = ["-m", "tidegate", "evaluate", "elasticity", "--short", "--out"]
LONG_RUN = """
import signal, sys
from dataclasses import replace
from pathlib import Path
from tidegate.client.control import Control
from tidegate_lab.control.measured import Bench
from tidegate_lab.command import exit_on_signal
from tidegate_lab.control.request_pool import Case, steady_overload

signal.signal(signal.SIGTERM, exit_on_signal)
parameters = replace(steady_overload(), clients=20, measured_s=1000.0)
cases = [Case(parameters, Control(), seed) for seed in (1, 2)]
Bench(Path(sys.argv[1]), jobs=1, tries_max=1).run("long", cases)
"""


@pytest.mark.evaluation
@pytest.mark.parametrize("arguments", [ELASTICITY, ["-c", LONG_RUN]], ids=["elasticity", "control"])
def test_whatever_an_evaluation_has_started_ends_with_it(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, *arguments, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as evaluation:
        deadline_s = time.monotonic() + WAIT_S
        while len(started := descendants_of(evaluation.pid)) < PROCESSES:
            assert evaluation.poll() is None
            assert time.monotonic() < deadline_s, started
            time.sleep(0.1)
        evaluation.terminate()
        assert evaluation.wait(WAIT_S) == 128 + signal.SIGTERM
    while left := {pid: about for pid, about in started.items() if is_running(pid)}:
        assert time.monotonic() < deadline_s + WAIT_S, left
        time.sleep(0.1)


def descendants_of(pid: int) -> dict[int, str]:
    """Returns the commands of all descendants, by process id."""
    parents = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
    found: dict[int, str] = {}
    for child, parent in sorted(parents.items()):
        ancestor = parent
        while ancestor not in (pid, 0):
            ancestor = parents.get(ancestor, 0)
        if ancestor == pid:
            found[child] = command_of(child)
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
