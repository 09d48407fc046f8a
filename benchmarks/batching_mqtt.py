"""A batching MQTT 3.1.1 client at QoS 0: many PUBLISH packets per write, and many per read.

Keep-alive is off. Section numbers are those of the OASIS standard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from benchmarks.batching_client import BatchingClient

_CONNACK: Final = 0x20
_PUBLISH: Final = 0x30
_SUBACK: Final = 0x90
_PINGRESP: Final = 0xD0
# Topics per SUBSCRIBE packet.
_TOPICS: Final = 500


class BatchingMqtt(BatchingClient):
    separator = "/"

    def publish(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        self._socket.sendall(b"".join([_packet(_PUBLISH, _text(topic) + payload) for topic, payload in messages]))

    def subscribe(self, topics: Sequence[str]) -> None:
        for start in range(0, len(topics), _TOPICS):
            body = b"".join(_text(topic.encode()) + b"\x00" for topic in topics[start : start + _TOPICS])
            self._socket.sendall(_packet(0x82, b"\x00\x01" + body))
            self._wait(_SUBACK)

    def flush(self) -> None:
        self._socket.sendall(_packet(0xC0, b""))
        self._wait(_PINGRESP)

    def _greet(self) -> None:
        # 3.1: protocol name and level, clean session, keep-alive 0, an empty client id.
        self._socket.sendall(_packet(0x10, b"\x00\x04MQTT\x04\x02\x00\x00" + _text(b"")))
        self._wait(_CONNACK)

    def _split(self, data: bytes) -> list[bytes]:
        payloads = []
        position, end = 0, len(data)
        while (head := _head(data, position, end)) is not None:
            start, stop = head
            if stop > end:
                break
            if data[position] == _PUBLISH:
                payloads.append(data[start + 2 + (data[start] << 8 | data[start + 1]) : stop])
            position = stop
        self._rest = data[position:]
        return payloads

    def _wait(self, kind: int) -> None:
        """Reads packets up to and including the next one of this kind."""
        while True:
            while (head := _head(self._rest, 0, len(self._rest))) is not None and head[1] <= len(self._rest):
                found, self._rest = self._rest[0], self._rest[head[1] :]
                if found == kind:
                    return
            self._rest += self._read()


def _packet(kind: int, body: bytes) -> bytes:
    """Returns a packet with its fixed header, which has the length of the rest in groups of 7 bits (section 2.2)."""
    length = len(body)
    if length < 0x80:
        return b"%c%c%b" % (kind, length, body)
    if length < 0x4000:
        return b"%c%c%c%b" % (kind, length & 0x7F | 0x80, length >> 7, body)
    return b"%c%c%c%c%b" % (kind, length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14, body)


def _text(value: bytes) -> bytes:
    """Returns a string as two bytes of length and the bytes (section 1.5.3)."""
    return len(value).to_bytes(2, "big") + value


def _head(data: bytes, position: int, end: int) -> tuple[int, int] | None:
    """Returns (start, stop) of the body of the packet at a position, or None if its length has not arrived yet."""
    length = 0
    for k in range(1, 5):
        if position + k >= end:
            return None
        group = data[position + k]
        length |= (group & 0x7F) << 7 * (k - 1)
        if group < 0x80:
            return position + k + 1, position + k + 1 + length
    raise ValueError("a length of over four bytes is no MQTT")
