"""The body of a request in JSON, checked against its type: whatever is wrong with it is named, under one code, P322."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from tidegate.errors import ProtocolError
from tidegate.listeners.http_publish import read_body

T = TypeVar("T")

# The longest of 64 bits; a text of thousands of digits is not even looked at.
_DIGITS_MAX: Final = 19


async def read_json(request: Request, kind: type[T] | Any, bytes_max: int) -> T:
    """An empty body stands for an empty object."""
    body = await read_body(request, bytes_max)
    try:
        parsed: T = msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(
            "P322", f"the body of the request is malformed: {error}", "/openapi.json says what belongs into it"
        ) from error
    return parsed


def parse_number(name: str, text: str) -> int:
    """A whole number from a path or a query."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise ProtocolError("P322", f"{name} is {text[:40]!r}", "use a whole number")
    return int(text)
