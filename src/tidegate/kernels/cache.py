"""Stores compiled kernels in a directory that is named after a digest of the sources that are compiled.

Every module with kernels imports `kernel`, `inlined` or `njit` from here, so that the directory is set before its first
kernel is defined. Otherwise the order of imports would decide where numba stores a kernel, and it could be compiled
twice.

numba recompiles a kernel when the kernel's own file has changed. It does not notice a change in another file, such as
in a kernel that is inlined or in a constant. So a change in any of the files that `kernel_sources` or `law_sources`
lists leads to a new directory, where everything is compiled again.

What may go wrong: the process executes the code in the directory. So it does not use a directory that another user owns
or can write to. It then compiles the kernels into a temporary directory, which it removes when it exits.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numba
from numba import njit

from tidegate.security.private_files import DIRECTORY_MODE, reason_not_to_run

__all__ = ["cache_version", "inlined", "kernel", "kernel_sources", "kernel_version", "law_sources", "njit"]

log = logging.getLogger(__name__)

# Kernels are compiled without reference counting (`_nrt`). With it, each array that a kernel slices or takes out of a
# tuple would cost two atomic operations (decision 008). Therefore no kernel may allocate: its caller owns all memory.
# LLVM puts `inlined` functions into their caller: a call would pass every field of every array on the stack.
_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "_nrt": False}
kernel = njit(**_OPTIONS, cache=True)
inlined = njit(**_OPTIONS, forceinline=True)

PACKAGE = Path(__file__).parents[1]


def kernel_sources() -> list[Path]:
    """Returns the kernels of the layers, and the modules whose constants and options are compiled into them."""
    names = ("notification.py", "frames.py", "kernels/cache.py", "layers/subscription_table.py", "index/tables.py")
    constants = [PACKAGE / name for name in names]
    kernels = [
        source for package in ("kernels", "index", "layers") for source in (PACKAGE / package).glob("*_kernel.py")
    ]
    return sorted([*constants, *kernels])


def law_sources() -> list[Path]:
    """Returns the modules of the product whose functions and constants the laboratory compiles into its kernels."""
    return sorted([*(PACKAGE / "client" / "control").glob("*.py"), PACKAGE / "knowledge" / "pace.py"])


def kernel_version() -> str:
    """Returns a digest of `kernel_sources`. Saved arrays of one version are invalid in another."""
    return _digest(kernel_sources())


def cache_version() -> str:
    """Returns a digest of everything that is compiled. Compiled kernels of one version are invalid in another."""
    return _digest([*kernel_sources(), *law_sources()])


def _digest(sources: list[Path]) -> str:
    digest = blake2b(digest_size=8)
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _use_directory() -> None:
    """Sets numba's cache directory. If it cannot be created, numba chooses one."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or f"{cache_home}/tidegate").expanduser()
    directory = base / f"kernels-{cache_version()}"
    try:
        directory.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        reason = reason_not_to_run(directory)
    except OSError:
        return
    if reason:
        log.warning(
            "compiled kernels in %s are not used, because %s; remove that directory, or set NUMBA_CACHE_DIR",
            directory,
            reason,
        )
        directory = Path(tempfile.mkdtemp(prefix="tidegate-kernels-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    numba.config.CACHE_DIR = str(directory)  # type: ignore[attr-defined]


_use_directory()
