"""The common part of the two batching clients: one write for many messages, and one decoding for everything read.

Stock clients need one object and one call per message. The batching clients show what the servers of the peers can do
when both sides have a client made for throughput.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from benchmarks.job import Received, wait_for_go
from benchmarks.processes import RUN_S, Line
from benchmarks.workload import make_readings, rounds_of, topic

READ_BYTES: Final = 256 * 1024

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Any]).decode


class BatchingClient:
    """A blocking connection whose calls all have a timeout. Each subclass implements a protocol."""

    separator: str

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), RUN_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._greet()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def publish(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        """Publishes (topic, payload) pairs in one write."""
        raise NotImplementedError

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribes to all topics, and returns when the server has confirmed them."""
        raise NotImplementedError

    def flush(self) -> None:
        """Waits until the server has read everything sent so far. Do not call it while messages arrive."""
        raise NotImplementedError

    def take(self) -> list[Any]:
        """Returns the payloads of all messages that have arrived, at least one.

        Decodes them as one JSON array, which is fastest."""
        while not (payloads := self._split(self._rest + self._read())):
            pass
        return _decode(b"[%b]" % b",".join(payloads))

    def _greet(self) -> None:
        raise NotImplementedError

    def _split(self, data: bytes) -> list[bytes]:
        """Returns the payloads of all complete messages in the data, and keeps the rest."""
        raise NotImplementedError

    def _read(self) -> bytes:
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError(f"the server has closed the connection: {self._rest[-200:]!r}")
        return data


def publish_in_batches(line: Line, port: str, count: int, client_type: type[BatchingClient], batch: int) -> int:
    readings = make_readings(seed=1)
    with client_type(int(port)) as client:
        wait_for_go(line)
        for part in rounds_of(readings, batch, count):
            client.publish([(topic(reading, client.separator).encode(), _encode(reading)) for reading in part])
        client.flush()
    return count


def take_all(line: Line, port: str, count: int, client_type: type[BatchingClient], wanted: str) -> Received:
    received, last_s = 0, time.monotonic()
    with client_type(int(port)) as client:
        client.subscribe([wanted])
        line.ready()
        with suppress(TimeoutError):
            while received < count:
                received += len(client.take())
                last_s = time.monotonic()
    return Received(received, last_s)
