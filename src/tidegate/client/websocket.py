"""A client's WebSocket over asyncio streams: text messages in both directions, by RFC 6455, without extensions.

One task may read while another writes. Pings are answered only while the socket is being read. What may go wrong:
nothing answers (U701), the broker refuses with its own error, or the connection is lost or violates the protocol
(U704).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import ssl
import struct
from typing import Final
from urllib.parse import urlsplit

import msgspec

from tidegate.client.link import to_exception
from tidegate.errors import ConfigError, TidegateError, Unavailable
from tidegate.frames import ErrorBody

MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
HEAD_BYTES_MAX: Final = 64 * 1024
NORMAL_CLOSURE: Final = 1000
_MAGIC: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION, _TEXT, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x8, 0x9, 0xA
_END, _MASKED = 0x80, 0x80


class _Refusal(msgspec.Struct):
    error: ErrorBody


class WebSocket:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, address: str, target: str, token: str = "", tls: ssl.SSLContext | None = None) -> WebSocket:
        """Connects to `target`, a path with its query, at `address`, such as http://127.0.0.1:7271."""
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError("C411", f"{address!r} is not an HTTP address", "write it as http://127.0.0.1:7271")
        context = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        port = parts.port or (443 if context else 80)
        try:
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context, limit=HEAD_BYTES_MAX)
        except OSError as error:
            raise Unavailable(
                "U701", f"no broker answers at {address} ({error})", "start one with: tidegate serve"
            ) from error
        try:
            await _shake_hands(reader, writer, parts.netloc, target, token)
        except BaseException:
            writer.transport.abort()
            raise
        return cls(reader, writer)

    def send(self, text: bytes) -> None:
        self._send(_TEXT, text)

    async def receive(self) -> bytes:
        """Returns the next text. Raises Unavailable if the broker closes the connection."""
        parts: list[bytes] = []
        while True:
            is_last, kind, body = await self._read_frame()
            if kind == _CLOSE:
                raise lost("the broker closed it")
            if kind == _PING:
                self._send(_PONG, body)
            elif kind in (_TEXT, _CONTINUATION):
                parts.append(body)
                if sum(map(len, parts)) > MESSAGE_BYTES_MAX:
                    raise lost(f"a message has over {MESSAGE_BYTES_MAX} bytes")
                if is_last:
                    return b"".join(parts)

    def close(self, *, is_final: bool) -> None:
        """Closes the socket. Without a close frame the broker keeps the subscription, so a client can resume it."""
        if is_final and not self._writer.is_closing():
            self._send(_CLOSE, struct.pack("!H", NORMAL_CLOSURE))
            self._writer.close()
        else:
            self._writer.transport.abort()

    async def _read_frame(self) -> tuple[bool, int, bytes]:
        try:
            first, second = await self._reader.readexactly(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack("!H", await self._reader.readexactly(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", await self._reader.readexactly(8))
            if second & _MASKED or size > MESSAGE_BYTES_MAX:
                raise lost("the broker violated the WebSocket protocol")
            return bool(first & _END), first & 0x0F, await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise lost(str(error)) from error

    def _send(self, kind: int, body: bytes) -> None:
        """Sends one frame, masked as the protocol requires of clients. The mask protects proxies; it hides nothing."""
        mask = os.urandom(4)
        size = len(body)
        head = struct.pack("!BB", _END | kind, _MASKED | size) if size < 126 else b""
        if size >= 126:
            assert size < 1 << 16, size
            head = struct.pack("!BBH", _END | kind, _MASKED | 126, size)
        self._writer.write(head + mask + bytes(byte ^ mask[place % 4] for place, byte in enumerate(body)))


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, target: str, token: str
) -> None:
    key = base64.b64encode(os.urandom(16))
    lines = [
        f"GET {target} HTTP/1.1",
        f"Host: {host}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key.decode()}",
        *([f"Authorization: Bearer {token}"] if token else []),
    ]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *fields = head.decode("latin-1").split("\r\n")
        status = first.split(" ")[1] if first.count(" ") else ""
        values = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        if status != "101":
            size = values.get("content-length", "")
            body = await reader.readexactly(min(int(size), HEAD_BYTES_MAX)) if size.isdigit() else b""
            raise _refused(status, body)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise lost(str(error)) from error
    expected = base64.b64encode(hashlib.sha1(key + _MAGIC, usedforsecurity=False).digest()).decode()
    if values.get("sec-websocket-accept") != expected:
        raise lost("the peer is not a WebSocket server")


def _refused(status: str, body: bytes) -> TidegateError:
    try:
        return to_exception(msgspec.json.decode(body, type=_Refusal).error)
    except msgspec.MsgspecError:
        return Unavailable(
            "U701", f"the address answers {status or 'in another protocol'}", "check that it is a broker's HTTP address"
        )


def lost(why: str) -> Unavailable:
    return Unavailable("U704", f"the connection was lost ({why})", "the client reconnects by itself")
