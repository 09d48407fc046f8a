"""`tidegate evaluate …`: the command of the laboratory, which is a package of its own and not part of the product.

The laboratory adds its command through the entry point `evaluate` of the group `tidegate.commands`.

What may go wrong: the laboratory is not installed (C412).
"""

from __future__ import annotations

import argparse
from importlib.metadata import entry_points
from typing import Any, Final, NoReturn

from tidegate.commands.command_line import add_command
from tidegate.errors import ConfigError

GROUP: Final = "tidegate.commands"


def add_evaluate(commands: Any) -> None:
    """Adds the laboratory's command; without the laboratory, a command that names what to install."""
    for entry in entry_points(group=GROUP, name="evaluate"):
        entry.load()(commands)
        return
    parser = add_command(commands, "evaluate", _refuse, "Repeat the papers' experiments (needs tidegate[evaluation]).")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _refuse(_options: argparse.Namespace) -> NoReturn:
    raise ConfigError(
        "C412",
        "the experiments are in the package tidegate-lab, which is not installed",
        "pip install 'tidegate[evaluation]'",
    )
