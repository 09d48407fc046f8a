"""An HTTP connection: uvicorn's protocol, with the bounds that it lacks and with refusals in our own words.

The bounds: the time a request may take to arrive (a peer that sends nothing, or a byte now and then, would hold its
connection for ever), the size of a request's head, and the number of connections. What cannot be read as a request
gets an answer too, and the rest of what the peer sends is thrown away for a moment: closing at once would reset the
connection, and the answer could be lost with it.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidegate.errors import Overloaded, ProtocolError, TidegateError
from tidegate.listeners.json_response import error_response

REQUEST_HEAD_BYTES_MAX: Final = 64 * 1024
LINGER_S: Final = 1.0
# ASGI extensions: functions that say whether all that was sent has been handed to the system, and whether the
# connection is about to be lost, as it is when the system has refused something.
IS_ALL_SENT: Final = "tidegate.is_all_sent"
IS_CLOSING: Final = "tidegate.is_closing"


class TooManyConnections(Overloaded):
    """`connections_max` are open."""

    status = 503


class HeadTooLarge(ProtocolError):
    """A request line and headers over the limit."""

    status = 431


class HttpConnection(HttpToolsProtocol):
    """A request's deadline runs from its first byte, or from the connection's start, until the request is complete."""

    def __init__(self, *args: Any, request_timeout_s: float, connections_max: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timeout_s = request_timeout_s
        self._connections_max = connections_max
        self._deadline: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._is_refused = False
        self._is_surplus = False
        self._head_bytes = 0
        self._is_all_sent = True

    # The transport calls these.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Paused means then that something is unsent, and a connection that is lost while it is stays paused. With a
        # bound of 0, asyncio's TLS would never resume.
        transport.set_write_buffer_limits(high=1, low=0)
        self._is_surplus = self._are_too_many()
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
            self._refuse(_no_request())
        if self._is_in_head and self._head_bytes > REQUEST_HEAD_BYTES_MAX:
            self._refuse(_head_too_large(self._head_bytes))

    def pause_writing(self) -> None:
        self._is_all_sent = False
        super().pause_writing()

    def resume_writing(self) -> None:
        self._is_all_sent = True
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    # The parser calls these.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # The head begins somewhere in this read; what it has in this read is counted when it is complete.
        self._head_bytes = 0
        self._expect_request()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._is_other_protocol():
            return
        refusal = self._refusal()
        self.app = self.config.loaded_app if refusal is None else _closing(refusal)
        asked: dict[str, Any] = {IS_ALL_SENT: lambda: self._is_all_sent, IS_CLOSING: self.transport.is_closing}
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
        """The peer asks for another protocol. WebSocket it gets; offers of others, as Java's client makes with every
        request, are ignored (RFC 9110, section 7.8). The parser takes what follows the head for that protocol, so
        the request is parsed again, without the offer."""
        if self._should_upgrade():
            self._upgrade_to_websocket()
        elif self.parser.get_method() == b"CONNECT":
            self._refuse(_no_request())
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
        """Why this request gets no answer from a route, if it does not."""
        head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if head_bytes > REQUEST_HEAD_BYTES_MAX:
            self.url = b"/"  # which uvicorn can take apart, however long the real one is
            return _head_too_large(head_bytes)
        self._is_surplus = self._is_surplus and self._are_too_many()
        if self._is_surplus:
            return TooManyConnections(
                "L601",
                f"{self._connections_max} connections are open",
                "come back later, or raise connections_max",
                retry_after_s=5.0,
            )
        return None

    def _are_too_many(self) -> bool:
        return len(self.connections) > self._connections_max

    def _expect_request(self) -> None:
        self._close_after(self._request_timeout_s)

    def _close_after(self, wait_s: float) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(wait_s, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: TidegateError) -> None:
        """Answers in place of a route, and closes; closes only, when another answer is under way."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self._is_answering():
            self.transport.close()
            return
        if self.cycle is not None:  # its route may wait for the rest of the request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._close_after(LINGER_S)
        self.transport.write(_as_bytes(_closing(error)))
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _is_answering(self) -> bool:
        cycle = self.cycle
        return bool(self.pipeline) or (cycle is not None and cycle.response_started and not cycle.response_complete)


def _no_request() -> ProtocolError:
    return ProtocolError("P319", "this is no HTTP request", "speak HTTP/1.1 here, and the native protocol on its port")


def _without_offer(name: bytes, value: bytes) -> bytes:
    """A header of a request, as if it had not offered another protocol."""
    if name != b"connection":
        return value
    return b"close" if b"close" in value.lower() else b"keep-alive"


def _head_too_large(size: int) -> HeadTooLarge:
    return HeadTooLarge(
        "P320", f"the head of the request has {size} bytes", f"send at most {REQUEST_HEAD_BYTES_MAX} before the body"
    )


def _closing(error: TidegateError) -> Response:
    response = error_response(error)
    response.headers["Connection"] = "close"
    return response


def _as_bytes(response: Response) -> bytes:
    head = [f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()]
    head += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])
