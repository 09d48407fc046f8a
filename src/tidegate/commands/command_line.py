"""What commands share: declaring a command, connecting to the broker, and reading standard input."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from tidegate import config as settings
from tidegate.client import Connection, connect
from tidegate.client.address import DEFAULT_ADDRESS
from tidegate.errors import BadInput

READ_BYTES: Final = 64 * 1024
LINE_BYTES_MAX: Final = 1024 * 1024
HELP_COLUMNS: Final = 100


def add_command(commands: Any, name: str, run: Any, text: str, examples: str = "") -> argparse.ArgumentParser:
    """Declares a command. `examples` are command lines; notes may follow them after an empty line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=textwrap.fill(text, HELP_COLUMNS),
        epilog=help_examples(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def help_examples(examples: str) -> str:
    lines, gap, notes = examples.partition("\n\n")
    return f"examples:\n{textwrap.indent(lines, '  ')}{gap}{notes}" if examples else ""


def add_client_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default=os.environ.get("TIDEGATE_ADDRESS", DEFAULT_ADDRESS),
        help="address of the broker, or of several in a cluster: tidegate://one:7270,two:7270 "
        f"(default: $TIDEGATE_ADDRESS, or {DEFAULT_ADDRESS})",
    )
    add_token_file(parser)


def add_token_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-file", type=Path, help="file with the broker's token (default: the token in $TIDEGATE_TOKEN)"
    )


def seconds(text: str) -> float:
    """Parses a waiting time, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; give seconds, such as 10, or 0 for none")
    return value


def connect_to(options: argparse.Namespace, name: str) -> Connection:
    token = None
    if options.token_file is not None:
        token = settings.read_token(settings.Config(token_file=str(options.token_file)), {})
    return connect(options.address, name=name, token=token, connect_timeout_s=2.0)


async def read_lines(file: int) -> AsyncIterator[list[bytes]]:
    """Yields lines in groups as they arrive, without blocking the event loop. Lines before a pause of the input are
    yielded at once."""
    rest = b""
    while True:
        await _wait_readable(file)
        chunk = os.read(file, READ_BYTES)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        yield lines
        if len(rest) > LINE_BYTES_MAX:
            raise BadInput("P314", f"a line has over {LINE_BYTES_MAX} bytes", "write one JSON object per line")
    yield [rest]


async def _wait_readable(file: int) -> None:
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    try:
        loop.add_reader(file, is_readable.set)
    except (PermissionError, NotImplementedError):
        # Regular files are always readable; on Windows asyncio cannot watch files.
        await asyncio.sleep(0)
        return
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(file)
