"""A simulation for tests: it squares numbers, leaves a mark whenever it runs a case, and fails on request."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa


@dataclass(frozen=True)
class Toy:
    number: int
    marks: str = ""
    """The directory of the marks. If it is empty, no marks are left."""
    takes_s: float = 0.0
    fails: bool = False


def simulate(toys: Sequence[Toy]) -> pa.Table:
    return pa.table({"number": [toy.number for toy in toys], "square": [_square(toy) for toy in toys]})


def forget_one(toys: Sequence[Toy]) -> pa.Table:
    return simulate(toys[1:])


def _square(toy: Toy) -> int:
    if toy.marks:
        (Path(toy.marks) / f"{toy.number}-{uuid.uuid4().hex}").touch()
    time.sleep(toy.takes_s)
    if toy.fails:
        raise ZeroDivisionError(f"there is no {toy.number}")
    return toy.number**2


def runs_of(marks: Path) -> list[int]:
    """Returns the number of a case for each of its runs."""
    return sorted(int(mark.name.partition("-")[0]) for mark in marks.iterdir())
