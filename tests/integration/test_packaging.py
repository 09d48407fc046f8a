"""`pip install tidegate` installs the client and its commands, with msgspec and without the server's dependencies."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from broker_process import BrokerProcess, clean_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def client_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the bin directory of an environment with the client only."""
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


def test_experiments_are_not_installed_and_the_command_names_the_extra(client_only: Path) -> None:
    evaluated = run(str(client_only / "tidegate"), "evaluate", "queues", "--short", "--out", "results")
    assert evaluated.returncode == 2
    assert "C412" in evaluated.stderr
    assert "tidegate[evaluation]" in evaluated.stderr
    assert run(str(client_only / "python"), "-c", "import tidegate_lab").returncode == 1


def test_the_public_names_are_there(client_only: Path) -> None:
    code = (
        "import tidegate; [getattr(tidegate, name) for name in tidegate.__all__]; print(tidegate.Filter.parse('a>1'))"
    )
    assert run(str(client_only / "python"), "-W", "error", "-c", code).stdout == "a>1\n"


def test_pinned_versions_are_within_the_declared_bounds() -> None:
    """The tests use versions that users may get, and no pin is below a minimum that fixes a known vulnerability."""
    projects = [
        tomllib.loads((ROOT / name).read_text())["project"] for name in ("pyproject.toml", "lab/pyproject.toml")
    ]
    declared = [each for project in projects for each in project["dependencies"]]
    declared += [each for extra in projects[0]["optional-dependencies"].values() for each in extra]
    assert projects[0]["version"] == projects[1]["version"]
    pinned = dict(line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for each in map(Requirement, declared):
        if not each.name.startswith("tidegate"):
            assert pinned[each.name.lower().replace("prometheus-client", "prometheus_client")] in each.specifier, each


def test_the_audit_looks_at_the_pinned_versions() -> None:
    planned = subprocess.run(["make", "-n", "audit"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pip-audit --requirement constraints.txt" in planned
