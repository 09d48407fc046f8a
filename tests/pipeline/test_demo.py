"""The main job as a person runs it: it says where to look, ends with Ctrl-C, and its counts agree."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pyarrow.dataset
import pytest
from broker_process import clean_environment

END_S = 400
pytestmark = pytest.mark.timeout(600)


def test_it_ends_with_counts_that_agree_and_leaves_the_history(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    process = subprocess.Popen(
        [sys.executable, "-m", "tidegate", "demo", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        assert process.stdout is not None
        told = re.match(r"look at (http://\S+/) ", process.stdout.readline())
        assert told is not None
        assert "Tidegate" in httpx.get(told[1], trust_env=False).text
        queue = f"{told[1]}v1/queues/air/stats"
        while httpx.get(queue, trust_env=False).json()["deleted"] == 0:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=END_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, output + errors
    assert "all counts agree" in output
    kept = re.search(r"processed by Spark: ([\d,]+) values", output)
    assert kept is not None
    readings = pyarrow.dataset.dataset(out / "history" / "readings", partitioning="hive")
    assert readings.count_rows() == int(kept[1].replace(",", "")) > 0
    assert (out / "history.png").read_bytes().startswith(b"\x89PNG")


def test_a_pipeline_that_fails_is_told_and_so_are_the_counts(tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "of something else").touch()
    done = subprocess.run(
        [sys.executable, "-m", "tidegate", "demo", "--headless", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "COUNTS DISAGREE: Spark has processed 0 messages of" in done.stdout
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
        assert process.stdout.readline().startswith("look at")
        os.kill(child_serving(process.pid), signal.SIGKILL)
        _output, errors = process.communicate(timeout=END_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 2, errors
    assert "U701: the broker has ended with -9" in errors
    assert "Traceback" not in errors


def child_serving(parent: int) -> int:
    """The broker among the processes that another one has started."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent_pid = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if parent_pid == parent and b"serve" in (directory / "cmdline").read_bytes().split(b"\0"):
                return int(directory.name)
    raise AssertionError("no broker is there")
