"""Describes the machine on which the figures were measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    load = os.getloadavg()[0]
    state = "busy" if load > 0.5 else "quiet"
    return (
        f"{model.split(':')[-1].strip()}, {os.cpu_count()} cores, load {load:.1f} before the start ({state}); "
        f"Python {platform.python_version()}"
    )
