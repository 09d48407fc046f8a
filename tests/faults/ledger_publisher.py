"""A publisher of the fault series: large windows, its own ledger, and no code of Tidegate's client.

    python ledger_publisher.py NAME host:port[,host:port] LEDGER BURST

On SIGUSR2 it publishes BURST notifications, on SIGHUP a tenth of that: as fast as the connection accepts them, without
waiting for acknowledgements. When a connection is lost, it sends all unacknowledged notifications again to the next
address, with the same numbers. On SIGUSR1 it resets its connection. On SIGTERM it waits for all acknowledgements and
exits.

A line of the ledger has: seconds, sent, acknowledged, longest gap so far. A gap is a time without any acknowledgement
while some are pending.
"""

from __future__ import annotations

import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import plain_native as native

FRAME_NOTIFICATIONS = 1000
SILENCE_S = 20.0  # if nothing arrives for so long while acknowledgements are pending, the connection may be half-open


class Publisher:
    def __init__(self, name: str, addresses: list[tuple[str, int]], ledger: Path, burst: int) -> None:
        self.name = name
        self.addresses = addresses
        self.burst = burst
        self.wanted = 0
        self.sent = 0
        self.acknowledged = 0
        self.longest_gap_s = 0.0
        self.due_since_s = 0.0
        self.connects = 0
        self.is_ending = False
        self.is_cut = False
        self.ledger = ledger.open("a", buffering=1)

    # Signals.

    def on_burst(self, number: int, *_: object) -> None:
        self.wanted += self.burst if number == signal.SIGUSR2 else self.burst // 10

    def on_cut(self, *_: object) -> None:
        self.is_cut = True

    def on_end(self, *_: object) -> None:
        self.is_ending = True

    # The ledger.

    def note(self) -> None:
        self.ledger.write(f"{time.monotonic():.3f} {self.sent} {self.acknowledged} {self.longest_gap_s:.3f}\n")

    def on_acknowledged(self, sequence: int) -> None:
        now_s = time.monotonic()
        if sequence > self.sent:
            raise SystemExit(f"{self.name}: {sequence} is acknowledged, {self.sent} are sent")
        if sequence > self.acknowledged:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.due_since_s)
            self.acknowledged, self.due_since_s = sequence, now_s
            self.note()

    # The connection.

    def run(self) -> None:
        self.note()
        while not (self.is_ending and self.acknowledged == self.wanted):
            try:
                address = self.addresses[self.connects % len(self.addresses)]
                self.connects += 1
                connection = native.connect(address, self.name)
            except native.Lost:
                time.sleep(0.1)
                continue
            try:
                self.serve(connection)
            except (OSError, native.Lost):
                connection.close()
                time.sleep(0.05)
        self.note()

    def serve(self, connection: socket.socket) -> None:
        """Publishes until the connection is lost or cut, or all is done. First sends everything that is not
        acknowledged again, with its old numbers."""
        connection.setblocking(False)
        position = self.acknowledged
        pending = memoryview(b"")
        buffer = bytearray()
        heard_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while True:
                if self.is_cut:
                    self.is_cut = False
                    native.reset(connection)
                    raise native.Lost("cut")
                if self.is_ending and self.acknowledged == self.wanted:
                    connection.close()
                    return
                if not pending and position < self.wanted:
                    stop = min(position + FRAME_NOTIFICATIONS, self.wanted)
                    pending = memoryview(self.encode(position + 1, stop))
                    if self.sent == self.acknowledged:
                        self.due_since_s = heard_s = time.monotonic()
                    position = stop
                    self.sent = max(self.sent, stop)
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if pending else 0)
                selector.modify(connection, events)
                for _key, mask in selector.select(0.05):
                    if mask & selectors.EVENT_READ:
                        self.read(connection, buffer)
                        heard_s = time.monotonic()
                    if mask & selectors.EVENT_WRITE:
                        pending = pending[connection.send(pending) :]
                if self.sent > self.acknowledged and time.monotonic() - heard_s > SILENCE_S:
                    raise native.Lost("silent")

    def read(self, connection: socket.socket, buffer: bytearray) -> None:
        data = connection.recv(native.READ_BYTES)
        if not data:
            raise native.Lost("closed by the broker")
        buffer += data
        for kind, sequence, body in native.split(buffer):
            if kind == native.ACKNOWLEDGE:
                self.on_acknowledged(sequence)
            elif kind == native.REFUSE:
                raise SystemExit(f"{self.name}: refused: {body[:300]!r}")
            elif kind in (native.ERROR, native.CLOSING):
                raise native.Lost(repr(body[:300]))

    def encode(self, first: int, last: int) -> bytes:
        """Returns one frame with the notifications {"n": first} to {"n": last}, of eight bytes each."""
        maps = b"".join([b"\x81\xa1n\xce" + struct.pack(">I", number) for number in range(first, last + 1)])
        return native.frame(native.PUBLISH, b"\xdc" + struct.pack(">H", last + 1 - first) + maps, first)


def main() -> None:
    name, addresses, ledger, burst = sys.argv[1:]
    publisher = Publisher(name, native.addresses(addresses), Path(ledger), int(burst))
    signal.signal(signal.SIGUSR1, publisher.on_cut)
    signal.signal(signal.SIGUSR2, publisher.on_burst)
    signal.signal(signal.SIGHUP, publisher.on_burst)
    signal.signal(signal.SIGTERM, publisher.on_end)
    print("ready", flush=True)
    publisher.run()


if __name__ == "__main__":
    main()
