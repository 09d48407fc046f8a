"""Seeds of tests: how many each tier runs, and the seed that chooses which process dies and when.

SEED is the commit, so that one commit always makes the same choices and other commits make other choices.
TIDEGATE_TEST_SEED=… repeats the choices of a failure, as far as a busy machine allows.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no-commit"


def in_tiers(first_tier: int, count: int) -> list[Any]:
    """Returns the seeds from 0 on, as parameters of a test. Those beyond the first tier are deep."""
    return [seed if seed < first_tier else pytest.param(seed, marks=pytest.mark.seeds) for seed in range(count)]


SEED = os.environ.get("TIDEGATE_TEST_SEED") or _commit()
