"""The gate decides who may use a listener: it checks the token if one is set, and refuses web pages of other origins.

Without the second check, any web page that a person visits could use the broker on that person's machine, even if it
listens on loopback only. Browsers name the page in `Origin` for scripts, forms and WebSockets, but not for an image
tag or a link. For those, `Sec-Fetch-Site` shows that another site sends the request. The gate refuses both. It admits
the configured origins, whose pages must send `Origin`.

DNS rebinding: a page can let its own host name resolve to 127.0.0.1, and the browser then takes the broker for the
page's own origin. So a broker on loopback accepts only loopback names and the hosts of the configured origins.
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
from tidegate.listeners.http.json_response import error_response

# These need no token: they reveal only that the broker is up, and the page itself holds no data.
OPEN_PATHS: Final = frozenset({"/", "/healthz", "/readyz"})
PAGE_FILES: Final = "/page/"
# The values of Sec-Fetch-Site for requests of the broker's own page, and for an address that a person typed.
OWN_SITES: Final = frozenset({"same-origin", "none"})
# A browser's WebSocket cannot set headers, so it sends the token as a subprotocol. It offers two: PROTOCOL, which the
# broker selects, and TOKEN_PROTOCOL followed by the token in base64url.
PROTOCOL: Final = "tidegate"
TOKEN_PROTOCOL: Final = "tidegate-token."  # noqa: S105 - a prefix


def check_token(shown: str, expected: str | None) -> None:
    """Raises NotAllowed unless `shown` is the expected token or none is expected.

    Compares in constant time, so that the duration does not reveal how much of a wrong token is right."""
    if expected is None or hmac.compare_digest(shown.encode(), expected.encode()):
        return
    if not shown:
        raise NotAllowed("A501", "a token is needed", "pass --token-file, or set TIDEGATE_TOKEN in the environment")
    raise NotAllowed("A502", "the token is wrong", "ask the broker's operator for the current token")


class Gate:
    """ASGI middleware in front of every route. `is_local` means that the broker listens on loopback only."""

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
                "A506",
                f"this broker does not answer to the host name {host!r}",
                "use 127.0.0.1 or localhost, or add the origin to the setting origins",
            )
        if origin and origin not in self._origins and (not host or _host_of(origin) != host.lower()):
            raise ForeignOrigin(
                "A503", f"a page of {origin} may not use this broker", "add its origin to the setting origins"
            )
        if scope["path"] not in OPEN_PATHS and not scope["path"].startswith(PAGE_FILES):
            self._check_site(headers, origin)
            check_token(_bearer_token(headers.get("authorization", "")) or _offered_token(scope), self._token)

    def _check_site(self, headers: Headers, origin: str) -> None:
        """Refuses requests that a page of another site makes the browser send.

        Only browsers send `Sec-Fetch-Site`, and no script can change it. A link to the page still works, because the
        page's paths are open and hold no data."""
        foreign = [site for site in headers.getlist("sec-fetch-site") if site not in OWN_SITES]
        if foreign and origin not in self._origins:
            raise ForeignOrigin(
                "A503",
                f"a page of another site may not use this broker (Sec-Fetch-Site: {foreign[0][:20]})",
                "open the address in the browser directly, or add the page's origin to the setting origins",
            )

    def _is_own(self, host: str) -> bool:
        """Returns whether a Host header names this machine. Only old clients omit the header; browsers never do."""
        return not host or is_loopback(_name_of(host)) or host.lower() in self._hosts


class ForeignOrigin(NotAllowed):
    """The request comes from a web page of another origin: 403, since a token would not help."""

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
    """Returns the token among the offered subprotocols, or "". A token that is not base64 is returned as it is, and
    then refused as wrong."""
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
    """Selects the subprotocol in the response. A browser closes a WebSocket if the server selects none it offered."""

    async def choose(message: Message) -> None:
        if message["type"] == "websocket.accept":
            message["subprotocol"] = PROTOCOL
        await send(message)

    return choose


def _host_of(origin: str) -> str:
    """Returns `host:port` of an origin, or "" if the origin is malformed or `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name_of(host: str) -> str:
    """Returns the host of `host:port`, or "" if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
