"""Reads the body of a request, as bytes or as JSON of a given type.

What may go wrong: too many bytes (P316), malformed JSON or a wrong type (P322), a duplicate key (N210).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from tidegate.errors import BadInput, ProtocolError
from tidegate.listeners.http.json_keys import refuse_duplicate_keys

T = TypeVar("T")


class TooLarge(BadInput):
    """The body exceeds the limit."""

    status = 413


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Returns the body. Raises TooLarge as soon as Content-Length or the bytes so far exceed the limit."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > bytes_max:
        raise _too_large(int(announced), bytes_max)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise _too_large(len(body), bytes_max)
    return bytes(body)


async def read_json(request: Request, kind: type[T] | Any, bytes_max: int) -> T:
    """Returns the decoded body. An empty body means an empty object."""
    body = await read_body(request, bytes_max)
    try:
        parsed: T = msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(
            "P322", f"the body of the request is malformed: {error}", "see /openapi.json for its format"
        ) from error
    if body:
        refuse_duplicate_keys(body)
    return parsed


def _too_large(size: int, bytes_max: int) -> TooLarge:
    return TooLarge("P316", f"the body has {size} bytes", f"send at most {bytes_max} bytes in one request")
