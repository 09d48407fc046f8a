"""Secrets of a process: where they come from, and where they must not appear.

A secret comes from a file or from the environment, never from a command line, which every user of the machine can
read. Child processes get an environment without the secrets that they do not need. Logs and output show addresses
without their passwords.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tidegate.errors import ConfigError

TOKEN_VARIABLE: Final = "TIDEGATE_TOKEN"  # noqa: S105 - the name of a variable
REDIS_PASSWORD_VARIABLE: Final = "TIDEGATE_REDIS_PASSWORD"  # noqa: S105 - the name of a variable
MASK: Final = "***"

# The password of user:password@host reaches to the last @, because an unescaped password may contain others.
_PASSWORD: Final = re.compile(r"(?<=//)([^:@/]*):.*(?=@)", re.DOTALL)
_PARAMETER: Final = re.compile(r"([?&](?:password|credentials?)=)[^&#]*", re.IGNORECASE)


def read_secret(file: str, code: str, setting: str) -> str:
    """Returns the text of a file without surrounding white space. Raises ConfigError if the file is unreadable."""
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(code, f"{setting} {file!r} cannot be read: {error}", "name a readable text file") from error


def read_redis_password(file: str, environment: Mapping[str, str]) -> str:
    """Returns the password of Redis from its file or from the environment; "" if there is none."""
    if file:
        return read_secret(file, "C445", "redis_password_file")
    return environment.get(REDIS_PASSWORD_VARIABLE, "")


def masked(address: str) -> str:
    """Returns an address with its password, if any, replaced by `***`."""
    return _PARAMETER.sub(rf"\g<1>{MASK}", _PASSWORD.sub(rf"\g<1>:{MASK}", address))


def without_secrets(*needed: str) -> dict[str, str]:
    """Returns the environment for a child process, without the secrets that are not named in `needed`."""
    hidden = {TOKEN_VARIABLE, REDIS_PASSWORD_VARIABLE} - set(needed)
    return {name: value for name, value in os.environ.items() if name not in hidden}
