"""A reader of server-sent events that reads when it is told to, so that it can be slow."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import httpx
from http_client import SMALL_BUFFER_BYTES, WAIT_S


class EventStream:
    """The events of `GET /v1/stream`; in `with`, the subscription is live. `is_small` keeps the buffers small."""

    def __init__(
        self, http: str, subscription_filter: str, policy: str = "drop-oldest", *, is_small: bool = False
    ) -> None:
        self._url = f"{http}/v1/stream"
        self._query = {"filter": subscription_filter, "policy": policy}
        self._buffers = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)] if is_small else []
        self._open = ExitStack()
        self._lines: Iterator[str] = iter(())

    def __enter__(self) -> Self:
        transport = httpx.HTTPTransport(socket_options=self._buffers, verify=False)
        client = self._open.enter_context(httpx.Client(transport=transport, timeout=WAIT_S))
        response = self._open.enter_context(client.stream("GET", self._url, params=self._query))
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        self._lines = response.iter_lines()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The data of each event until the broker ends the stream; comments are skipped."""
        for line in self._lines:
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))

    def receive(self) -> dict[str, Any]:
        return next(iter(self))
