"""A notification: an event as typed attributes. Everything that travels through the layers is a notification.

A reading, a changed triple and a Spark result are all a mapping from attribute names to values. A value is
a string, a number or a boolean. Numbers compare by value: 1 and 1.0 are equal, but True is not 1.
An optional payload (bytes that filters ignore) travels under the reserved name `$payload`.

Every listener enforces the rules below (docs/filters.md explains them). Its fast path must agree with `check`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from tidegate.errors import NotificationError

Value: TypeAlias = str | int | float | bool
Attributes: TypeAlias = Mapping[str, Value]

PAYLOAD: Final = "$payload"
# Whole numbers up to this one are exact as IEEE doubles, in JSON (RFC 7493) and in every language a device may use.
INTEGER_MAX: Final = 2**53
ATTRIBUTES_MAX: Final = 64
NAME_BYTES_MAX: Final = 255
TEXT_BYTES_MAX: Final = 65_535
NOTIFICATION_BYTES_MAX: Final = 256 * 1024

_TYPE_WORDS: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (str, "a string"),
    (bool, "a boolean"),
    ((int, float), "a number"),
    ((bytes, bytearray, memoryview), "bytes"),
    (Mapping, "a map"),
    ((list, tuple), "a list"),
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def check(notification: Mapping[str, Any]) -> None:
    """Raises NotificationError if a notification breaks the rules."""
    if not notification:
        raise NotificationError("N201", "the notification has no attribute", "give it at least one, such as NO2=212")
    if len(notification) > ATTRIBUTES_MAX:
        raise NotificationError(
            "N202",
            f"the notification has {len(notification)} attributes",
            f"send at most {ATTRIBUTES_MAX}; put the rest into the payload",
        )
    for name, value in notification.items():
        if name == PAYLOAD:
            _check_payload(value)
        else:
            _check_name(name)
            _check_value(name, value)


def is_number(value: object) -> bool:
    """Returns True for ints and floats, but not for booleans, which Python counts as ints."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def describe_type(value: object) -> str:
    """Returns the type of a value in words that do not depend on the programming language, for messages."""
    if value is None:
        return "null"
    for types, words in _TYPE_WORDS:
        if isinstance(value, types):
            return words
    return f"of the type {type(value).__name__}"


def parse_value(text: str) -> Value:
    """Returns the value of a bare word: a number as JSON writes it, true, false, or else the word itself.

    A leading zero makes a word (`08001` is a post code, not 8001)."""
    if text in ("true", "false"):
        return text == "true"
    if _NUMBER.fullmatch(text) is None:
        return text
    if any(sign in text for sign in ".eE"):
        return _finite(float(text), text)
    if len(text) > len(str(-INTEGER_MAX)):
        raise _beyond_exact("the number", text[:40])
    return _exact(int(text))


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise NotificationError("N203", f"{name!r} is not an attribute name", "use strings as names")
    if not 0 < _utf8_bytes(name) <= NAME_BYTES_MAX:
        raise NotificationError(
            "N203",
            f"the attribute name {name[:40]!r} is empty or too long",
            f"use 1 to {NAME_BYTES_MAX} bytes of UTF-8",
        )
    if name.startswith("$"):
        raise NotificationError(
            "N204", f"the name {name!r} is reserved", f"do not start names with $; only {PAYLOAD} is defined"
        )


def _check_value(name: str, value: object) -> None:
    if isinstance(value, str):
        if _utf8_bytes(value) > TEXT_BYTES_MAX:
            raise NotificationError(
                "N206", f"the string of {name!r} has over {TEXT_BYTES_MAX} bytes", "put long texts into the payload"
            )
    elif isinstance(value, bool):
        return
    elif isinstance(value, int):
        _exact(value, name)
    elif isinstance(value, float):
        _finite(value, f"{name}={value}")
    else:
        raise NotificationError(
            "N205",
            f"{name!r} is {describe_type(value)}, which no filter can compare",
            "use strings, numbers and booleans; flatten nested data and leave out missing values",
        )


def _check_payload(value: object) -> None:
    if not isinstance(value, bytes):
        raise NotificationError("N209", f"the payload is {describe_type(value)}", "send it as bytes (base64 in JSON)")


def _utf8_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise NotificationError(
            "N212", f"{text[:40]!r} has half a character", "send text that can be encoded as UTF-8"
        ) from None


def _exact(value: int, name: str = "the number") -> int:
    if abs(value) > INTEGER_MAX:
        raise _beyond_exact(name, f"of {value.bit_length()} bits" if value.bit_length() > 128 else f"= {value}")
    return value


def _beyond_exact(name: str, shown: str) -> NotificationError:
    return NotificationError("N207", f"{name} {shown} is beyond 2^53", "send large integers as strings")


def _finite(value: float, shown: str) -> float:
    if not math.isfinite(value):
        raise NotificationError("N208", f"{shown} is not a finite number", "leave an unknown value out")
    return value
