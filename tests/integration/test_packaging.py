"""`pip install tidegate` gives the client and its commands, with msgspec and nothing of the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from broker_process import BrokerProcess, clean_environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def client_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment with the client alone."""
    environment = tmp_path_factory.mktemp("client") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(ROOT)], check=True)
    return environment / "bin"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=60)


def test_only_msgspec_comes_along(client_only: Path) -> None:
    listed = run(str(client_only / "pip"), "list", "--format", "freeze").stdout.split()
    assert {line.split("==")[0] for line in listed} <= {"tidegate", "msgspec", "pip", "setuptools"}


def test_the_client_talks_to_a_broker(client_only: Path, broker: BrokerProcess) -> None:
    published = run(str(client_only / "tidegate"), "pub", "NO2=212", "--address", broker.native)
    assert (published.returncode, published.stdout) == (0, '{"accepted":1}\n')


def test_serving_says_what_to_install(client_only: Path) -> None:
    served = run(str(client_only / "tidegate"), "serve")
    assert served.returncode == 2
    assert "C412" in served.stderr
    assert "tidegate[server]" in served.stderr


def test_the_public_names_are_there(client_only: Path) -> None:
    code = (
        "import tidegate; [getattr(tidegate, name) for name in tidegate.__all__]; print(tidegate.Filter.parse('a>1'))"
    )
    assert run(str(client_only / "python"), "-W", "error", "-c", code).stdout == "a>1\n"
