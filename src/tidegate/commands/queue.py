"""`tidegate queue …`: create and inspect queues, put messages in and take them out. One function per action.

`take` deletes the messages it has printed and returns the others to the queue, also when it is interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

from tidegate.client import Connection, Message, Queue
from tidegate.commands import terminal
from tidegate.commands.command_line import (
    add_client_options,
    add_command,
    connect_to,
    help_examples,
    read_lines,
    seconds,
)
from tidegate.errors import BadInput, ConfigError
from tidegate.queues.definition import FIELDS, HELP, parse_settings

PUT_AT_ONCE: Final = 100


def add_queue(commands: Any) -> Any:
    """Adds the command. Returns its actions, so that the caller can add more."""
    text = "Create queues, put messages in and take them out."
    parser = commands.add_parser(
        "queue",
        help=text,
        description=text,
        epilog=help_examples(
            "tidegate queue create alerts --filter 'NO2>200'\n"
            "tidegate queue put alerts 42\n"
            "tidegate queue take alerts\n\n"
            "docs/queues.md explains queues."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for add in (_add_create, _add_list, _add_put, _add_take, _add_stats, _add_redrive, _add_drop):
        add(actions)
    return actions


def _add_create(actions: Any) -> None:
    parser = add_command(
        actions,
        "create",
        _create,
        "Create a queue, or replace the settings of an existing one; omitted settings return to their defaults.",
        "tidegate queue create work\n"
        "tidegate queue create alerts --filter 'NO2>200' --policy drop-oldest --messages-max 100000",
    )
    parser.add_argument("name", metavar="NAME", help="the queue")
    for name, field in FIELDS.items():
        default = "none" if field.default is None else field.default
        text = f"{HELP[name]} (default: {default})".replace("%", "%%")
        parser.add_argument("--" + name.replace("_", "-"), metavar="VALUE", help=text)
    add_client_options(parser)


def _create(options: argparse.Namespace) -> int:
    given = {name: value for name in FIELDS if (value := getattr(options, name)) is not None}
    settings = parse_settings(given, is_text=True)
    chosen = {name: getattr(settings, name) for name in given}

    async def create(broker: Connection) -> None:
        made = await broker.queue(options.name).create(**chosen)
        terminal.note(f"queue {options.name}: {made['physical_queues']} physical queues, {made['method']}")
        if not terminal.is_for_people():
            terminal.print_json({"name": options.name, "settings": made})

    return _run(options, create)


def _add_list(actions: Any) -> None:
    parser = add_command(actions, "list", _list, "Show all queues, how many messages each has, and how full it is.")
    add_client_options(parser)


def _list(options: argparse.Namespace) -> int:
    async def show(broker: Connection) -> None:
        for definition in await broker.queues():
            name, settings = definition["name"], definition["settings"]
            statistics = await broker.queue(name).stats()
            messages, ratio = statistics["messages"], statistics["fill_ratio"]
            state = _publishers_state(statistics)
            if terminal.is_for_people():
                level = f"{messages:>12,} messages {100 * ratio:>4.0f} % full"
                print(f"{name:<30} {level}   {settings['method']:<12} {settings['filter'] or ''}  {state}".rstrip())
            else:
                shown = {"name": name, "messages": messages, "fill_ratio": ratio, "publishers": state}
                terminal.print_json(shown | {"settings": settings})

    return _run(options, show)


def _publishers_state(statistics: dict[str, Any]) -> str:
    """Describes what a full queue does to its publishers; empty if it has room."""
    if statistics["is_overflowing"]:
        return "OVERFLOWS"
    return "HOLDS BACK PUBLISHERS" if statistics["holding_back_s"] else ""


def _add_put(actions: Any) -> None:
    parser = add_command(
        actions,
        "put",
        _put,
        "Put a message into a queue, or one for each JSON line of standard input.",
        "tidegate queue put work 42\n"
        'tidegate queue put work \'{"station": 4, "NO2": 212}\' --group station-4 --header kind=alert\n'
        "tidegate queue put work - < messages.jsonl\n\n"
        "VALUE is parsed as JSON; if it is not JSON, it is sent as a text.",
    )
    parser.add_argument("name", metavar="NAME", help="the queue")
    parser.add_argument(
        "value", metavar="VALUE", help="body of the message, or - to read JSON lines from standard input"
    )
    parser.add_argument("--group", default="", help="messages of one group keep their order")
    parser.add_argument("--device", default="", help="sender; with --sequence, the queue drops duplicates")
    parser.add_argument(
        "--sequence", type=int, help="number of the message; further lines of standard input get the next numbers"
    )
    parser.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="a header; repeatable")
    parser.add_argument(
        "--wait",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for room in a full queue (default: 0)",
    )
    add_client_options(parser)


def _put(options: argparse.Namespace) -> int:
    headers = dict(_parse_header(text) for text in options.header)

    async def put(broker: Connection) -> None:
        queue, progress, place = broker.queue(options.name), terminal.Progress("put", "messages"), options.sequence
        duplicates = 0
        async for bodies in _bodies(options.value):
            put = await queue.put(
                bodies,
                group=options.group,
                device=options.device,
                sequence=place,
                headers=headers,
                wait_s=options.wait,
            )
            place = place + len(bodies) if place is not None else None
            duplicates += put.duplicates
            progress.advance(put.accepted)
        if duplicates:
            terminal.note(f"{duplicates} of them were duplicates")
        progress.finish()

    return _run(options, put)


async def _bodies(value: str) -> AsyncIterator[list[Any]]:
    """Yields bodies in batches of at most PUT_AT_ONCE, without waiting to fill a batch."""
    if value != "-":
        yield [_parse_body(value)]
        return
    batch: list[Any] = []
    number = 0
    async for lines in read_lines(sys.stdin.fileno()):
        for line in lines:
            number += 1
            if line.strip():
                batch.append(_parse_line(number, line))
        for start in range(0, len(batch), PUT_AT_ONCE):
            yield batch[start : start + PUT_AT_ONCE]
        batch = []


def _add_take(actions: Any) -> None:
    parser = add_command(
        actions,
        "take",
        _take,
        "Print messages of a queue and delete them.",
        "tidegate queue take work                 # messages that wait, or arrive within --wait\n"
        "tidegate queue take work --follow        # until interrupted\n"
        "tidegate queue take work --keep          # leaves them in the queue\n"
        "tidegate queue take work.dead            # its dead letters",
    )
    parser.add_argument("name", metavar="NAME", help="the queue")
    parser.add_argument("--max", type=int, default=100, help="messages at a time at most (default: 100)")
    parser.add_argument("--min", type=int, default=1, help="wait for at least this many (default: 1)")
    parser.add_argument("--wait", type=seconds, default=1.0, metavar="SECONDS", help="how long to wait (default: 1)")
    parser.add_argument(
        "--visibility",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long taken messages are hidden from other consumers (default: 30)",
    )
    parser.add_argument("--keep", action="store_true", help="do not delete them; they will be delivered again")
    parser.add_argument("--follow", action="store_true", help="continue until interrupted")
    add_client_options(parser)


def _take(options: argparse.Namespace) -> int:
    if options.keep and options.follow:
        raise ConfigError(
            "C417", "--keep and --follow together would print the same messages forever", "leave one of them out"
        )
    return _run(options, lambda broker: _print_messages(options, broker.queue(options.name)))


async def _print_messages(options: argparse.Namespace, queue: Queue) -> None:
    """Prints messages. However it ends, also by an interrupt or a closed pipe, printed messages are deleted and the
    others released."""
    wait_s = 20.0 if options.follow else options.wait
    while True:
        messages = await queue.take(options.max, options.min, wait_s, options.visibility)
        printed: list[Message] = []
        try:
            for message in messages:
                terminal.show_message(message)
                printed.append(message)
        finally:
            await _settle(queue, printed, messages[len(printed) :], is_kept=options.keep)
        if not options.follow:
            if not messages:
                terminal.note(f"no message in {queue.name} within {wait_s:g} s")
            return


async def _settle(queue: Queue, printed: list[Message], others: list[Message], *, is_kept: bool) -> None:
    if is_kept:
        printed, others = [], printed + others
    if printed:
        await queue.delete(printed)
    if others:
        await queue.release(others)


def _add_stats(actions: Any) -> None:
    parser = add_command(actions, "stats", _stats, "Show the statistics of a queue.")
    parser.add_argument("name", metavar="NAME", help="the queue")
    add_client_options(parser)


def _stats(options: argparse.Namespace) -> int:
    async def show(broker: Connection) -> None:
        statistics = await broker.queue(options.name).stats()
        if terminal.is_for_people():
            terminal.show_statistics(statistics)
        else:
            terminal.print_json(statistics)

    return _run(options, show)


def _add_redrive(actions: Any) -> None:
    parser = add_command(
        actions, "redrive", _redrive, "Move dead letters back into their queue.", "tidegate queue redrive work"
    )
    parser.add_argument("name", metavar="NAME", help="the queue, without .dead")
    parser.add_argument("--max", type=int, default=10_000, help="messages to move at most (default: 10000)")
    add_client_options(parser)


def _redrive(options: argparse.Namespace) -> int:
    async def redrive(broker: Connection) -> None:
        moved = await broker.queue(options.name).redrive(options.max)
        terminal.note(f"moved {moved} dead letters back into {options.name}")
        if not terminal.is_for_people():
            terminal.print_json({"moved": moved})

    return _run(options, redrive)


def _add_drop(actions: Any) -> None:
    parser = add_command(actions, "drop", _drop, "Remove a queue with all its messages and dead letters.")
    parser.add_argument("name", metavar="NAME", help="the queue")
    add_client_options(parser)


def _drop(options: argparse.Namespace) -> int:
    async def drop(broker: Connection) -> None:
        await broker.queue(options.name).drop()
        terminal.note(f"dropped {options.name}")

    return _run(options, drop)


def _run(options: argparse.Namespace, work: Any) -> int:
    async def run() -> None:
        async with connect_to(options, "queue") as broker:
            await work(broker)

    asyncio.run(run())
    return 0


# Parsing of arguments and standard input.


def _parse_body(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_line(number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise BadInput(
            "P314", f"line {number} is not JSON: {error}", 'write one JSON value per line, such as {"NO2": 212}'
        ) from error


def _parse_header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError("C417", f"{text!r} is not a header", "write NAME=VALUE, such as kind=alert")
    return name, value
