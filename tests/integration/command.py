"""`tidegate …` as a person or a program runs it: in another process, on pipes or on a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, NamedTuple, Self

from broker_process import clean_environment
from tidegate_process import TidegateProcess

TIMEOUT_S = 60


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        """Returns the standard output as a program reads it: JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


def tidegate(
    *arguments: str, stdin: str = "", environment: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> Outcome:
    """Runs a command until it exits."""
    with TidegateProcess(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment() | (environment or {}),
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout_s)
        except BaseException:
            process.kill()
            raise
    return Outcome(process.returncode, out, err)


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tidegate", *arguments]


class Running:
    """A context manager that runs a command, on pipes or with a terminal as its standard output."""

    def __init__(self, *arguments: str, on_terminal: bool = False) -> None:
        terminal, out = pty.openpty() if on_terminal else os.pipe()
        self._out = terminal
        self.process = TidegateProcess(
            arguments,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.PIPE,
            env=clean_environment(),
        )
        os.close(out)
        self._read = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.finish()

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def wait_for(self, text: str) -> str:
        """Waits until the command has printed this text, and returns all its output so far."""
        return self._wait_in(self._out, text)

    def wait_for_note(self, text: str) -> None:
        """Waits until this text is on its standard error."""
        assert self.process.stderr is not None
        seen = b""
        deadline_s = time.monotonic() + TIMEOUT_S
        while text.encode() not in seen:
            assert time.monotonic() < deadline_s, seen
            if select.select([self.process.stderr], [], [], 0.1)[0]:
                data = os.read(self.process.stderr.fileno(), 65_536)
                assert data, f"it ended with {seen!r}"
                seen += data

    def interrupt(self) -> None:
        """Interrupts the command, like Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def close_output(self) -> None:
        """Closes the reading end of its output, as `head` does."""
        os.close(self._out)
        self._out = -1

    def finish(self) -> Outcome:
        """Waits until the command exits."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        out = self._read + self._drain()
        err = b""
        if self.process.stderr is not None and not self.process.stderr.closed:
            err = self.process.stderr.read()
            self.process.stderr.close()
        return Outcome(self.process.wait(TIMEOUT_S), out.decode(), err.decode())

    def _wait_in(self, file: int, text: str) -> str:
        deadline_s = time.monotonic() + TIMEOUT_S
        while text.encode() not in self._read:
            assert time.monotonic() < deadline_s, self._read
            if select.select([file], [], [], 0.1)[0]:
                data = _read(file)
                assert data, f"it ended with {self._read!r}"
                self._read += data
        return self._read.decode()

    def _drain(self) -> bytes:
        drained = b""
        while self._out >= 0:
            data = _read(self._out)
            if not data:
                self.close_output()
            drained += data
        return drained


def _read(file: int) -> bytes:
    try:
        return os.read(file, 65_536)
    except OSError:  # the other end of the terminal is closed
        return b""
