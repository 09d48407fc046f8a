"""The reference of `http_ingest`: an ASGI application that only decodes a batch, counts it, and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

Message = dict[str, Any]


async def application(
    _scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    body = b""
    is_more = True
    while is_more:
        message = await receive()
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
    answer = msgspec.json.encode({"accepted": len(msgspec.json.decode(body))})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})
