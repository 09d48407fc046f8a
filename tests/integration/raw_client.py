"""A low-level client of the native protocol: one blocking socket, and every frame built by the test."""

from __future__ import annotations

import socket
import ssl
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from tidegate.frames import (
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    Delivered,
    ErrorBody,
    Hello,
    Kind,
    Subscribe,
    Welcome,
    decode_body,
    decode_deliver,
    encode_frame,
    publish_frame,
    split_frames,
)

TIMEOUT_S = 30


class Frame(NamedTuple):
    kind: Kind
    sequence: int
    body: bytes


class RawClient:
    """A connection whose waits are all bounded: it raises TimeoutError if the broker does not answer."""

    def __init__(self, port: int, *, receive_bytes: int | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            self.socket.connect(("127.0.0.1", port))
            if tls is not None:
                self.socket = tls.wrap_socket(self.socket, server_hostname="127.0.0.1")
        except OSError:
            self.socket.close()
            raise
        self._data = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    # Sending.

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def hello(self, publisher: str = "", **fields: Any) -> Welcome:
        self.send(encode_frame(Kind.HELLO, Hello(publisher=publisher, **fields)))
        welcome: Welcome = decode_body(self.wait_for(Kind.WELCOME).body, Welcome)
        return welcome

    def subscribe(self, number: int, subscription_filter: str, policy: str = "drop-oldest") -> None:
        self.send(encode_frame(Kind.SUBSCRIBE, Subscribe(number, subscription_filter, policy)))
        assert self.wait_for(Kind.SUBSCRIBED).sequence == number

    # Receiving.

    def receive(self) -> Frame | None:
        """Returns the next frame, or None when the broker has closed the connection."""
        while True:
            for kind, sequence, start, stop in split_frames(self._data, FRAME_BYTES_MAX):
                frame = Frame(Kind(kind), sequence, bytes(self._data[start:stop]))
                del self._data[:stop]
                return frame
            data = self.socket.recv(1 << 20)
            if not data:
                return None
            self._data += data

    def wait_for(self, kind: Kind) -> Frame:
        """Returns the next frame, which must be of this kind."""
        frame = self.receive()
        assert frame is not None, f"the broker closed instead of {kind.name}"
        assert frame.kind == kind, (frame.kind, frame.body)
        return frame

    def skip_to(self, kind: Kind) -> Frame:
        """Returns the next frame of this kind, and skips others before it."""
        while True:
            frame = self.receive()
            assert frame is not None, f"the broker closed before {kind.name}"
            if frame.kind == kind:
                return frame

    def wait_acknowledged(self, sequence: int) -> None:
        while self.wait_for(Kind.ACKNOWLEDGE).sequence < sequence:
            pass

    def take(self, count: int) -> list[tuple[str, Delivered]]:
        """Returns the next `count` deliveries, with their publishers."""
        taken: list[tuple[str, Delivered]] = []
        while len(taken) < count:
            publisher, deliveries = decode_deliver(self.skip_to(Kind.DELIVER).body)
            taken += [(publisher, delivered) for delivered in deliveries]
        assert len(taken) == count, taken
        return taken

    def wait_closed(self) -> ErrorBody | None:
        """Waits until the broker closes the connection. Returns the error that it sent, or None."""
        error = None
        try:
            while (frame := self.receive()) is not None:
                if frame.kind == Kind.ERROR:
                    error = decode_body(frame.body, ErrorBody)
        except (ConnectionResetError, BrokenPipeError):
            pass
        return error


def publish(first: int, *notifications: Any) -> bytes:
    """Returns a PUBLISH frame with any values as notifications."""
    return publish_frame(first, msgspec.msgpack.encode(list(notifications)))


def header_only(length: int, kind: int, sequence: int = 0) -> bytes:
    """Returns the header of a frame, without its body."""
    return length.to_bytes(4, "little") + bytes((kind, 0, 0, 0)) + sequence.to_bytes(8, "little")


assert len(header_only(0, 1)) == HEADER_BYTES
