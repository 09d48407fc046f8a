"""The gate: who may use a listener. A token where one is set, and no pages of foreign origin, loopback or not.

Without the second, any web page that a person visits could publish to the broker on that person's machine.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from tidegate.errors import NotAllowed, TidegateError
from tidegate.listeners.json_response import error_response

# Whoever may see that a port is open may know that it is healthy.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


def check_token(shown: str, expected: str | None) -> None:
    """Raises NotAllowed unless the right token is shown, or none is needed; takes as long for any wrong one."""
    if expected is None or hmac.compare_digest(shown.encode(), expected.encode()):
        return
    if not shown:
        raise NotAllowed("A501", "a token is needed", "give --token-file, or TIDEGATE_TOKEN in the environment")
    raise NotAllowed("A502", "the token is wrong", "ask the operator of the broker for the present one")


class Gate:
    """ASGI middleware in front of every route."""

    def __init__(self, app: ASGIApp, token: str | None, origins: tuple[str, ...]) -> None:
        self._app = app
        self._token = token
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._check(scope)
            except TidegateError as error:
                await _deny(scope, receive, send, error_response(error))
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin and origin not in self._origins and urlsplit(origin).netloc != headers.get("host"):
            raise ForeignOrigin(
                "A503", f"a page of {origin} may not use this broker", "add its origin to the setting origins"
            )
        if scope["path"] not in OPEN_PATHS:
            check_token(headers.get("authorization", "").removeprefix("Bearer ").strip(), self._token)


class ForeignOrigin(NotAllowed):
    """A web page of another origin asks; no token would help."""

    status = 403


async def _deny(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)
