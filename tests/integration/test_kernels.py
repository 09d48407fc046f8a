"""The kernels read and write within their arrays, and say the same without the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1] / "unit"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("switch", ["NUMBA_BOUNDSCHECK", "NUMBA_DISABLE_JIT"])
def test_the_laws_hold_with_bounds_checked_and_without_the_compiler(switch: str, tmp_path: Path) -> None:
    environment = os.environ | {
        switch: "1",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "TIDEGATE_TEST_EXAMPLES": "25",
        "TIDEGATE_TEST_SEEDS": "40",
    }
    tests = [str(UNIT / f"test_{name}.py") for name in ("scan_kernel", "delivery_writer", "index", "index_at_scale")]
    # Those that only count would take minutes without the compiler.
    chosen = ["-k", "not churn and not numbered and not attributes"] if switch == "NUMBA_DISABLE_JIT" else []
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "500", *tests, *chosen],
        check=True,
        env=environment,
    )
