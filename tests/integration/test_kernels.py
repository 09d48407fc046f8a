"""The kernels read and write only within their arrays, and return the same without the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1] / "unit"
# Compiled kernels with bounds checks have their own cache here, because numba does not distinguish them from others.
COMPILED = Path(__file__).parents[2] / "build" / "kernels"


@pytest.mark.nojit
@pytest.mark.timeout(900)
@pytest.mark.parametrize("switch", ["NUMBA_BOUNDSCHECK", "NUMBA_DISABLE_JIT"])
def test_the_laws_hold_with_bounds_checked_and_without_the_compiler(switch: str) -> None:
    environment = os.environ | {
        switch: "1",
        "NUMBA_CACHE_DIR": str(COMPILED / switch),
        "TIDEGATE_TEST_EXAMPLES": "25",
        "TIDEGATE_TEST_SEEDS": "40",
    }
    names = ("scan_kernel", "delivery_writer", "index", "index_at_scale", "forged_frames", "forged_pages")
    tests = [str(UNIT / f"test_{name}.py") for name in names]
    # Without the compiler some tests would take minutes: those that count, those that need many notifications for a
    # plan, and those with threads, which then run one at a time anyway.
    slow = "not churn and not numbered and not attributes and not two_threads and not notifications_carry"
    chosen = ["-k", slow] if switch == "NUMBA_DISABLE_JIT" else []
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "500", *tests, *chosen],
        check=True,
        env=environment,
    )
