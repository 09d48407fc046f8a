"""Seeded random notifications and filters over a small alphabet, so that many match and many nearly match."""

from __future__ import annotations

import os
import random
from typing import Any

Notification = dict[str, Any]

NAMES = ["NO2", "station", "open", "room", "my attr"]
VALUES: list[Any] = [0, 1, 1.0, 2, 12, 150.5, 212, 28079004, -1, True, False, "", "1", "28", "28079004", "kitchen"]
VALUES += ["it's", "é", "ki"]
FORMS = ["==", "!=", "<", "<=", ">", ">=", "^=", "$=", "*=", "..", "exists", "absent"]


def make_random() -> random.Random:
    """Returns a random source and prints its seed, which pytest shows on failure. TIDEGATE_TEST_SEED repeats it."""
    seed = int(os.environ.get("TIDEGATE_TEST_SEED", random.randrange(2**32)))
    print(f"TIDEGATE_TEST_SEED={seed}")
    return random.Random(seed)


def random_notification(chance: random.Random) -> Notification:
    names = chance.sample(NAMES, chance.randint(1, len(NAMES)))
    return {name: chance.choice(VALUES) for name in names}


def random_filter(chance: random.Random) -> str:
    """Returns the text of a filter with up to three constraints."""
    return ";".join(_constraint(chance) for _ in range(chance.randint(0, 3))) or "*"


def _constraint(chance: random.Random) -> str:
    name, form = _quote(chance.choice(NAMES)), chance.choice(FORMS)
    if form == "exists":
        return name
    if form == "absent":
        return f"!{name}"
    if form == "..":
        low, high = sorted(chance.sample([-1, 0, 1, 12, 212], 2))
        return f"{name}=={low}..{high}"
    if form in ("^=", "$=", "*="):
        return name + form + _quote(chance.choice(["", "2", "28", "4", "k", "t", "é"]))
    if form in ("==", "!="):
        return name + form + ",".join(_write(value) for value in chance.sample(VALUES, chance.randint(1, 3)))
    return name + form + _write(chance.choice([value for value in VALUES if not isinstance(value, bool)]))


def _write(value: Any) -> str:
    if isinstance(value, str):
        return _quote(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
