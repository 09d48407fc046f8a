"""`tidegate queue …`: make queues, put messages in, take them out, look at them. One function an action.

`take` deletes what it has printed, and gives back what it has not, also when it is interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

from tidegate import terminal
from tidegate.client import Connection, Message, Queue
from tidegate.command_line import add_client_options, add_command, connect_to, read_lines, seconds
from tidegate.errors import BadInput, ConfigError
from tidegate.queues.definition import FIELDS, HELP, parse_settings

PUT_AT_ONCE: Final = 100


def add_queue(commands: Any) -> None:
    text = "Make queues, put messages in and take them out."
    parser = commands.add_parser(
        "queue",
        help=text,
        description=text,
        epilog="tidegate queue create alerts --filter 'NO2>200'\n"
        "tidegate queue put alerts 42\n"
        "tidegate queue take alerts\n"
        "docs/queues.md explains queues.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for add in (_add_create, _add_list, _add_put, _add_take, _add_stats, _add_redrive, _add_drop):
        add(actions)


def _add_create(actions: Any) -> None:
    parser = add_command(
        actions,
        "create",
        _create,
        "Make a queue, or give one other settings; what is not said is as by default.",
        "tidegate queue create work\n"
        "tidegate queue create alerts --filter 'NO2>200' --policy drop-oldest --messages-max 100000",
    )
    parser.add_argument("name", metavar="NAME")
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
    parser = add_command(actions, "list", _list, "Show all queues, and how many messages each has.")
    add_client_options(parser)


def _list(options: argparse.Namespace) -> int:
    async def show(broker: Connection) -> None:
        for definition in await broker.queues():
            name, settings = definition["name"], definition["settings"]
            messages = sum(level.messages for level in await broker.queue(name).levels())
            if terminal.is_for_people():
                print(f"{name:<30} {messages:>12,} messages   {settings['method']:<12} {settings['filter'] or ''}")
            else:
                terminal.print_json({"name": name, "messages": messages, "settings": settings})

    return _run(options, show)


def _add_put(actions: Any) -> None:
    parser = add_command(
        actions,
        "put",
        _put,
        "Put a message into a queue, or one for each JSON line of standard input.",
        "tidegate queue put work 42\n"
        'tidegate queue put work \'{"station": 4, "NO2": 212}\' --group station-4 --header kind=alert\n'
        "tidegate queue put work - < messages.jsonl\n"
        "VALUE is read as JSON, and as a text when it is none.",
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("value", metavar="VALUE", help="the message's body; or - for JSON lines")
    parser.add_argument("--group", default="", help="messages of one group keep their order")
    parser.add_argument("--device", default="", help="with --sequence names the message: the same again is kept once")
    parser.add_argument("--sequence", type=int, help="its number; the lines of standard input count on from it")
    parser.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="travels along; repeatable")
    parser.add_argument(
        "--wait", type=seconds, default=0.0, metavar="SECONDS", help="how long to wait for room in a full queue"
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
            terminal.note(f"{duplicates} of them were there already")
        progress.finish()

    return _run(options, put)


async def _bodies(value: str) -> AsyncIterator[list[Any]]:
    """Bodies in batches: what has come so far, at most so many at once."""
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
        "tidegate queue take work                 # what is there, or comes within --wait\n"
        "tidegate queue take work --follow        # until interrupted\n"
        "tidegate queue take work --keep          # leaves them in the queue\n"
        "tidegate queue take work.dead            # its dead letters",
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--max", type=int, default=100, help="at most so many at a time (default: 100)")
    parser.add_argument("--min", type=int, default=1, help="wait for so many (default: 1)")
    parser.add_argument("--wait", type=seconds, default=1.0, metavar="SECONDS", help="how long to wait (default: 1)")
    parser.add_argument(
        "--visibility",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long they are hidden from others (default: 30)",
    )
    parser.add_argument("--keep", action="store_true", help="do not delete them: they are delivered again")
    parser.add_argument("--follow", action="store_true", help="go on until interrupted")
    add_client_options(parser)


def _take(options: argparse.Namespace) -> int:
    if options.keep and options.follow:
        raise ConfigError("C417", "--keep with --follow prints the same again and again", "leave one of them out")
    return _run(options, lambda broker: _print_messages(options, broker.queue(options.name)))


async def _print_messages(options: argparse.Namespace, queue: Queue) -> None:
    """Whatever ends it, an interrupt or a reader that has gone: what is printed is deleted, the rest is given back."""
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
                terminal.note(f"nothing in {queue.name} within {wait_s:g} s")
            return


async def _settle(queue: Queue, printed: list[Message], others: list[Message], *, is_kept: bool) -> None:
    if is_kept:
        printed, others = [], printed + others
    if printed:
        await queue.delete(printed)
    if others:
        await queue.release(others)


def _add_stats(actions: Any) -> None:
    parser = add_command(actions, "stats", _stats, "Show what a queue holds and how it does.")
    parser.add_argument("name", metavar="NAME")
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
    parser.add_argument("--max", type=int, default=10_000, help="at most so many (default: 10000)")
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
    parser.add_argument("name", metavar="NAME")
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


# Reading what people write.


def _parse_body(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_line(number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise BadInput("P314", f"line {number} is not JSON: {error}", 'send one {"NO2": 212} a line') from error


def _parse_header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError("C417", f"{text!r} is no header", "write NAME=VALUE, such as kind=alert")
    return name, value
