"""A reader of server-sent events that reads only on request, so that it can be slow."""

from __future__ import annotations

import json
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import httpx
from http_client import SMALL_BUFFER_BYTES, WAIT_S, push_query


class EventStream:
    """A context manager that reads the events of `/v1/stream`, or of another path and query. Inside it the subscription
    is live. `is_small` keeps the buffers small."""

    def __init__(
        self,
        http: str,
        subscription_filter: str = "*",
        policy: str = "drop-oldest",
        *,
        name: str | None = None,
        is_small: bool = False,
        tls: ssl.SSLContext | None = None,
        path: str = "/v1/stream",
        query: dict[str, str] | None = None,
    ) -> None:
        self._url = http + path
        self._query = query or push_query(subscription_filter, policy, name)
        self._buffers = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)] if is_small else []
        self._tls = tls
        self._open = ExitStack()
        self._chunks: Iterator[bytes] = iter(())
        self._events: deque[bytes] = deque()
        self._rest = b""

    def __enter__(self) -> Self:
        transport = httpx.HTTPTransport(socket_options=self._buffers, verify=self._tls or False)
        client = self._open.enter_context(httpx.Client(transport=transport, timeout=WAIT_S))
        method = "POST" if "name" in self._query else "GET"
        response = self._open.enter_context(client.stream(method, self._url, params=self._query))
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        self._chunks = response.iter_raw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the data of each event until the broker ends the stream, and skips comments."""
        while (event := self._next_event()) is not None:
            for line in event.split(b"\n"):
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def receive(self) -> dict[str, Any]:
        return next(iter(self))

    def _next_event(self) -> bytes | None:
        """Returns the next event. httpx would also split lines at U+2028, but the format has only ASCII line ends."""
        while not self._events:
            chunk = next(self._chunks, None)
            if chunk is None:
                assert not self._rest, "the stream ended inside an event"
                return None
            *events, self._rest = (self._rest + chunk).split(b"\n\n")
            self._events.extend(events)
        return self._events.popleft()
