"""Grid: runs scenarios x variants x seeds together, and returns the results as estimates over the seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import pyarrow as pa

from tidegate_lab.report import Estimate, Progress, Ratio

CaseT = TypeVar("CaseT")

Run: TypeAlias = Callable[[str, Sequence[CaseT]], pa.Table]
"""Runs cases and returns one row per case, in their order. The text is the label of the progress line."""

CASES_PER_CHUNK = 4


def run_in_chunks(simulate: Callable[[Sequence[CaseT]], pa.Table], what: str, cases: Sequence[CaseT]) -> pa.Table:
    """Runs the cases one after another in this process, and shows the progress."""
    progress = Progress(what, len(cases))
    tables = []
    for start in range(0, len(cases), CASES_PER_CHUNK):
        chunk = cases[start : start + CASES_PER_CHUNK]
        tables.append(simulate(chunk))
        progress.advance(len(chunk))
    return pa.concat_tables(tables)


class SeededGrid(Generic[CaseT]):
    """Holds cases by the names of their scenario and variant. Add all cases, run them, then read the results."""

    def __init__(self) -> None:
        self._keys: list[tuple[str, str]] = []
        self._cases: list[CaseT] = []
        self._outcomes = pa.table({})

    def add_case(self, scenario: str, variant: str, case: CaseT) -> None:
        self._keys.append((scenario, variant))
        self._cases.append(case)

    def run(self, what: str, run: Run[CaseT]) -> None:
        self._outcomes = run(what, self._cases)

    def estimate(self, scenario: str, variant: str, measure: str) -> Estimate:
        return Estimate.of(self.values(scenario, variant, measure))

    def difference(self, scenario: str, ours: str, theirs: str, measure: str) -> Estimate:
        """Returns the estimate of ours minus theirs, seed by seed: an effect that a seed has on both cancels out."""
        values = zip(self.values(scenario, ours, measure), self.values(scenario, theirs, measure), strict=True)
        return Estimate.of([a - b for a, b in values])

    def ratio(self, scenario: str, ours: str, theirs: str, measure: str) -> Ratio:
        return Ratio.of(self.values(scenario, ours, measure), self.values(scenario, theirs, measure))

    def table(self) -> pa.Table:
        scenarios, variants = zip(*self._keys, strict=True)
        return self._outcomes.add_column(0, "scenario", [scenarios]).add_column(1, "variant", [variants])

    def values(self, scenario: str, variant: str, measure: str) -> list[float]:
        pairs = zip(self._keys, self._outcomes[measure].to_pylist(), strict=True)
        return [value for key, value in pairs if key == (scenario, variant)]
