"""Compares the ledgers of publishers and reader after a round of the fault series. It uses no code of the broker.

    python ledger_checker.py DIRECTORY       prints the verdict as JSON; exit code 1 when a promise is broken

* Lost: acknowledged, but never read.
* Doubled: the queue stored one publisher's sequence under two numbers. Several deliveries of one stored message are
  counted separately, as redelivered.
* Out of order: in one physical queue, a publisher's sequence that is stored for the first time is lower than the one
  before it.
* Altered: the body is not the one that was published with that sequence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROWS = np.dtype(
    [("physical", "u1"), ("delivery", "u1"), ("publisher", "<u2"), ("place", "<u4"), ("sequence", "<u4"), ("n", "<u4")]
)


def check(directory: Path) -> dict[str, Any]:
    rows = np.fromfile(directory / "reader.ledger", ROWS)
    names = (directory / "reader.names").read_text().split() if rows.size else []
    found: dict[str, Any] = {
        "acknowledged": 0,
        "read": int(rows.size),
        "lost": 0,
        "doubled": 0,
        "disordered": 0,
        "altered": int((rows["sequence"] != rows["n"]).sum()),
        "redelivered": 0,
        "unacknowledged": 0,
        "longest_gap_s": 0.0,
        "deepest_window": 0,
    }
    for ledger in sorted(directory.glob("publisher-*.ledger")):
        lines = np.loadtxt(ledger, ndmin=2)
        sent, acknowledged = int(lines[:, 1].max()), int(lines[:, 2].max())
        found["acknowledged"] += acknowledged
        found["unacknowledged"] += sent - acknowledged
        found["longest_gap_s"] = max(found["longest_gap_s"], float(lines[:, 3].max()))
        found["deepest_window"] = max(found["deepest_window"], int((lines[1:, 1] - lines[:-1, 2]).max(initial=0)))
        mine = rows[rows["publisher"] == names.index(ledger.stem)] if ledger.stem in names else rows[:0]
        _check_publisher(mine, acknowledged, found)
    return found


def _check_publisher(rows: Any, acknowledged: int, found: dict[str, Any]) -> None:
    places = rows["physical"].astype(np.int64) << 32 | rows["place"]
    stored, first = np.unique(places, return_index=True)  # each stored message once, in the queue's order
    sequences = rows["sequence"][first].astype(np.int64)
    found["redelivered"] += int(len(rows) - len(stored))
    known, once = np.unique(sequences, return_index=True)
    found["doubled"] += int(len(stored) - len(known))
    found["lost"] += acknowledged - int(np.searchsorted(known, acknowledged, side="right"))
    once = np.sort(once)
    for physical in np.unique(stored[once] >> 32).tolist():
        in_order = sequences[once][stored[once] >> 32 == physical]
        found["disordered"] += int((np.diff(in_order) < 0).sum())


def is_kept(found: dict[str, Any]) -> bool:
    """Returns whether the promises hold."""
    return not any(found[name] for name in ("lost", "doubled", "disordered", "altered", "unacknowledged"))


if __name__ == "__main__":
    verdict = check(Path(sys.argv[1]))
    print(json.dumps(verdict))
    sys.exit(0 if is_kept(verdict) else 1)
