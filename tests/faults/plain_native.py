"""The native protocol, written from docs/protocols.md alone: clients of the fault series use no code of Tidegate.

A frame is 16 bytes little-endian (length of the body, kind, flags, zero, sequence) and a body in MessagePack.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

HEADER = struct.Struct("<IBBHQ")
HELLO, PUBLISH, DEQUEUE, SETTLE, QUEUE_CALL = 1, 2, 9, 10, 11
WELCOME, ACKNOWLEDGE, REFUSE, ERROR, CLOSING, REPLY, FAILED = 64, 65, 66, 73, 74, 75, 76
READ_BYTES = 1 << 20


class Lost(Exception):
    """The connection is lost, or must be closed."""


def frame(kind: int, body: bytes = b"", sequence: int = 0) -> bytes:
    return HEADER.pack(len(body), kind, 0, 0, sequence) + body


def encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def connect(address: tuple[str, int], publisher: str = "", timeout_s: float = 5.0) -> socket.socket:
    """Returns a connection that the broker has accepted, or raises Lost."""
    try:
        connection = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise Lost(str(error)) from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(frame(HELLO, encode({"version": 1, "publisher": publisher})))
        kind, _sequence, body = receive(connection)
        if kind != WELCOME:
            raise Lost(f"kind {kind} instead of WELCOME: {body[:200]!r}")
    except (OSError, Lost) as error:
        connection.close()
        raise Lost(str(error)) from error
    return connection


def receive(connection: socket.socket) -> tuple[int, int, bytes]:
    """Returns the next frame of a connection with one request at a time."""
    length, kind, _flags, _zero, sequence = HEADER.unpack(_exactly(connection, HEADER.size))
    return kind, sequence, _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise Lost("closed by the broker")
        view = view[count:]
    return bytes(data)


def split(buffer: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """Removes the complete frames at the front of a buffer, and yields them."""
    position = 0
    while len(buffer) - position >= HEADER.size:
        length, kind, _flags, _zero, sequence = HEADER.unpack_from(buffer, position)
        end = position + HEADER.size + length
        if end > len(buffer):
            break
        yield kind, sequence, bytes(buffer[position + HEADER.size : end])
        position = end
    del buffer[:position]


def reset(connection: socket.socket) -> None:
    """Ends a connection with RST, which loses the data in flight in both directions."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def addresses(text: str) -> list[tuple[str, int]]:
    """Parses host:port,host:port."""
    pairs = [each.rpartition(":") for each in text.split(",")]
    return [(host, int(port)) for host, _colon, port in pairs]
