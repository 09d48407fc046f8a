"""Report: collects chapters of text, tables, pictures, data sets and claims, and writes them into one directory.

Every claim names the figure that decides it, and appears in the report whether it holds or not. The first table of the
report lists the claims of all chapters.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from math import isnan, nan, sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

REPORT = "report.md"
PICTURE_DOTS_PER_INCH = 130
BOOTSTRAP_SAMPLES = 2000

# Student's t for a two-sided confidence of 95 %, by degrees of freedom from 1. The last value is used for all above.
_STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the half width of its 95 % confidence interval.

    The interval is Student's t, because a bootstrap over the few seeds of a measurement is too narrow. The mean is NaN
    if a seed has no value, for example the latency of a run that delivered nothing. With one seed only the half width
    is NaN."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        if len(values) < 2 or any(map(isnan, values)):
            return cls(fmean(values), nan)
        t = _STUDENT_T[min(len(values) - 1, len(_STUDENT_T)) - 1]
        return cls(fmean(values), t * stdev(values) / sqrt(len(values)))

    @property
    def is_above_zero(self) -> bool:
        """True if the whole interval is above zero."""
        return self.mean - self.half_width > 0

    @property
    def is_below_zero(self) -> bool:
        """True if the whole interval is below zero."""
        return self.mean + self.half_width < 0

    def write(self, digits: int = 0, scale: float = 1.0) -> str:
        """Returns text such as `4,012 ± 9`, without the interval if there is none.

        `scale` converts the unit: 1000 converts seconds to milliseconds."""
        if isnan(self.mean):
            return "-"
        if isnan(self.half_width):
            return f"{self.mean * scale:,.{digits}f}"
        return f"{self.mean * scale:,.{digits}f} ± {self.half_width * scale:,.{digits}f}"


@dataclass(frozen=True)
class Ratio:
    """The ratio of two means over the same seeds, and its 95 % confidence interval.

    A ratio has no simple distribution, so the interval consists of percentiles of a bootstrap. The bootstrap draws
    seeds repeatedly, and each drawn seed brings its values for both means. The interval is reliable from about ten
    seeds on. With fewer it is too narrow, and with one it is NaN, as it is if a seed has no value."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        above, below = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert above.shape == below.shape, (above.shape, below.shape)
        chosen = np.random.default_rng(0).integers(above.size, size=(BOOTSTRAP_SAMPLES, above.size))
        with np.errstate(divide="ignore", invalid="ignore"):
            value = above.mean() / below.mean()
            ratios = above[chosen].mean(axis=1) / below[chosen].mean(axis=1)
        has_interval = above.size > 1 and np.isfinite(ratios).all()
        low, high = np.quantile(ratios, (0.025, 0.975)) if has_interval else (nan, nan)
        return cls(float(value), float(low), float(high))

    def write(self, digits: int = 2) -> str:
        """Returns text such as `0.41 times (0.40 to 0.42)`, without the interval if there is none."""
        interval = "" if isnan(self.low) else f" ({self.low:.{digits}f} to {self.high:.{digits}f})"
        return f"{self.value:.{digits}f} times{interval}"


@dataclass(frozen=True)
class Claim:
    """A claim and its verdict. `measured` shows the figure that decided it."""

    text: str
    is_held: bool
    measured: str


@dataclass
class Chapter:
    """Collects the text and claims of a chapter. Pictures and data sets are written to `out` immediately."""

    out: Path
    title: str
    claims: list[Claim] = field(default_factory=list)
    _blocks: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        self._blocks.append(f"### {title}")

    def say(self, text: str) -> None:
        self._blocks.append(text)

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self._blocks.append(write_table(head, rows))

    def picture(self, name: str, figure: Figure, caption: str) -> None:
        figure.savefig(self.out / f"{name}.png", dpi=PICTURE_DOTS_PER_INCH)
        self._blocks.append(f"![{caption}]({name}.png)\n\n*{caption}*")

    def data(self, name: str, table: pa.Table, what: str) -> None:
        pq.write_table(table, self.out / f"{name}.parquet")
        self._blocks.append(f"Data: [{name}.parquet]({name}.parquet), {table.num_rows:,} rows: {what}.")

    def claim(self, text: str, is_held: bool, measured: str) -> None:
        self.claims.append(Claim(text, is_held, measured))

    def write(self) -> str:
        return "\n\n".join([f"## {self.title}", *self._blocks])


def write_report(out: Path, title: str, about: Sequence[str], chapters: Sequence[Chapter]) -> Path:
    """Writes the report, with the claims before the chapters, and returns its path."""
    rows = [
        (claim.text, "held" if claim.is_held else "**not held**", claim.measured)
        for chapter in chapters
        for claim in chapter.claims
    ]
    parts = [
        f"# {title}",
        "\n".join(f"* {line}" for line in about),
        "## Claims",
        write_table(("claim", "", "measured"), rows),
        *(chapter.write() for chapter in chapters),
    ]
    path = out / REPORT
    path.write_text("\n\n".join(parts) + "\n")
    return path


def write_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. Columns that hold only figures or `-` are aligned to the right."""
    cells = [list(row) for row in rows]
    are_numbers = [all(row[k] == "-" or row[k][:1].isdigit() for row in cells) for k in range(len(head))]
    rule = ["---:" if is_number else "---" for is_number in are_numbers]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *cells))


def describe_machine(packages: Sequence[str]) -> str:
    """Returns the processor, the number of cores, and the versions of Python and the packages."""
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.machine()


@dataclass
class Progress:
    """Progress on standard error: a line that is updated on a terminal, or one line at the end in a log."""

    what: str
    total: int
    done: int = 0

    def advance(self, steps: int) -> None:
        self.done += steps
        is_done, is_watched = self.done >= self.total, sys.stderr.isatty()
        if is_done or is_watched:
            line = f"{self.what}: {self.done} of {self.total}"
            print(f"\r{line}" if is_watched else line, end="\n" * is_done, file=sys.stderr, flush=True)
