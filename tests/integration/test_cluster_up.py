"""`tidegate cluster up` is a whole cluster: it serves, grows when it is told to, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from ssap_world import Kp, graph_of

from tidegate import connect_sync

pytestmark = pytest.mark.timeout(240)
END_S = 60


class ClusterUp:
    def __init__(self, data: Path) -> None:
        command = ["cluster", "up", "--data", str(data), "--native-port", "0", "--http-port", "0"]
        command += ["--ssap-port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tidegate", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert ready, self.end()[1]
        self.native: str = json.loads(ready)["ready"]["native"]
        self.port = urlsplit(json.loads(ready)["ready"]["ssap"]).port or 0
        self.coordinator: str = json.loads(ready)["ready"]["coordinator"]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tidegate", *arguments, "--coordinator", self.coordinator],
            capture_output=True,
            text=True,
            timeout=END_S,
            check=False,
        )

    def end(self) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        _output, errors = self.process.communicate(timeout=END_S)
        return self.process.returncode, errors


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterUp]:
    started = ClusterUp(tmp_path / "data")
    yield started
    started.end()


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_it_serves_grows_and_leaves_nothing_behind(cluster: ClusterUp) -> None:
    with connect_sync(cluster.native) as broker:
        subscription = broker.subscribe("a>1")
        broker.publish([{"a": 1}, {"a": 2}])
        assert next(iter(subscription)).notification == {"a": 2}
        scaled = cluster.command("scale", "matchers=2", "exit-points=2")
        assert len(shown(scaled)["slices"]) == 5
        assert "epoch 2" in scaled.stderr
        replaced = shown(cluster.command("replace", "matcher-1"))
        assert "matcher-1" not in replaced["slices"]
        broker.publish({"a": 3})
        assert next(iter(subscription)).notification == {"a": 3}
        with broker.subscribe("p==is;change==added") as changes, Kp(cluster) as kp:
            kp.ask("INSERT", graph_of("insert_graph", ("hall", "is", "warm")))
            assert next(iter(changes)).notification["o"] == "warm"
    assert cluster.end()[0] == 0
    gone = cluster.command("layers")
    assert gone.returncode == 2
    assert "U730" in gone.stderr
