"""The gate: who may use a listener. A token where one is set, and no pages of foreign origin, loopback or not.

Without the second, any web page that a person visits could publish to the broker on that person's machine. Such a page
can also let its own host name resolve to 127.0.0.1, and is then of the broker's origin as the browser sees it: so a
broker on loopback answers to the names of loopback only, and to the hosts of the configured origins.
"""

from __future__ import annotations

import base64
import hmac
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from tidegate.config import is_loopback
from tidegate.errors import NotAllowed, TidegateError
from tidegate.listeners.json_response import error_response

# Whoever may see that a port is open may know that it is healthy, and see the page, which holds no data.
OPEN_PATHS: Final = frozenset({"/", "/healthz", "/readyz"})
PAGE_FILES: Final = "/page/"
# A browser's WebSocket can set no header. It offers two subprotocols, of which the first is chosen: this one, and the
# token in base64url behind a prefix.
PROTOCOL: Final = "tidegate"
TOKEN_PROTOCOL: Final = "tidegate-token."  # noqa: S105 - a prefix


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
        await self._app(scope, receive, _choosing_protocol(send) if _offered_token(scope) else send)

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
        if scope["path"] not in OPEN_PATHS and not scope["path"].startswith(PAGE_FILES):
            check_token(_bearer_token(headers.get("authorization", "")) or _offered_token(scope), self._token)

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


def _offered_token(scope: Scope) -> str:
    """What cannot be read is as wrong as any other token."""
    offered: list[str] = scope.get("subprotocols", [])
    for each in offered:
        if each.startswith(TOKEN_PROTOCOL):
            encoded = each.removeprefix(TOKEN_PROTOCOL)
            try:
                return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode("latin-1")
            except ValueError:
                return encoded
    return ""


def _choosing_protocol(send: Send) -> Send:
    """A browser gives up a WebSocket whose offer is not answered."""

    async def choose(message: Message) -> None:
        if message["type"] == "websocket.accept":
            message["subprotocol"] = PROTOCOL
        await send(message)

    return choose


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
