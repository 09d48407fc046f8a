"""The command `tidegate`: one function per command. On a terminal it prints text and tables, in a pipe JSON lines.

Exit codes: 0 success; 1 a negative result (`why` without a match, a demo whose counts disagree); 2 an error, printed
with its remedy.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

from tidegate import config as settings
from tidegate.client import Connection, Delivery, DurableSubscription, Subscription
from tidegate.commands import terminal
from tidegate.commands.cluster import add_cluster, add_slice
from tidegate.commands.command_line import add_client_options, add_command, connect_to, read_lines, seconds
from tidegate.commands.evaluate import add_evaluate
from tidegate.commands.knowledge import add_insert, add_knowledge, add_query
from tidegate.commands.pipeline import add_pipeline
from tidegate.commands.queue import add_queue
from tidegate.commands.scaling import add_autoscale, add_layers, add_replace, add_scale
from tidegate.commands.store import add_verify
from tidegate.errors import BadInput, ConfigError, NoSuchQueue, NotificationError, TidegateError
from tidegate.filters import Filter
from tidegate.notification import PAYLOAD, check, parse_value
from tidegate.security.credentials import read_redis_password

EXAMPLES = """\
try it in three terminals:
  tidegate serve
  tidegate sub 'NO2>200;station^=2807'
  tidegate pub NO2=212 station=28079004
"""


def main(arguments: list[str] | None = None) -> NoReturn:
    """The entry point: runs one command and exits."""
    _obey_signals()
    options = command_parser().parse_args(arguments)
    try:
        code = options.run(options)
    except TidegateError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of our output has closed the pipe, as `head` does. Without this Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _obey_signals() -> None:
    """Restores the handlers of SIGINT and SIGTERM. A shell starts background jobs with SIGINT ignored, and a child
    inherits that: without this, `tidegate sub &` in a script could not be interrupted."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def command_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tidegate",
        description="An IoT broker: publish notifications, and subscribe to them by content.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _add_serve,
        _add_pub,
        _add_sub,
        _add_queue,
        add_query,
        add_insert,
        add_knowledge,
        add_pipeline,
        add_cluster,
        add_slice,
        add_scale,
        add_replace,
        add_layers,
        add_autoscale,
        _add_why,
        _add_top,
        _add_replay,
        add_evaluate,
        _add_demo,
        _add_config,
    ):
        add(commands)
    return parser


def _add_queue(commands: Any) -> None:
    add_verify(add_queue(commands))


# serve


def _add_serve(commands: Any) -> None:
    parser = add_command(
        commands,
        "serve",
        _serve,
        "Run a broker in this process. Its page is at the HTTP port: http://127.0.0.1:7271/.",
        "tidegate serve                                  # for this machine only\n"
        "tidegate serve --bind 0.0.0.0                   # for other machines too: prints the token that clients need\n"
        "tidegate serve --bind 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem\n\n"
        "Every setting can also be in the TOML file, or in the environment as TIDEGATE_<NAME>; flags take precedence.\n"
        "To see all settings and where each value comes from, run tidegate config check.",
    )
    parser.add_argument("--config", type=Path, help="TOML file with settings")
    for name, field in settings.FIELDS.items():
        flag = "--" + name.replace("_", "-")
        text = f"{settings.HELP[name]} (default: {_shown(field.default)})".replace("%", "%%")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=text)
        else:
            parser.add_argument(flag, metavar="VALUE", help=text)


def _serve(options: argparse.Namespace) -> int:
    try:
        from tidegate.broker.assembly import serve
    except ImportError as error:
        raise ConfigError(
            "C412", f"the broker needs {error.name}, which is not installed", "pip install 'tidegate[server]'"
        ) from error
    flags = {name: value for name in settings.FIELDS if (value := getattr(options, name)) is not None}
    config, _origins = settings.load(options.config, os.environ, flags)
    token = settings.read_token(config, os.environ)
    generated = settings.make_token(config) if token is None else None
    password = read_redis_password(config.redis_password_file, os.environ)
    serve(config, token or generated, password, lambda ready: terminal.show_ready(ready, generated))
    return 0


# pub, replay


def _add_pub(commands: Any) -> None:
    parser = add_command(
        commands,
        "pub",
        _pub,
        "Publish a notification, or one for each JSON line of standard input.",
        "tidegate pub NO2=212 station=28079004\n"
        "tidegate pub \"room='12'\" open=true     # quotes make a string: '12'\n"
        "tidegate pub - < notifications.jsonl",
    )
    parser.add_argument(
        "attributes", nargs="+", metavar="NAME=VALUE", help="an attribute, or - to read JSON lines from standard input"
    )
    parser.add_argument("--payload", type=Path, help="file to attach as the payload; filters ignore it")
    add_client_options(parser)


def _pub(options: argparse.Namespace) -> int:
    if options.attributes == ["-"]:
        return asyncio.run(_publish(options, "pub", _read_json_lines(sys.stdin.fileno())))
    notification = _parse_attributes(options.attributes)
    if options.payload is not None:
        notification[PAYLOAD] = _read_payload(options.payload)
    check(notification)
    return asyncio.run(_publish(options, "pub", _paced([notification])))


def _add_replay(commands: Any) -> None:
    parser = add_command(
        commands,
        "replay",
        _replay,
        "Publish the readings of an official air-quality CSV file of the Madrid region, in time order.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the CSV file")
    parser.add_argument(
        "--hours-per-second",
        type=float,
        default=0.0,
        metavar="HOURS",
        help="replay speed: hours of the file per second (default: as fast as possible)",
    )
    add_client_options(parser)


def _replay(options: argparse.Namespace) -> int:
    from tidegate.devices import read_official_csv

    if options.hours_per_second < 0:
        raise ConfigError(
            "C413", f"--hours-per-second is {options.hours_per_second}", "use 0 for full speed, or a positive number"
        )
    readings = _paced(read_official_csv(options.file), options.hours_per_second)
    return asyncio.run(_publish(options, "replay", readings))


async def _publish(options: argparse.Namespace, name: str, notifications: AsyncIterator[Mapping[str, Any]]) -> int:
    progress = terminal.Progress("published", "notifications")
    async with connect_to(options, name) as broker:
        async for notification in notifications:
            await broker.publish_soon(notification)
            progress.advance()
        await broker.flush()
    progress.finish()
    return 0


async def _paced(
    notifications: Iterable[Mapping[str, Any]], hours_per_s: float = 0.0
) -> AsyncIterator[Mapping[str, Any]]:
    """Yields the notifications, with a pause whenever their time moves on to the next hour."""
    time: object = None
    for notification in notifications:
        if hours_per_s and time not in (None, notification.get("time")):
            await asyncio.sleep(1 / hours_per_s)
        time = notification.get("time")
        yield notification


# sub, why, top


def _add_sub(commands: Any) -> None:
    parser = add_command(
        commands,
        "sub",
        _sub,
        "Print the notifications that match a filter, until interrupted.",
        "tidegate sub 'NO2>200;station^=2807'\n"
        "tidegate sub '*' --count 10\n"
        "tidegate sub 'NO2>200' --name alerts     # durable: the broker stores matching notifications from now on\n"
        "tidegate sub --name alerts               # continues where it stopped\n"
        "tidegate sub --name alerts --forget\n\n"
        "docs/filters.md explains filters; tidegate why explains a match.",
    )
    parser.add_argument(
        "filter",
        metavar="FILTER",
        nargs="?",
        help="a filter such as NO2>200;kind==traffic,industrial, or * for everything",
    )
    parser.add_argument("--name", help="make the subscription durable, or continue the durable one with this name")
    parser.add_argument("--forget", action="store_true", help="delete the durable subscription with this name")
    parser.add_argument(
        "--expires",
        type=seconds,
        metavar="SECONDS",
        help="with --name: the broker deletes it if nobody reads it for this long; 0 for never (default: 7 days)",
    )
    parser.add_argument("--count", type=int, default=0, help="exit after this many notifications (default: never)")
    parser.add_argument(
        "--policy",
        choices=["drop-oldest", "disconnect", "block"],
        help="what the broker does if this reader is too slow (default: drop-oldest; block if durable)",
    )
    add_client_options(parser)


def _sub(options: argparse.Namespace) -> int:
    if options.filter is None and options.name is None:
        raise ConfigError("C417", "no filter and no --name", "give a filter such as 'NO2>200', or --name")
    if options.forget:
        if options.name is None or options.filter is not None:
            raise ConfigError("C417", "--forget needs --name and no filter", "use tidegate sub --name NAME --forget")
        return asyncio.run(_forget(options))
    parsed = Filter.parse(options.filter) if options.filter is not None else None
    try:
        return asyncio.run(_subscribe(options, parsed))
    except NoSuchQueue:
        raise _no_such_subscription(options.name) from None


async def _subscribe(options: argparse.Namespace, subscription_filter: Filter | None) -> int:
    shown = 0
    async with (
        connect_to(options, "sub") as broker,
        _subscription(broker, options, subscription_filter) as subscription,
    ):
        terminal.note(f"subscribed to {subscription_filter or options.name}; press Ctrl-C to stop")
        async for delivery in subscription:
            terminal.show_delivery(delivery)
            shown += 1
            if shown == options.count:
                break
    return 0


@asynccontextmanager
async def _subscription(
    broker: Connection, options: argparse.Namespace, subscription_filter: Filter | None
) -> AsyncIterator[AsyncIterator[Delivery]]:
    """Opens the subscription. Acknowledges the notifications of a durable one that were printed, even if Ctrl-C arrives
    at that moment."""
    subscription: Subscription | DurableSubscription
    if options.name is not None:
        subscription = broker.subscribe(
            subscription_filter, name=options.name, policy=options.policy or "block", expires_s=options.expires
        )
    else:
        assert subscription_filter is not None
        subscription = broker.subscribe(subscription_filter, policy=options.policy or "drop-oldest")
    async with subscription:
        try:
            yield aiter(subscription)
        finally:
            if isinstance(subscription, DurableSubscription):
                subscription.done()


async def _forget(options: argparse.Namespace) -> int:
    async with connect_to(options, "sub") as broker:
        try:
            await broker.unsubscribe(options.name)
        except NoSuchQueue:
            raise _no_such_subscription(options.name) from None
    terminal.note(f"deleted the durable subscription {options.name} and its waiting notifications")
    return 0


def _no_such_subscription(name: str) -> NoSuchQueue:
    return NoSuchQueue(
        "Q901",
        f"there is no durable subscription {name!r}",
        f"create it with a filter: tidegate sub FILTER --name {name}",
    )


def _add_why(commands: Any) -> None:
    parser = add_command(
        commands,
        "why",
        _why,
        "Explain, constraint by constraint, whether a filter matches a notification. Needs no broker.",
        "tidegate why 'NO2>200' NO2=150\n\nExits with 0 if the filter matches, with 1 if not.",
    )
    parser.add_argument("filter", metavar="FILTER", help="the filter")
    parser.add_argument("attributes", nargs="*", metavar="NAME=VALUE", help="an attribute of the notification")


def _why(options: argparse.Namespace) -> int:
    explanation = Filter.parse(options.filter).explain(_parse_attributes(options.attributes))
    terminal.show_explanation(explanation)
    return 0 if explanation.matches else 1


def _add_top(commands: Any) -> None:
    parser = add_command(commands, "top", _top, "Show the broker's rates, outboxes and subscribers, live.")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between updates (default: 1)"
    )
    parser.add_argument("--count", type=int, default=0, help="exit after this many updates (default: never)")
    add_client_options(parser)


def _top(options: argparse.Namespace) -> int:
    from tidegate.commands.top import watch

    if options.interval < 0.1:
        raise ConfigError("C413", f"--interval is {options.interval}", "use 0.1 seconds or more")
    return asyncio.run(watch(connect_to(options, "top"), options.interval, options.count))


# demo, config


def _add_demo(commands: Any) -> None:
    parser = add_command(
        commands,
        "demo",
        _demo,
        "Run everything at once: a broker with its page, stations, a queue and Spark; then check the counts.",
        "tidegate demo                                 # until Ctrl-C; prints the address of the page\n"
        "tidegate demo --http-port 7271                # the page is at http://127.0.0.1:7271/\n"
        "tidegate demo --minutes 2 --headless          # for CI: prints only the summary\n\n"
        "Ctrl-C stops the readings, waits until Spark has processed them, and prints the counts.\n"
        "The demo keeps its history in Parquet and a picture of it. It exits with 1 if the counts differ.",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the simulated weather (default: 1)")
    parser.add_argument("--minutes", type=float, help="how long the stations publish (default: until Ctrl-C)")
    parser.add_argument("--headless", action="store_true", help="print only the summary")
    parser.add_argument(
        "--http-port", type=int, default=0, metavar="PORT", help="port of the page (default: any free port)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for the history and the log (default: a new one)"
    )


def _demo(options: argparse.Namespace) -> int:
    if options.minutes is not None and not 0 < options.minutes <= 24 * 60:
        raise ConfigError("C413", f"--minutes is {options.minutes}", "use more than 0 and at most a day")
    try:
        from tidegate.demo.main_job import Options, run_demo
    except ImportError as error:
        raise ConfigError(
            "C412",
            f"the demo needs {error.name}, which is not installed",
            "pip install 'tidegate[demo]'",
        ) from error
    seconds = options.minutes * 60 if options.minutes is not None else None
    out = options.out or Path(tempfile.mkdtemp(prefix="tidegate-demo-"))
    return asyncio.run(run_demo(Options(options.seed, out, options.headless, options.http_port, seconds)))


def _add_config(commands: Any) -> None:
    parser = commands.add_parser("config", help="Check the configuration.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check_parser = add_command(
        actions,
        "check",
        _config_check,
        "Check a configuration; print every setting, its value and where it comes from.",
    )
    check_parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="TOML file")


def _config_check(options: argparse.Namespace) -> int:
    config, origins = settings.load(options.file, os.environ)
    if settings.read_token(config, os.environ) is not None:
        token = "set"  # noqa: S105 - whether there is one
    else:
        token = "generated at each start" if settings.make_token(config) is not None else "none"
    password = "set" if read_redis_password(config.redis_password_file, os.environ) else "none"
    terminal.show_configuration(settings.without_passwords(origins), token, password)
    return 0


# Parsing of arguments and standard input.


def _parse_attributes(texts: list[str]) -> dict[str, Any]:
    notification: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise NotificationError("N213", f"{text!r} is not an attribute", "write NAME=VALUE, such as NO2=212")
        if name in notification:
            raise NotificationError("N210", f"{name} is given twice", "give each attribute one value")
        quoted = len(value) >= 2 and value[0] == value[-1] == "'"
        notification[name] = value[1:-1].replace("''", "'") if quoted else parse_value(value)
    return notification


async def _read_json_lines(file: int) -> AsyncIterator[dict[str, Any]]:
    number = 0
    async for lines in read_lines(file):
        for line in lines:
            number += 1
            if line.strip():
                yield _read_json_line(number, line)


def _read_json_line(number: int, line: bytes) -> dict[str, Any]:
    try:
        notification = json.loads(line, object_pairs_hook=_unique)
    except NotificationError as error:
        raise NotificationError(error.code, f"line {number}: {error.message}", error.remedy) from None
    except ValueError as error:
        raise BadInput(
            "P314", f"line {number} is not JSON: {error}", 'write one JSON object per line, such as {"NO2": 212}'
        ) from error
    if not isinstance(notification, dict):
        raise BadInput(
            "P315", f"line {number} is not an object", 'write one JSON object per line, such as {"NO2": 212}'
        )
    try:
        if isinstance(payload := notification.get(PAYLOAD), str):
            notification[PAYLOAD] = base64.b64decode(payload, validate=True)
    except ValueError:
        raise NotificationError(
            "N209", f"line {number}: the payload is not base64", "encode its bytes as base64"
        ) from None
    try:
        check(notification)
    except NotificationError as error:
        raise NotificationError(error.code, f"line {number}: {error.message}", error.remedy) from None
    return notification


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    notification = dict(pairs)
    if len(notification) < len(pairs):
        raise NotificationError("N210", "a name is given twice", "give each attribute one value")
    return notification


def _read_payload(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput("N214", f"the payload {str(path)!r} cannot be read: {error}", "name a readable file") from error


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(default) or "none"
    return str(default).lower() if isinstance(default, bool) else str(default) or "none"
