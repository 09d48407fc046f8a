"""Routes of the HTTP server, and the parsing of numbers in paths and queries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.errors import ProtocolError

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

# Enough for 64 bits. Longer texts are refused before they are converted.
_DIGITS_MAX: Final = 19


def route(path: str, **endpoints: Endpoint) -> Route:
    """Returns one route for all methods of a path, so that the answer to a wrong method lists all allowed ones."""

    async def answer(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, answer, methods=list(endpoints))


def parse_number(name: str, text: str) -> int:
    """Parses a whole number from a path or a query. `name` is what the error calls it."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise ProtocolError(
            "P322", f"{name} is {text[:40]!r}", f"use a whole number of at most {_DIGITS_MAX} digits, without a sign"
        )
    return int(text)
