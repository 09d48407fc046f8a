"""Spark's Python workers: processes that serve one task after another.

After each task Spark has a worker look through all its objects for garbage. With numba, Arrow and pandas loaded that
takes 70 ms, as much as reading 40,000 messages; and nothing of what is loaded is ever garbage.
"""

from __future__ import annotations

import gc
from functools import cache


@cache
def keep_what_is_loaded() -> None:
    """Once a process, at the end of its first task: what is there by then is not looked at again."""
    gc.collect()
    gc.freeze()
