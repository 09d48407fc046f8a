"""Every command and snippet in README and docs/ does what the text claims, with a real broker.

Commands that run until they are interrupted (`tidegate serve`, `sub`, `query --follow`, `cluster up`, `autoscale`) are
started, must print something, and are interrupted at the end of their page. Addresses in the text are replaced: ports
by free ones, the coordinator by that of the page's cluster, Redis by the test's own, and the data directory by an empty
one.

A block that is not run is marked where it begins: ```sh not-run: REASON
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from broker_process import BrokerProcess, clean_environment
from ports import reserve_port
from redis_process import RedisProcess
from tidegate_process import TidegateProcess

from tidegate.queues.definition import FIELDS, HELP

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
ENDLESS = re.compile(r"tidegate (serve|cluster up|autoscale|sub(?!.*--(?:count|forget))|query(?=.*--follow))\b")
OPENING = re.compile(r"(sh|python|toml)( not-run: \S.*)?|text")
SLOW = {
    "cluster up": pytest.mark.cluster,
    "spark_session": pytest.mark.cold_spark,
    "benchmarks/run.py": pytest.mark.evaluation,
}
# Each Spark job of a page may take a minute on a busy machine.
COMMAND_S = 280
CLOSE_S = 60
pytestmark = pytest.mark.timeout(600)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def pages_with(language: str) -> list[Any]:
    """Returns the pages with such blocks, as parameters of a test. Pages with a cluster or Spark are deep."""
    return [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[mark for words, mark in SLOW.items() if any(words in block for block in found)],
        )
        for page in PAGES
        if (found := blocks(page, language))
    ]


class Reader:
    """A user who types the commands of a page, in as many terminals as needed."""

    def __init__(self, native_port: int, http_port: int, data: Path) -> None:
        self._ports = {"7270": str(native_port), "7271": str(http_port)}
        self._data = data
        self._coordinator = ""
        self._open = contextlib.ExitStack()
        self._running: list[subprocess.Popen[str]] = []
        self._environment = clean_environment() | {
            "TIDEGATE_ADDRESS": f"tidegate://127.0.0.1:{native_port}",
            "TIDEGATE_HTTP": f"http://127.0.0.1:{http_port}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self._serve_environment = self._environment | {
            "TIDEGATE_NATIVE_PORT": str(native_port),
            "TIDEGATE_HTTP_PORT": str(http_port),
            "TIDEGATE_SSAP_PORT": "0",
            "TIDEGATE_DATA": str(data),
        }

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                # SIGTERM comes before SIGKILL, because a cluster must have time to end its processes.
                process.terminate()
                try:
                    process.communicate(timeout=CLOSE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
        self._open.close()

    def with_our_addresses(self, text: str) -> str:
        text = re.sub(r"\b727[01]\b", lambda found: self._ports[found[0]], text)
        text = re.sub(r"zk://127\.0\.0\.1:\d+", self._coordinator, text)
        text = text.replace("--data tidegate-data", f"--data {self._data}")
        if "redis://127.0.0.1:6379/0" in text:
            text = text.replace("redis://127.0.0.1:6379/0", self._open.enter_context(RedisProcess()).url)
        return text

    def type(self, command: str) -> None:
        command = self.with_our_addresses(command)
        if command.startswith("make "):
            self._make(command)
        elif ENDLESS.match(command):
            self._start(command)
        else:
            code, out, err = self._run(command)
            # On a busy machine a slice may have been declared dead and replaced by another.
            if code and (others := re.search(r"P341: there is no active slice (matcher-\d+).*?(matcher-\d+)", err)):
                command = command.replace(others[1], others[2])
                code, out, err = self._run(command)
            assert code == 0, f"{command}\n{out}{err}"
            assert '"error"' not in out, f"{command}\n{out}"

    def interrupt_all(self) -> None:
        """Sends Ctrl-C to every terminal, the last opened first, and checks that each command printed something."""
        for process in reversed(self._running):
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=COMMAND_S)
            assert process.returncode in (0, 130), output
            assert output.strip() or "sub" not in str(process.args), f"{process.args!r} printed nothing"

    def _run(self, command: str) -> tuple[int, str, str]:
        options: Any = {"env": self._environment, "cwd": ROOT, "stdout": PIPE, "stderr": PIPE, "text": True}
        # A command without shell syntax needs no shell.
        if command.startswith("tidegate ") and not re.search(r"[|<>$;&`]", command):
            process: subprocess.Popen[str] = TidegateProcess(shlex.split(command, comments=True)[1:], **options)
        else:
            process = subprocess.Popen(["bash", "-c", command], **options)
        with process:
            out, err = process.communicate(timeout=COMMAND_S)
        return process.returncode, out, err

    def _start(self, command: str) -> None:
        is_broker = command.startswith(("tidegate serve", "tidegate cluster up"))
        process = TidegateProcess(
            shlex.split(command, comments=True)[1:],
            env=self._serve_environment if is_broker else self._environment,
            cwd=ROOT,
            stdout=PIPE,
            stderr=None if is_broker else PIPE,
            text=True,
        )
        self._running.append(process)
        # A broker reports on standard output that it is ready. A subscriber reports on standard error.
        told = process.stdout if is_broker else process.stderr
        assert told is not None
        line = told.readline()
        assert line, f"{command} ended at once"
        if command.startswith("tidegate cluster up"):
            self._coordinator = json.loads(line)["ready"]["coordinator"]

    def _make(self, command: str) -> None:
        """Checks that the target exists. test_demo runs the main job."""
        subprocess.run(
            ["make", "--dry-run", command.split()[1]], cwd=ROOT, env=self._environment, check=True, timeout=COMMAND_S
        )


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(has_knowledge=True) as process:
        yield process


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(reserve_port(), reserve_port(), tmp_path)
    yield reader
    reader.close()


@pytest.mark.parametrize("page", pages_with("sh"))
def test_the_commands_of_a_page_work(page: Path, reader: Reader) -> None:
    commands = [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]
    if not any(command.startswith(("tidegate serve", "tidegate cluster up")) for command in commands):
        reader.type("tidegate serve")
    for command in commands:
        reader.type(command)
    reader.interrupt_all()


@pytest.mark.parametrize("page", pages_with("python"))
def test_the_python_of_a_page_works(page: Path, broker: BrokerProcess, tmp_path: Path) -> None:
    """The snippets of a page form one program, as a reader would write it."""
    reader = Reader(broker.native_port, broker.http_port, tmp_path)
    program = reader.with_our_addresses("\n".join(blocks(page, "python")))
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=COMMAND_S, cwd=ROOT)


@pytest.mark.parametrize("page", pages_with("toml"))
def test_the_configurations_of_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        assert TidegateProcess(["config", "check", str(file)]).wait(COMMAND_S) == 0, block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    found = re.findall(r"^```(.*)\n((?:.*\n)*?)^```$", page.read_text(), re.MULTILINE)
    for opening, block in found:
        assert OPENING.fullmatch(opening), f"```{opening} in {page.name}: use sh, python, toml or text"
        if opening == "text":
            assert not re.search(r"^\s*(tidegate|make|pip|import|from|async with) ", block, re.MULTILINE), block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_settings_of_queues_are_documented_as_they_are() -> None:
    page = (ROOT / "docs" / "queues.md").read_text()
    for name, field in FIELDS.items():
        default = "none" if field.default is None else field.default
        assert f"| `{name}` | {default} | {HELP[name]} |" in page


def test_every_code_of_the_source_is_documented() -> None:
    source = "\n".join(path.read_text() for root in ("src", "lab/src") for path in (ROOT / root).rglob("*.py"))
    documented = (ROOT / "docs" / "protocols.md").read_text() + (ROOT / "docs" / "filters.md").read_text()
    codes = set(re.findall(r'"([FNPCALUQK]\d{3})"', source))
    assert codes
    assert sorted(code for code in codes if code not in documented) == []
