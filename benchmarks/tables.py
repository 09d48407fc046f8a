"""Writes tables of figures as Markdown that is also readable in a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def write_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Returns a table whose first column is text and whose other columns are numbers."""
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    rule = [f"{'-' * widths[0]}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    lines = [f"### {title}", "", *(_line(row, widths) for row in (head, rule, *rows)), ""]
    return "\n".join([*lines, *(f"* {note}" for note in notes), ""])


def ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}" if reference else "-"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
    return f"| {' | '.join(cells)} |"
