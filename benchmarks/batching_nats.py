"""A batching NATS client: many PUB per write, and many MSG per read.

It implements only the necessary part of the protocol (docs.nats.io, "Client Protocol").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.batching_client import BatchingClient


class BatchingNats(BatchingClient):
    separator = "."

    def publish(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        self._socket.sendall(b"".join([b"PUB %b %d\r\n%b\r\n" % (s, len(payload), payload) for s, payload in messages]))

    def subscribe(self, subjects: Sequence[str]) -> None:
        self._socket.sendall("".join(f"SUB {each} {number}\r\n" for number, each in enumerate(subjects, 1)).encode())
        self.flush()

    def flush(self) -> None:
        self._socket.sendall(b"PING\r\n")
        while b"PONG\r\n" not in self._rest:
            self._rest += self._read()
        self._rest = self._rest[self._rest.index(b"PONG\r\n") + 6 :]

    def _greet(self) -> None:
        self._socket.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\n')
        self.flush()

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
