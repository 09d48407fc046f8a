"""Every command and snippet of README and docs/ does what the text says, against a real broker.

Commands that run until they are interrupted (`tidegate serve`, `sub`, `query --follow`) are started, must say
something, and are interrupted at the end of their page. The ports of the text are replaced by free ones.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker_process import BrokerProcess, clean_environment

from tidegate.queues.definition import FIELDS, HELP

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
ENDLESS = re.compile(r"tidegate (serve|sub(?!.*--(?:count|forget))|query(?=.*--follow))\b")
# Run by whoever runs this test, or too long to run inside it; each is checked to exist.
MAKE_TARGETS_NOT_RUN = {"test", "test-unit", "soak", "simulate", "check", "setup", "bench"}
# Jobs on Spark, which a page may have several of, take a minute on a busy machine.
COMMAND_S = 280
pytestmark = pytest.mark.timeout(600)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Reader:
    """Somebody who types the commands of a page, in as many terminals as needed."""

    def __init__(self, native_port: int, http_port: int, data: Path) -> None:
        self._ports = {"7270": str(native_port), "7271": str(http_port)}
        self._running: list[subprocess.Popen[str]] = []
        self._environment = clean_environment() | {
            "TIDEGATE_ADDRESS": f"tidegate://127.0.0.1:{native_port}",
            "TIDEGATE_HTTP": f"http://127.0.0.1:{http_port}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            # For `make run`, which people end with Ctrl-C.
            "MINUTES": "0.1",
        }
        self._serve_environment = self._environment | {
            "TIDEGATE_NATIVE_PORT": str(native_port),
            "TIDEGATE_HTTP_PORT": str(http_port),
            "TIDEGATE_SSAP_PORT": "0",
            "TIDEGATE_DATA": str(data),
        }

    def with_our_ports(self, text: str) -> str:
        return re.sub(r"\b727[01]\b", lambda found: self._ports[found[0]], text)

    def type(self, command: str) -> None:
        command = self.with_our_ports(command)
        if command.startswith("make "):
            self._make(command)
        elif ENDLESS.match(command):
            self._start(command)
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                env=self._environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            assert '"error"' not in done.stdout, f"{command}\n{done.stdout}"

    def interrupt_all(self) -> None:
        """Ctrl-C in every terminal, the last opened first; what ran has said something."""
        for process in reversed(self._running):
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=COMMAND_S)
            assert process.returncode in (0, 130), output
            assert output.strip() or "sub" not in str(process.args), f"{process.args!r} printed nothing"

    def _start(self, command: str) -> None:
        is_broker = command.startswith("tidegate serve")
        process = subprocess.Popen(
            shlex.split(command),
            env=self._serve_environment if is_broker else self._environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=None if is_broker else subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        # A broker says that it is ready on standard output, a subscriber that it is subscribed on standard error.
        told = process.stdout if is_broker else process.stderr
        assert told is not None
        assert told.readline(), f"{command} ended at once"

    def _make(self, command: str) -> None:
        target = command.split()[1]
        dry = ["--dry-run"] if target in MAKE_TARGETS_NOT_RUN else []
        subprocess.run(["make", *dry, target], cwd=ROOT, env=self._environment, check=True, timeout=COMMAND_S)


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(has_knowledge=True) as process:
        yield process


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(free_port(), free_port(), tmp_path)
    yield reader
    for process in reader._running:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("page", pages_with("sh"), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_work(page: Path, reader: Reader) -> None:
    commands = [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]
    if not any(command.startswith("tidegate serve") for command in commands):
        reader.type("tidegate serve")
    for command in commands:
        reader.type(command)
    reader.interrupt_all()


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_works(page: Path, broker: BrokerProcess, tmp_path: Path) -> None:
    """The snippets of a page are one program, as a reader would build it up."""
    reader = Reader(broker.native_port, broker.http_port, tmp_path)
    program = reader.with_our_ports("\n".join(blocks(page, "python")))
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=COMMAND_S, cwd=ROOT)


@pytest.mark.parametrize("page", pages_with("toml"), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_configurations_of_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        subprocess.run([sys.executable, "-m", "tidegate", "config", "check", str(file)], check=True, timeout=COMMAND_S)


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
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    documented = (ROOT / "docs" / "protocols.md").read_text() + (ROOT / "docs" / "filters.md").read_text()
    codes = set(re.findall(r'"([FNPCALUQK]\d{3})"', source))
    assert codes
    assert sorted(code for code in codes if code not in documented) == []
