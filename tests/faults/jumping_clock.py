"""A wall clock for processes under test that can jump while they run (`jumping_clock.c`)."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "jumping_clock.c"


class Clock:
    """A clock for the processes that are started with `environment`. Needs a C compiler."""

    def __init__(self, directory: Path) -> None:
        self._offset = directory / "clock-offset"
        self._offset.write_bytes(struct.pack("d", 0.0))
        library = directory / "clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "TEST_CLOCK_OFFSET": str(self._offset)}

    def jump(self, seconds: float) -> float:
        """Moves the clock, and returns its difference from real time. Processes map the file, so they see it soon."""
        handle = os.open(self._offset, os.O_RDWR)
        try:
            (offset,) = struct.unpack("d", os.pread(handle, 8, 0))
            os.pwrite(handle, struct.pack("d", offset + seconds), 0)
        finally:
            os.close(handle)
        return float(offset + seconds)
