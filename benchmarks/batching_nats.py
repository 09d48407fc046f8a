"""A NATS client made for throughput: many PUB in one write, many MSG out of one read.

Stock clients make one object and one call of each message. This one shows what the server can do beside ours when
both have a client that batches. It speaks just enough of the protocol (docs.nats.io, "Client Protocol").
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec

READ_BYTES: Final = 256 * 1024
_CONNECT: Final = b'CONNECT {"verbose":false,"pedantic":false}\r\n'


class BatchingNats:
    """A blocking connection; `timeout_s` bounds every call."""

    def __init__(self, port: int, timeout_s: float) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._socket.sendall(_CONNECT)
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def publish(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        """(subject, payload) of each, in one write."""
        self._socket.sendall(b"".join([b"PUB %b %d\r\n%b\r\n" % (s, len(payload), payload) for s, payload in messages]))

    def subscribe(self, subjects: Sequence[str]) -> None:
        """Returns when the server has them all."""
        self._socket.sendall("".join(f"SUB {each} {number}\r\n" for number, each in enumerate(subjects, 1)).encode())
        self.flush()

    def flush(self) -> None:
        """Returns when the server has read everything so far. Not for use while messages come."""
        self._socket.sendall(b"PING\r\n")
        while b"PONG\r\n" not in self._rest:
            self._rest += self._read()
        self._rest = self._rest[self._rest.index(b"PONG\r\n") + 6 :]

    def take(self) -> list[Any]:
        """The JSON payloads of all messages that are there, at least one: decoded as one array, which is quickest."""
        while not (payloads := self._split(self._rest + self._read())):
            pass
        return msgspec.json.decode(b"[%b]" % b",".join(payloads), type=list[Any])

    def _split(self, data: bytes) -> list[bytes]:
        payloads = []
        position = 0
        while (line_end := data.find(b"\r\n", position)) >= 0:
            if data.startswith(b"MSG", position):
                start = line_end + 2
                stop = start + int(data[data.rindex(b" ", position, line_end) : line_end])
                if stop + 2 > len(data):
                    break
                payloads.append(data[start:stop])
                position = stop + 2
            else:
                if data.startswith(b"PING", position):
                    self._socket.sendall(b"PONG\r\n")
                position = line_end + 2
        self._rest = data[position:]
        return payloads

    def _read(self) -> bytes:
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError(f"nats-server has closed the connection: {self._rest[-200:]!r}")
        return data
