"""The gate: who may use a listener. A token where one is set, and no pages of foreign origin, loopback or not.

Without the second, any web page that a person visits could publish to the broker on that person's machine. Such a page
can also let its own host name resolve to 127.0.0.1, and is then of the broker's origin as the browser sees it: so a
broker on loopback answers to the names of loopback only, and to the hosts of the configured origins.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from tidegate.config import is_loopback
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
    """ASGI middleware in front of every route. `is_local`: the broker listens on loopback only."""

    def __init__(self, app: ASGIApp, token: str | None, origins: tuple[str, ...], is_local: bool) -> None:
        self._app = app
        self._token = token
        self._origins = frozenset(origins)
        self._hosts = frozenset(_host_of(origin) for origin in origins)
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._check(scope, Headers(scope=scope))
            except TidegateError as error:
                await _deny(scope, receive, send, error_response(error))
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if self._is_local and not self._is_own(host):
            raise ForeignOrigin(
                "A506", f"this broker is not {host!r}", "use 127.0.0.1 or localhost, or add its origin to origins"
            )
        if origin and origin not in self._origins and (not host or _host_of(origin) != host.lower()):
            raise ForeignOrigin(
                "A503", f"a page of {origin} may not use this broker", "add its origin to the setting origins"
            )
        if scope["path"] not in OPEN_PATHS:
            check_token(_bearer_token(headers.get("authorization", "")), self._token)

    def _is_own(self, host: str) -> bool:
        """Whether a Host header names this machine; only old clients, never a browser, send none."""
        return not host or is_loopback(_name_of(host)) or host.lower() in self._hosts


class ForeignOrigin(NotAllowed):
    """A web page of another origin asks; no token would help."""

    status = 403


async def _deny(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)


def _bearer_token(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _host_of(origin: str) -> str:
    """`host:port` of an origin; nothing for one that is malformed, or `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name_of(host: str) -> str:
    """The host of `host:port`."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
