"""`tidegate queue verify`: looks for damage in the data directory of a broker, and repairs it.

Exit codes: 0 sound, or repaired; 1 damaged; 2 an error, printed with its remedy.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate import config as settings
from tidegate.commands import terminal
from tidegate.commands.command_line import add_command
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.queues.stores.salvage import Salvaged
    from tidegate.queues.stores.verification import Verification


def add_verify(actions: Any) -> None:
    parser = add_command(
        actions,
        "verify",
        _verify,
        "Check the queues in a data directory, record by record; exits with 1 if they are damaged.",
        "tidegate queue verify                          # works while the broker runs\n"
        "tidegate queue verify --data /srv/tidegate --repair\n\n"
        "Stop the broker before --repair. It copies everything that can be read into a new environment, sets corrupt\n"
        "records aside, corrects the counters, and keeps the damaged environment under another name.",
    )
    default = settings.FIELDS["data"].default
    parser.add_argument(
        "--data", type=Path, default=Path(default), metavar="DIR", help=f"the data directory (default: {default})"
    )
    parser.add_argument("--repair", action="store_true", help="replace a damaged environment with what can be read")


def _verify(options: argparse.Namespace) -> int:
    try:
        from tidegate.queues.stores.verification import verify
    except ImportError as error:
        raise ConfigError(
            "C412", f"this command needs {error.name}, which is not installed", "pip install 'tidegate[server]'"
        ) from error
    progress = _Progress()
    found = verify(options.data, is_repair=options.repair, advance=progress.advance)
    progress.finish()
    if found.is_in_use:
        terminal.note(f"a broker is using {options.data}: this is its state of a moment ago")
    _show(found)
    if found.salvaged:
        return 0
    if not found.is_sound:
        terminal.note(f"damaged: stop the broker and run tidegate queue verify --data {options.data} --repair")
    return 0 if found.is_sound else 1


def _show(found: Verification) -> None:
    if not terminal.is_for_people():
        for queue in found.queues:
            terminal.print_json(asdict(queue))
        summary = {"sound": found.is_sound, "in_use": found.is_in_use, "problems": found.problems}
        repaired = {durability: _summary(salvaged) for durability, salvaged in found.salvaged.items()}
        terminal.print_json(summary | ({"repaired": repaired} if repaired else {}))
        return
    print(f"{'queue':<30} {'counted':>12} {'reachable':>12} {'corrupt':>9} {'unreachable':>12}")
    for queue in found.queues:
        counts = f"{queue.counted:>12,} {queue.reachable:>12,} {queue.corrupt:>9,} {queue.unreachable:>12,}"
        print(f"{queue.queue:<30} {counts}")
    for text in found.problems:
        print(f"problem: {text}")
    for durability, salvaged in found.salvaged.items():
        print(f"repaired {durability}; the damaged environment is {salvaged.damaged}")
        print(f"  {sum(salvaged.kept.values()):,} messages kept, {sum(salvaged.aside.values()):,} records set aside")
        print(f"  {salvaged.found:,} of the messages were found on pages that were no longer linked")
        if salvaged.recovered_queues:
            print(f"  queues whose name was lost: {', '.join(salvaged.recovered_queues)}")
    print("sound" if found.is_sound else "repaired" if found.salvaged else "damaged", flush=True)


def _summary(salvaged: Salvaged) -> dict[str, Any]:
    return {
        "kept": sum(salvaged.kept.values()),
        "set_aside": sum(salvaged.aside.values()),
        "found_again": salvaged.found,
        "recovered_queues": salvaged.recovered_queues,
        "damaged_copy": str(salvaged.damaged),
    }


class _Progress:
    """Shows on a terminal, on standard error, how many entries have been checked, if the work takes long."""

    def __init__(self) -> None:
        self._count = 0
        self._shown_s = time.monotonic()
        self._has_shown = False

    def advance(self, count: int) -> None:
        self._count += count
        if sys.stderr.isatty() and time.monotonic() - self._shown_s > terminal.PROGRESS_EVERY_S:
            self._shown_s, self._has_shown = time.monotonic(), True
            print(f"\r{self._count} entries", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._has_shown:
            print(file=sys.stderr)
