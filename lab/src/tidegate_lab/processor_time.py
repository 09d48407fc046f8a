"""Processor time of other processes, from the kernel."""

from __future__ import annotations

import time
from typing import Final

# The low bits of a clock id that ask for a process, and for its CPU time as the scheduler counts it.
_PROCESS_CPU_CLOCK: Final = 2


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a live process and its threads have used, as clock_getcpuclockid(3) finds them."""
    return time.clock_gettime(~pid << 3 | _PROCESS_CPU_CLOCK)
