"""Where compiled kernels are kept: in a directory that is named after the sources of all of them.

numba keeps a compiled kernel as long as its own file is unchanged. It does not notice that a kernel in another file,
which is compiled into it, or a limit that is a constant in it, has changed, and would go on with the old one. So a
change of any of these files is a new directory, and everything is compiled anew.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import numba

PACKAGE = Path(__file__).parents[1]


def kernel_sources() -> list[Path]:
    """The kernels, and the modules whose constants are compiled into them."""
    names = ("notification.py", "frames.py", "layers/subscription_table.py", "layers/index/tables.py")
    constants = [PACKAGE / name for name in names]
    return sorted([*constants, *(PACKAGE / "layers").rglob("*_kernel.py")])


def kernel_version() -> str:
    """Names the sources of all kernels: what one version has compiled, or laid out in arrays, is not for another."""
    digest = blake2b(digest_size=8)
    for source in kernel_sources():
        digest.update(source.read_bytes())
    return digest.hexdigest()


def use_kernel_cache() -> None:
    """Must come before the first kernel is defined. Where no directory can be made, numba chooses its own place."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or f"{cache_home}/tidegate").expanduser()
    directory = base / f"kernels-{kernel_version()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    numba.config.CACHE_DIR = str(directory)  # type: ignore[attr-defined]
