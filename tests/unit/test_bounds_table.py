"""docs/bounds.md names every bound of the code and of the settings, and for each buffer a test that exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tidegate.config import FIELDS
from tidegate.queues.definition import FIELDS as QUEUE_FIELDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "bounds.md"
SOURCE = ROOT / "src" / "tidegate"
PACKAGES = ("listeners", "layers", "queues", "knowledge", "client")
BOUND_SETTING = re.compile(r"_max$|_bytes$|_timeout_s$")
BOUND_CONSTANT = re.compile(r"_MAX$|_MAX_S$|_S_MAX$|_KEPT$|_REMEMBERED$")
BUFFERS, OTHERS = "## What fills, and what happens then", "## Limits that are not buffers"


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the table under a heading, without the header row."""
    section = PAGE.read_text().split(heading + "\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", text))


def named() -> set[str]:
    """Returns everything that the tables name as a bound."""
    bounds = {name for row in rows(BUFFERS) for name in names_in(row[1])}
    return bounds | {name for row in rows(OTHERS) for name in names_in(row[0])}


def settings() -> set[str]:
    found = {name for name in FIELDS if BOUND_SETTING.search(name)}
    return found | {f"queue.{name}" for name in QUEUE_FIELDS if BOUND_SETTING.search(name)}


@cache
def constants(module: Path) -> frozenset[str]:
    """Returns the constants of a module: assigned names in capital letters."""
    found: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()}
    return frozenset(found)


def bound_constants() -> set[str]:
    return {
        ".".join((*module.relative_to(SOURCE).with_suffix("").parts, name))
        for package in PACKAGES
        for module in (SOURCE / package).rglob("*.py")
        for name in constants(module)
        if BOUND_CONSTANT.search(name)
    }


def exists(name: str) -> bool:
    """Returns whether a setting or a constant of this name exists."""
    *path, last = name.split(".")
    if not path:
        return name in FIELDS
    if path == ["queue"]:
        return last in QUEUE_FIELDS
    module = SOURCE.joinpath(*path).with_suffix(".py")
    return module.is_file() and last in constants(module)


def test_every_bound_is_in_a_table() -> None:
    missing = sorted((settings() | bound_constants()) - named())
    assert not missing, (
        f"docs/bounds.md does not name: {', '.join(missing)}. Add a row under '{BUFFERS[3:]}', for example\n"
        f"| what fills | `{missing[0]}` | what happens then, with its code | `unit/test_….py::test_…` |\n"
        f"or, if nothing piles up there, name it with a reason under '{OTHERS[3:]}'."
    )


def test_everything_that_the_tables_name_exists() -> None:
    unknown = sorted(name for name in named() if not exists(name))
    assert not unknown, f"docs/bounds.md names what is no setting and no constant any more: {', '.join(unknown)}"


def test_each_buffer_has_a_bound_an_overflow_and_a_test_that_exists() -> None:
    for row in rows(BUFFERS):
        assert len(row) == 4, f"this row has {len(row)} cells instead of 4: {row}"
        what, bound, overflow, test = row
        assert all((what, bound, overflow)), f"a cell of this row is empty: {row}"
        nodes = re.findall(r"`((?:unit|integration|page|pipeline)/[\w/]+\.py)::([\w:]+)`", test)
        assert nodes, f"the row '{what}' names no test, such as `unit/test_budgets.py::test_…`: {test!r}"
        for file, node in nodes:
            assert has_test(ROOT / "tests" / file, node), (
                f"the row '{what}' names a test that is not there: {file}::{node}"
            )


def test_each_limit_that_is_no_buffer_has_a_reason() -> None:
    for row in rows(OTHERS):
        assert len(row) == 2, row
        assert names_in(row[0]), row
        assert row[1], row


def has_test(file: Path, node: str) -> bool:
    """Returns whether a file has a test function, or a method of a test class, of this name."""
    if not file.is_file():
        return False
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    *classes, function = node.split("::")
    for name in classes:
        body = [each for found in body if isinstance(found, ast.ClassDef) and found.name == name for each in found.body]
    functions = (each.name for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return function.startswith("test_") and function in functions
