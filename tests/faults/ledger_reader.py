"""The reader of the fault series: drains a queue, and records every message that it receives.

    python ledger_reader.py leases|ranges QUEUE host:port[,host:port] LEDGER

It leases messages and deletes them, as consumers do, or it reads ranges and deletes what it has read, as Spark does.
The ledger is binary, with a `ROW` per delivery: physical queue, delivery count, the number in the queue, the
publisher's sequence, the number in the body, and the publisher (its position in LEDGER.names). On SIGUSR1 it resets its
connection. On SIGTERM it reads until the queue has been empty for a while, and exits with 0.
"""

from __future__ import annotations

import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import plain_native as native

ROW = struct.Struct("<BBHIII")
MOST = 5000
EMPTY_TIMES = 4
decode = msgspec.msgpack.decode


class Reader:
    def __init__(self, way: str, queue: str, addresses: list[tuple[str, int]], ledger: Path) -> None:
        self.queue = queue
        self.take = self.take_leases if way == "leases" else self.take_ranges
        self.addresses = addresses
        self.ledger = ledger.open("ab", buffering=0)
        self.names = ledger.with_suffix(".names").open("a", buffering=1)
        self.publishers: dict[str, int] = {}
        self.connects = 0
        self.number = 0
        self.is_ending = False
        self.is_cut = False

    def on_cut(self, *_: object) -> None:
        self.is_cut = True

    def on_end(self, *_: object) -> None:
        self.is_ending = True

    def run(self) -> None:
        empty = 0
        connection: socket.socket | None = None
        while empty < EMPTY_TIMES:
            try:
                if connection is None:
                    connection = native.connect(self.addresses[self.connects % len(self.addresses)])
                    connection.settimeout(15)
                    self.connects += 1
                if self.is_cut:
                    self.is_cut = False
                    native.reset(connection)
                    raise native.Lost("cut")
                taken = self.take(connection)
                empty = empty + 1 if self.is_ending and not taken else 0
            except (OSError, native.Lost):
                if connection is not None:
                    connection.close()
                else:
                    self.connects += 1
                connection = None
                time.sleep(0.1)

    def take_leases(self, connection: socket.socket) -> int:
        wanted = {"queue": self.queue, "max": MOST, "min": 1, "wait_s": 0.5, "visibility_s": 4.0}
        messages = self.ask(connection, native.DEQUEUE, wanted)
        if not messages:
            return 0
        self.ledger.write(b"".join([self.row(*message[1:]) for message in messages]))
        receipts = [message[0] for message in messages]
        self.ask(connection, native.SETTLE, {"queue": self.queue, "action": "delete", "receipts": receipts})
        return len(messages)

    def take_ranges(self, connection: socket.socket) -> int:
        """Reads a range, records it, and then deletes it. After a lost connection the same messages come again, with
        the same numbers."""
        taken = 0
        for physical, level in enumerate(self.call(connection, "levels")["levels"]):
            wanted = {"physical": physical, "from": level["first"], "to": level["next"]}
            page = self.call(connection, "read_page", wanted)
            places = struct.unpack(f"<{len(page['sequences']) // 8}Q", page["sequences"])
            ends = struct.unpack(f"<{len(places)}I", page["ends"])
            starts = (0, *ends)[:-1]
            records = [page["records"][start + 4 : end] for start, end in zip(starts, ends, strict=True)]
            rows = [self.row(1, physical, place, decode(each)) for place, each in zip(places, records, strict=True)]
            self.ledger.write(b"".join(rows))
            if places:
                self.call(connection, "delete_below", {"physical": physical, "sequence": places[-1] + 1})
            taken += len(places)
        if not taken:
            time.sleep(0.2)
        return taken

    def call(self, connection: socket.socket, action: str, arguments: dict[str, Any] | None = None) -> Any:
        body = {"action": action, "name": self.queue, "arguments": arguments or {}}
        return self.ask(connection, native.QUEUE_CALL, body)

    def row(self, delivery: int, physical: int, place: int, record: list[Any]) -> bytes:
        _group, _at, body, publisher, sequence, *_headers = record
        number = self.publishers.get(publisher)
        if number is None:
            number = self.publishers[publisher] = len(self.publishers)
            self.names.write(publisher + "\n")
        return ROW.pack(physical, min(delivery, 255), number, place, sequence, body["n"])

    def ask(self, connection: socket.socket, kind: int, body: dict[str, Any]) -> Any:
        self.number += 1
        connection.sendall(native.frame(kind, native.encode(body), self.number))
        while True:
            found, sequence, answer = native.receive(connection)
            if found == native.REPLY and sequence == self.number:
                return decode(answer)
            if found in (native.FAILED, native.ERROR, native.CLOSING):
                raise native.Lost(repr(answer[:300]))


def main() -> None:
    way, queue, addresses, ledger = sys.argv[1:]
    reader = Reader(way, queue, native.addresses(addresses), Path(ledger))
    signal.signal(signal.SIGUSR1, reader.on_cut)
    signal.signal(signal.SIGTERM, reader.on_end)
    print("ready", flush=True)
    reader.run()


if __name__ == "__main__":
    main()
