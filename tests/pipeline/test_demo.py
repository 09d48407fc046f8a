"""The main job, as a person runs it: it prints where to look, ends with Ctrl-C, and its counts agree."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pyarrow.dataset
import pytest
from broker_process import clean_environment

from tidegate.devices import STATIONS

ROOT = Path(__file__).parents[2]
END_S = 400
pytestmark = pytest.mark.timeout(600)


@pytest.mark.cold_spark
def test_make_run_ends_with_counts_that_agree_and_leaves_the_history() -> None:
    process = subprocess.Popen(
        ["make", "run"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        told = next(found for line in process.stdout if (found := re.match(r"open (http://\S+/) ", line)))
        assert "Tidegate" in httpx.get(told[1], trust_env=False, timeout=60).text
        queue = f"{told[1]}v1/queues/air/stats"
        while httpx.get(queue, trust_env=False, timeout=60).json()["deleted"] == 0:
            assert process.poll() is None
            time.sleep(0.2)
        # Ctrl-C in a terminal reaches make too, which waits for the job and exits as interrupted.
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=END_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert "all counts agree" in output, output + errors
    kept = re.search(r"processed by Spark: ([\d,]+) values", output)
    left = re.search(r"the history is in (.+), a picture of it in (.+)", output)
    assert kept is not None
    assert left is not None
    readings = pyarrow.dataset.dataset(Path(left[1]) / "readings", partitioning="hive")
    assert readings.count_rows() == int(kept[1].replace(",", "")) > 0
    assert Path(left[2]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.cold_spark
def test_a_pipeline_that_fails_is_told_and_so_are_the_counts(tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "of something else").touch()
    minutes, steps = 0.005, 2  # at 6 steps per second
    done = subprocess.run(
        [sys.executable, "-m", "tidegate", "demo", "--headless", "--minutes", str(minutes), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"COUNTS DISAGREE: Spark has processed 0 messages of {steps * len(STATIONS)}" in done.stdout
    assert str(tmp_path / "pipeline.log") in done.stderr
    assert "C425" in (tmp_path / "pipeline.log").read_text()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "tidegate", "demo", "--http-port", str(port), "--out", str(tmp_path)],
            capture_output=True,
            text=True,
            env=clean_environment(),
            timeout=END_S,
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"C409: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.cold_spark
def test_a_broker_that_dies_ends_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tidegate", "demo", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("open http")
        os.kill(child_serving(process.pid), signal.SIGKILL)
        _output, errors = process.communicate(timeout=END_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 2, errors
    assert "U701: the broker ended with exit code -9" in errors
    assert "Traceback" not in errors


def child_serving(parent: int) -> int:
    """Returns the broker among the children of a process."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent_pid = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if parent_pid == parent and b"serve" in (directory / "cmdline").read_bytes().split(b"\0"):
                return int(directory.name)
    raise AssertionError("no broker is there")
