"""Persistent queries over HTTP: the WebSocket /v1/persistent of a broker. docs/knowledge.md describes its messages."""

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


class _BrokerMessage(msgspec.Struct):
    """The union of all messages of the broker; fields that a message lacks have their defaults."""

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


_decode = msgspec.json.Decoder(_BrokerMessage).decode


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
            message = await _receive(socket)
        except BaseException:
            socket.close(is_final=False)
            raise
        return HttpLink(socket, Opened(message.subscription or "", message.sequence, message.result, message.hints))


class HttpLink:
    def __init__(self, socket: WebSocket, opened: Opened) -> None:
        self.opened = opened
        self._socket = socket

    def ask(self, check: int) -> None:
        self._socket.send(msgspec.json.encode({"check": check}))

    async def read(self) -> Heard:
        message = await _receive(self._socket)
        if message.check is None:
            return Indicated(message.sequence, message.added, message.removed, message.merged, message.spread_s)
        if message.refused is None:
            return Checked(message.check, message.sequence, hints=message.hints)
        error = to_exception(message.refused)
        if not isinstance(error, Overloaded):
            raise error
        return Refused(message.check, error)

    def close(self, *, is_final: bool) -> None:
        self._socket.close(is_final=is_final)


async def _receive(socket: WebSocket) -> _BrokerMessage:
    try:
        message = _decode(await socket.receive())
    except msgspec.MsgspecError as error:
        raise lost(f"the broker's message is invalid: {error}") from error
    if message.error is not None:
        raise to_exception(message.error)
    return message
