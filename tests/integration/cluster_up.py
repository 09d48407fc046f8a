"""A whole cluster, as its users start it: `tidegate cluster up` in another process, on free ports."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from command import Outcome, tidegate
from tidegate_process import TidegateProcess

END_S = 60


class ClusterUp:
    """A running cluster. `end` ends it with all its processes."""

    def __init__(self, data: Path) -> None:
        command = ["cluster", "up", "--data", str(data), "--native-port", "0", "--http-port", "0"]
        command += ["--ssap-port", "0"]
        self.process = TidegateProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert ready, self.end()[1]
        self.native: str = json.loads(ready)["ready"]["native"]
        self.http: str = json.loads(ready)["ready"]["http"]
        self.port = urlsplit(json.loads(ready)["ready"]["ssap"]).port or 0
        self.coordinator: str = json.loads(ready)["ready"]["coordinator"]

    def command(self, *arguments: str) -> Outcome:
        return tidegate(*arguments, "--coordinator", self.coordinator, timeout_s=END_S)

    def end(self) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        _output, errors = self.process.communicate(timeout=END_S)
        return self.process.returncode, errors
