"""Persistent queries over HTTP: the WebSocket /v1/persistent of a broker, as docs/knowledge.md has its messages."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import urlencode

import msgspec

from tidegate.client.control import Hints
from tidegate.client.link import to_exception
from tidegate.client.persistent_transport import Checked, Heard, Indicated, Opened, Refused, Row
from tidegate.client.websocket import WebSocket, lost
from tidegate.errors import Overloaded
from tidegate.frames import ErrorBody


class _Told(msgspec.Struct):
    """All messages of the broker; what it does not say is None."""

    sequence: int = 0
    subscription: str | None = None
    result: list[Row] | None = None
    added: list[Row] = []
    removed: list[Row] = []
    merged: int = 0
    check: int | None = None
    refused: ErrorBody | None = None
    error: ErrorBody | None = None
    processing_s: float | None = None
    delay_s_max: float | None = None
    interval_s: float | None = None
    spread_s: float | None = None

    @property
    def hints(self) -> Hints:
        return Hints(processing_s=self.processing_s, delay_s=self.delay_s_max, slot_s=self.interval_s)


_decode = msgspec.json.Decoder(_Told).decode


class HttpTransport:
    is_resumable = True

    def __init__(self, address: str, question: str, token: str, tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._question = question
        self._token = token
        self._tls = tls

    async def open(self, subscription: str, sequence: int) -> HttpLink:
        query: dict[str, Any] = {"query": self._question}
        if subscription:
            query |= {"subscription": subscription, "sequence": sequence}
        socket = await WebSocket.connect(self._address, f"/v1/persistent?{urlencode(query)}", self._token, self._tls)
        try:
            told = await _receive(socket)
        except BaseException:
            socket.close(is_for_good=False)
            raise
        return HttpLink(socket, Opened(told.subscription or "", told.sequence, told.result, told.hints))


class HttpLink:
    def __init__(self, socket: WebSocket, opened: Opened) -> None:
        self.opened = opened
        self._socket = socket

    def ask(self, check: int) -> None:
        self._socket.send(msgspec.json.encode({"check": check}))

    async def read(self) -> Heard:
        told = await _receive(self._socket)
        if told.check is None:
            return Indicated(told.sequence, told.added, told.removed, told.merged, told.spread_s)
        if told.refused is None:
            return Checked(told.check, told.sequence, hints=told.hints)
        error = to_exception(told.refused)
        if not isinstance(error, Overloaded):
            raise error
        return Refused(told.check, error)

    def close(self, *, is_for_good: bool) -> None:
        self._socket.close(is_for_good=is_for_good)


async def _receive(socket: WebSocket) -> _Told:
    try:
        told = _decode(await socket.receive())
    except msgspec.MsgspecError as error:
        raise lost(f"what it says is not understood: {error}") from error
    if told.error is not None:
        raise to_exception(told.error)
    return told
