"""An HTTP connection: uvicorn's protocol with the bounds that it lacks, and with error answers of Tidegate's form.

The bounds:
- the time until a request is complete: a peer that sends a byte now and then would otherwise hold its connection
  forever;
- the time for which a peer may read nothing of an answer;
- the size of a request's head;
- the number of connections.

A malformed request gets an answer too. The rest of the peer's bytes are then dropped for `LINGER_S`: closing at once
would reset the connection, and the peer could lose the answer.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidegate.errors import ProtocolError, TidegateError
from tidegate.listeners.connections import Connections
from tidegate.listeners.http.json_response import NO_SNIFF, error_response
from tidegate.listeners.peer_transport import PeerTransport

REQUEST_HEAD_BYTES_MAX: Final = 64 * 1024
LINGER_S: Final = 1.0
# ASGI extensions. IS_ALL_SENT: a function that returns whether the operating system has taken everything sent so far.
# IS_CLOSING: a function that returns whether the connection is closing, for example because a write failed.
IS_ALL_SENT: Final = "tidegate.is_all_sent"
IS_CLOSING: Final = "tidegate.is_closing"
# An ASGI extension: a function that lifts the bound on slow reading for this answer, such as a stream.
ALLOW_STALLS: Final = "tidegate.allow_stalls"


class HeadTooLarge(ProtocolError):
    """The request line and headers exceed the limit."""

    status = 431


class HttpConnection(HttpToolsProtocol):
    """Cuts off the connection if a request is not complete within `request_timeout_s` of its first byte, or if the
    first request does not start within that time."""

    transport: PeerTransport

    def __init__(self, *args: Any, request_timeout_s: float, places: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timeout_s = request_timeout_s
        self._places = places
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._may_stall = False
        self._is_in_head = True
        self._is_refused = False
        self._head_bytes = 0
        self._is_all_sent = True

    # The transport calls these.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # With these limits, writing is paused while anything is unsent, and a connection that is lost then stays
        # paused. With a high limit of 0, asyncio's TLS would never resume.
        transport.set_write_buffer_limits(high=1, low=0)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_head and self._deadline is None:
            self._expect_request()
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._on_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(_not_http())
        if self._is_in_head and self._head_bytes > REQUEST_HEAD_BYTES_MAX:
            self._refuse(_head_too_large(self._head_bytes))

    def pause_writing(self) -> None:
        self._is_all_sent = False
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._is_all_sent = True
        self._forget_stall()
        self.transport.continue_ending()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._forget_stall()
        self.transport.lost()
        super().connection_lost(exc)

    # The parser calls these.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._may_stall = False
        # The head starts somewhere inside this read. `_refusal` counts its exact size once it is complete.
        self._head_bytes = 0
        self._expect_request()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._is_other_protocol():
            return
        refusal = self._refusal()
        self.app = self.config.loaded_app if refusal is None else _closing(refusal)
        asked: dict[str, Any] = {
            IS_ALL_SENT: lambda: self._is_all_sent,
            IS_CLOSING: self.transport.is_closing,
            ALLOW_STALLS: self._allow_stalls,
        }
        self.scope["extensions"] = asked
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._is_other_protocol():
            return
        super().on_message_complete()
        self._cancel_deadline()
        self._is_in_head = True
        self._head_bytes = 0

    def _is_other_protocol(self) -> bool:
        return bool(self.parser.should_upgrade()) and not self._should_upgrade()

    def _on_upgrade(self, rest: bytes) -> None:
        """Handles a request that offers another protocol.

        WebSocket is accepted. Other offers, which Java's client makes with every request, are ignored (RFC 9110,
        section 7.8). The parser treats the bytes after the head as that protocol, so the request is parsed again
        without the offer."""
        if self._should_upgrade():
            self._upgrade_to_websocket()
        elif self.parser.get_method() == b"CONNECT":
            self._refuse(_not_http())
        else:
            head = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
            head += [
                b"%s: %s" % (name, _without_offer(name, value)) for name, value in self.headers if name != b"upgrade"
            ]
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(b"\r\n".join([*head, b"", rest]))

    def _upgrade_to_websocket(self) -> None:
        self._cancel_deadline()
        refusal = self._refusal()
        if refusal is None:
            self.handle_websocket_upgrade()
        else:
            self._refuse(refusal)

    def _refusal(self) -> TidegateError | None:
        """Returns the error that refuses this request before any route, or None if a route may answer it."""
        head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if head_bytes > REQUEST_HEAD_BYTES_MAX:
            self.url = b"/"  # uvicorn parses the URL even of a refused request; the real one may be too long for it
            return _head_too_large(head_bytes)
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            return _not_one_host(hosts)
        return self._places.refusal() if self.transport.is_surplus else None

    def _expect_request(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(self._request_timeout_s, self.transport.cut)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expect_reading(self) -> None:
        """Starts the timer within which the peer must read some of the answer, unless the answer is a stream."""
        if not self._may_stall and self._stalled is None:
            unsent_bytes = self.transport.get_write_buffer_size()
            self._stalled = self.loop.call_later(self._request_timeout_s, self._check_reading, unsent_bytes)

    def _check_reading(self, unsent_bytes: int) -> None:
        self._stalled = None
        if self.transport.get_write_buffer_size() < unsent_bytes:
            self._expect_reading()
        else:
            self.transport.cut()

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _allow_stalls(self) -> None:
        self._may_stall = True
        self._forget_stall()

    def _refuse(self, error: TidegateError) -> None:
        """Sends an error in place of a route's answer, and closes. If another answer is in progress, only closes."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self._is_answering():
            self.transport.close()
            return
        if self.cycle is not None:  # a route may be waiting for the rest of the request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._cancel_deadline()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.abort)
        self.transport.write(_as_bytes(_closing(error)))
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _is_answering(self) -> bool:
        cycle = self.cycle
        return bool(self.pipeline) or (cycle is not None and cycle.response_started and not cycle.response_complete)


def _not_http() -> ProtocolError:
    return ProtocolError(
        "P319", "this is not a valid HTTP request", "use HTTP/1.1 on this port; the native protocol has its own"
    )


def _not_one_host(hosts: int) -> ProtocolError:
    """Returns the error for a missing or duplicate Host header (RFC 9112, section 3.2). If a proxy and the broker chose
    different ones, an attacker could bypass the checks of either."""
    return ProtocolError("P326", f"the request has {hosts} Host headers", "send exactly one, as HTTP/1.1 requires")


def _without_offer(name: bytes, value: bytes) -> bytes:
    """Returns the value of a request's header without the offer of another protocol."""
    if name != b"connection":
        return value
    return b"close" if b"close" in value.lower() else b"keep-alive"


def _head_too_large(size: int) -> HeadTooLarge:
    return HeadTooLarge(
        "P320",
        f"the request line and headers have {size} bytes",
        f"send at most {REQUEST_HEAD_BYTES_MAX} bytes before the body",
    )


def _closing(error: TidegateError) -> Response:
    response = error_response(error)
    response.headers["Connection"] = "close"
    return response


def _as_bytes(response: Response) -> bytes:
    head = [f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()]
    head += [name + b": " + value for name, value in (NO_SNIFF, *response.raw_headers)]
    return b"\r\n".join([*head, b"", bytes(response.body)])
