"""The maps of packages in docs/architecture.md list exactly the modules of the source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def mapped(package: str) -> dict[str, set[str]]:
    """Returns the modules that the page lists for each package below this one."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    lines = page.partition(f"```text\n{package}/\n")[2].partition("```")[0].splitlines()
    packages: dict[str, set[str]] = {}
    modules: set[str] = set()
    for line in lines:
        if begun := re.match(r"  (\S+?)/? ", line):
            modules = packages[begun[1].replace("*.py", "")] = set()
        else:
            modules |= set(re.findall(r"\w+", line))
    return packages


@pytest.mark.parametrize("package", ["src/tidegate", "lab/src/tidegate_lab"])
def test_the_map_has_every_module(package: str) -> None:
    source = ROOT / package
    found: dict[str, set[str]] = {}
    for path in (path.relative_to(source) for path in source.rglob("*.py")):
        modules = found.setdefault(str(path.parent).removeprefix("."), set())
        if path.stem != "__init__":
            modules.add(path.stem)
    assert mapped(package) == found
