"""A WebSocket client on a plain socket with wsproto. It reads only on request, so that it can be slow."""

from __future__ import annotations

import json
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import httpx
from http_client import SMALL_BUFFER_BYTES, WAIT_S, push_query
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    Message,
    Ping,
    RejectConnection,
    RejectData,
    Request,
)


class Rejected(Exception):
    """The broker has answered the handshake with an ordinary response."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(response.status_code)
        self.response = response


class WebSocketClient:
    """A context manager that reads the messages of `/v1/subscribe`, or of another path and query. Inside it the
    subscription is live. `is_small` keeps the buffers small."""

    def __init__(
        self,
        http: str,
        subscription_filter: str = "*",
        policy: str = "drop-oldest",
        *,
        name: str | None = None,
        path: str = "/v1/subscribe",
        headers: dict[str, str] | None = None,
        is_small: bool = False,
        tls: ssl.SSLContext | None = None,
        context: str | None = None,
        subprotocols: tuple[str, ...] = (),
        query: dict[str, str] | None = None,
    ) -> None:
        self._address = urlsplit(http)
        if query is None:
            query = push_query(subscription_filter, policy, name) | (
                {"context": context} if context is not None else {}
            )
        self._target = f"{path}?{urlencode(query)}"
        self._headers = headers or {}
        self._subprotocols = list(subprotocols)
        self.subprotocol: str | None = None
        self._socket = socket.socket()
        self._socket.settimeout(WAIT_S)
        if is_small:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=self._address.hostname)
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._events: deque[Event] = deque()
        self.close_code: int | None = None

    def __enter__(self) -> Self:
        self._socket.connect((self._address.hostname, self._address.port))
        extra = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        self._send(
            Request(
                host=self._address.netloc,
                target=self._target,
                extra_headers=extra,
                subprotocols=self._subprotocols,
            )
        )
        event = self._next_event()
        if isinstance(event, RejectConnection):
            self._reject(event)
        assert isinstance(event, AcceptConnection), event
        self.subprotocol = event.subprotocol
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the messages until the broker closes. Then `close_code` has its code."""
        text = ""
        while True:
            event = self._next_event()
            if isinstance(event, Message):
                text += str(event.data)
                if event.message_finished:
                    yield json.loads(text)
                    text = ""
            elif isinstance(event, Ping):
                self._send(event.response())
            elif isinstance(event, CloseConnection):
                self.close_code = int(event.code)
                self._send(event.response())
                return

    def receive(self) -> dict[str, Any]:
        return next(iter(self))

    def say(self, text: str) -> None:
        self._send(Message(text))

    def encode(self, said: str | Event) -> bytes:
        """Returns the frame of a message or an event, for a test that sends it itself."""
        return self._protocol.send(Message(said) if isinstance(said, str) else said)

    def close(self) -> None:
        """Sends a close frame, and waits for the answer."""
        self._send(CloseConnection(code=1000))
        while not isinstance(self._next_event(), CloseConnection):
            pass

    def _reject(self, event: RejectConnection) -> None:
        body = b""
        while event.has_body:
            data = self._next_event()
            assert isinstance(data, RejectData)
            body += data.data
            if data.body_finished:
                break
        self._socket.close()
        raise Rejected(httpx.Response(event.status_code, headers=event.headers, content=body))

    def _send(self, event: Event) -> None:
        self._socket.sendall(self._protocol.send(event))

    def _next_event(self) -> Event:
        while not self._events:
            data = self._socket.recv(65_536)
            self._protocol.receive_data(data or None)
            self._events.extend(self._protocol.events())
        return self._events.popleft()
