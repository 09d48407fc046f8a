"""What the commands print: text if standard output is a terminal, JSON lines if it is a pipe.

Notes and progress go to standard error, so that a pipe carries only data.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidegate.client import Delivery, Message
from tidegate.errors import NotificationError, QueueError
from tidegate.filters import Explanation
from tidegate.notification import PAYLOAD, parse_value

if TYPE_CHECKING:
    from tidegate.broker.assembly import Ready
    from tidegate.config import Origin

PROGRESS_EVERY_S = 0.5


def is_for_people() -> bool:
    return sys.stdout.isatty()


def print_json(value: Any) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


def note(text: str) -> None:
    """Prints a note for the person at the terminal, on standard error: programs that read our output do not see it."""
    print(text, file=sys.stderr, flush=True)


def show_ready(ready: Ready, generated_token: str | None) -> None:
    """Prints where the broker listens. A generated token is printed here, once, and nowhere else."""
    if not is_for_people():
        print_json({"ready": ready} | ({"token": generated_token} if generated_token else {}))
        return
    lines = ["tidegate is ready", f"  native  {ready.native}", f"  HTTP    {ready.http}"]
    if ready.ssap:
        lines.append(f"  SSAP    {ready.ssap}")
    if generated_token:
        lines += [
            f"  page    {_page_address(ready.http, generated_token)}",
            f"  token   {generated_token}",
            "Clients read the token from TIDEGATE_TOKEN. It is valid until the broker stops; --token-file sets one.",
        ]
        if not ready.http.startswith("https:"):
            lines.append("Without TLS others on the network can read the token: use --tls-cert and --tls-key.")
    print("\n".join([*lines, "press Ctrl-C to stop"]), flush=True)


def _page_address(http: str, token: str) -> str:
    """Returns the page's address with the token as its fragment, which a browser never sends. Uses this machine's name
    if the broker listens on all interfaces."""
    for everywhere in ("//0.0.0.0:", "//[::]:"):
        http = http.replace(everywhere, f"//{socket.gethostname()}:")
    return f"{http}/#token={token}"


def show_delivery(delivery: Delivery) -> None:
    if delivery.missed:
        note(f"{delivery.missed} notifications were dropped: this reader is too slow")
    if delivery.reconnected:
        note("reconnected; notifications published in between were missed")
    if is_for_people():
        print(write_attributes(delivery.notification), flush=True)
    else:
        print_json(
            {
                "notification": delivery.notification,
                "publisher": delivery.publisher,
                "sequence": delivery.sequence,
                **({"missed": delivery.missed} if delivery.missed else {}),
                **({"reconnected": True} if delivery.reconnected else {}),
            }
        )


def show_message(message: Message) -> None:
    """Prints the body as JSON, with bytes as base64."""
    if is_for_people():
        again = f"   (delivery {message.delivery})" if message.delivery > 1 else ""
        print(_printable(_body_json(message).decode()) + again, flush=True)
        return
    print_json(
        {
            "body": msgspec.Raw(_body_json(message)),
            "delivery": message.delivery,
            "queue": message.queue,
            "sequence": message.sequence,
            "enqueued_at": message.enqueued_at,
            "headers": message.headers,
            "group": message.group,
            "device": message.device,
            "device_sequence": message.device_sequence,
        }
    )


def print_text(text: str) -> None:
    """Prints text: unchanged for programs, without terminal control characters for people."""
    if is_for_people():
        text = "".join(_printable(line) + "\n" for line in text.splitlines())
    print(text, end="", flush=True)


def show_result(result: Mapping[str, Any]) -> None:
    """Prints the result of a query, given in SPARQL's JSON, as a table, or as yes or no."""
    if "boolean" in result:
        print("yes" if result["boolean"] else "no", flush=True)
    else:
        _show_table(result["head"]["vars"], result["results"]["bindings"])


def show_change_of_result(message: Mapping[str, Any]) -> None:
    """Prints a message of a persistent query: a whole result, or the rows added and removed."""
    if not is_for_people():
        print_json(message)
        return
    if message.get("reset"):
        note("some changes were missed; this is the whole result")
    if "result" in message:
        _show_table(message["variables"], message["result"])
    for sign, rows in (("-", message.get("removed", [])), ("+", message.get("added", []))):
        for row in rows:
            print(f"{sign} {write_row(row)}", flush=True)


def write_row(row: Mapping[str, Any] | bool) -> str:
    if isinstance(row, bool):
        return "yes" if row else "no"
    return write_attributes({name: term["value"] for name, term in row.items()})


def _show_table(variables: Sequence[str], rows: Sequence[Any]) -> None:
    if rows and isinstance(rows[0], bool):
        print(write_row(rows[0]), flush=True)
        return
    lines = [[_printable(row[name]["value"]) if name in row else "" for name in variables] for row in rows]
    widths = [max(map(len, column)) for column in zip(variables, *lines, strict=True)]
    for line in (variables, ["-" * width for width in widths], *lines):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip(), flush=True)
    note(f"{len(rows)} row{'' if len(rows) == 1 else 's'}")


def show_statistics(statistics: Mapping[str, Any]) -> None:
    """Prints one statistic per line, then the physical queues."""
    for name, value in statistics.items():
        if not isinstance(value, (dict, list)):
            shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            print(f"{name:<20} {shown}")
    for number, level in enumerate(statistics["physical"]):
        print(f"physical queue {number:<5} {level['messages']:,} messages, {level['leased']:,} leased")


def write_attributes(notification: Mapping[str, Any]) -> str:
    """Returns `NO2=212 name='San Martín'`, the form that `tidegate pub` accepts."""
    attributes = {name: value for name, value in notification.items() if name != PAYLOAD}
    written = [f"{_printable(name)}={_write_value(value)}" for name, value in attributes.items()]
    if PAYLOAD in notification:
        written.append(f"({len(notification[PAYLOAD])} bytes of payload)")
    return " ".join(written)


def show_explanation(explanation: Explanation) -> None:
    if not is_for_people():
        print_json(explanation)
        return
    for constraint in explanation.constraints:
        print(f"{'✓' if constraint.holds else '✗'} {constraint.text:<24} {constraint.reason}")
    print("matches" if explanation.matches else "does not match")


def show_configuration(origins: Mapping[str, Origin], token: str, redis_password: str) -> None:
    """Prints the settings. `token` and `redis_password` are not the secrets; they only state whether one is set."""
    if not is_for_people():
        print_json({"settings": origins, "token": token, "redis_password": redis_password})
        return
    for name, origin in origins.items():
        print(f"{name:<34} {_write_setting(origin.value):<20} {origin.source}")
    print(f"{'token':<34} {token}")
    print(f"{'redis_password':<34} {redis_password}")


class Progress:
    """Shows a running count on standard error if that is a terminal. Prints the total at the end in any case."""

    def __init__(self, verb: str, noun: str) -> None:
        self._verb = verb
        self._noun = noun
        self._count = 0
        self._started_s = self._shown_s = time.monotonic()
        self._is_live = sys.stderr.isatty()

    def advance(self, count: int = 1) -> None:
        self._count += count
        if self._is_live and time.monotonic() - self._shown_s > PROGRESS_EVERY_S:
            self._shown_s = time.monotonic()
            print(f"\r{self._verb} {self._count} {self._noun}", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        seconds = time.monotonic() - self._started_s
        noun = self._noun if self._count != 1 else self._noun.removesuffix("s")
        start = "\r" if self._is_live else ""
        note(f"{start}{self._verb} {self._count} {noun}, all acknowledged, in {seconds:.2f} s")
        if not is_for_people():
            print_json({"accepted": self._count})


def _body_json(message: Message) -> bytes:
    """Returns the body as JSON. A body that JSON cannot express is shown as its MessagePack, in base64."""
    try:
        return msgspec.json.encode(message.body)
    except (QueueError, TypeError, UnicodeEncodeError):
        return msgspec.json.encode({"msgpack": message.raw})


def _write_value(value: Any) -> str:
    if isinstance(value, str):
        return _printable(value if _is_bare(value) else "'" + value.replace("'", "''") + "'")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_bare(text: str) -> bool:
    """Returns whether a string needs no quotes: unquoted, it is not read as a number or split."""
    if not text or any(sign.isspace() or sign in "'\"" for sign in text):
        return False
    try:
        return isinstance(parse_value(text), str)
    except NotificationError:
        return False


def _printable(text: str) -> str:
    """Escapes control characters, so that a publisher cannot control the terminal of a reader."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _write_setting(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"
    return str(value).lower() if isinstance(value, bool) else str(value) or "-"
