"""What commands share: how a command is declared, how it reaches the broker, and how it reads its standard input."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from tidegate import config as settings
from tidegate.client import Connection, connect
from tidegate.client.address import DEFAULT_ADDRESS
from tidegate.errors import BadInput

READ_BYTES: Final = 64 * 1024
LINE_BYTES_MAX: Final = 1024 * 1024


def add_command(commands: Any, name: str, run: Any, text: str, examples: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


def add_client_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default=os.environ.get("TIDEGATE_ADDRESS", DEFAULT_ADDRESS),
        help="where the broker is, or several of a cluster, tidegate://one:7270,two:7270 "
        f"(default: TIDEGATE_ADDRESS, or {DEFAULT_ADDRESS})",
    )
    add_token_file(parser)


def add_token_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", type=Path, help="file with the broker's token (default: TIDEGATE_TOKEN)")


def seconds(text: str) -> float:
    """A time that somebody is ready to wait."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to wait; give seconds, such as 10, or 0 for none")
    return value


def connect_to(options: argparse.Namespace, name: str) -> Connection:
    token = None
    if options.token_file is not None:
        token = settings.read_token(settings.Config(token_file=str(options.token_file)), {})
    return connect(options.address, name=name, token=token, connect_timeout_s=2.0)


async def read_lines(file: int) -> AsyncIterator[list[bytes]]:
    """Lines as they come together, while the event loop goes on: what comes before a pause of the input is seen to."""
    rest = b""
    while True:
        await _wait_readable(file)
        chunk = os.read(file, READ_BYTES)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        yield lines
        if len(rest) > LINE_BYTES_MAX:
            raise BadInput("P314", f"a line of over {LINE_BYTES_MAX} bytes", 'send one {"NO2": 212} a line')
    yield [rest]


async def _wait_readable(file: int) -> None:
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    try:
        loop.add_reader(file, is_readable.set)
    except (PermissionError, NotImplementedError):
        # A regular file never makes one wait; Windows cannot say.
        await asyncio.sleep(0)
        return
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(file)
