"""HTTP ingest: `POST /v1/notifications` over 16 keep-alive connections, compared with a server that discards them.

Measured: notifications per second that were answered with 200, and the server's CPU time for each. The reference is a
bare ASGI application on the same uvicorn that decodes the JSON and answers. The difference is Tidegate's own work:
routing, checking, numbering, matching against 1000 filters, acknowledging. The client sends prebuilt requests over raw
sockets from its own process, on the same cores.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final
from urllib.parse import urlsplit

import msgspec

from benchmarks import over_tidegate
from benchmarks.job import Effort, show_progress, wait_for_go
from benchmarks.processes import RUN_S, Line, Server, Worker, cpu_s, free_port
from benchmarks.tables import ratio, write_table
from benchmarks.workload import alerts, make_readings, rounds_of

BATCHES: Final = (1, 10, 100)
CONNECTIONS: Final = 16
OTHERS: Final = 1000
REFERENCE: Final = "bare ASGI"
_BODIES: Final = 64
_HEAD: Final = (
    "server", "batch", "notifications/s", "server us", "client us", "failed", f"rate / {REFERENCE}",
    f"server us / {REFERENCE}",
)  # fmt: skip
_NOTES: Final = (
    f"{CONNECTIONS} keep-alive connections, one request at a time on each; medians of {{rounds}} interleaved rounds",
    f"{REFERENCE}: the same uvicorn, JSON decoded and counted, nothing checked, matched or kept",
    "the client shares the cores with the server; its CPU is beside the server's",
)


@dataclass(frozen=True)
class Ingested:
    """The result of a run. `failed` counts answers other than 200, and lost connections."""

    notifications: int
    failed: int
    rate: float
    server_us: float
    client_us: float


def run(effort: Effort) -> str:
    runs: dict[tuple[str, int], list[Ingested]] = {}
    with (
        over_tidegate.tidegate_broker() as broker,
        over_tidegate.subscribed(broker.native, alerts(OTHERS)),
        _bare_server() as (bare_pid, bare_port),
    ):
        servers = {"Tidegate": (broker.pid, urlsplit(broker.http).port or 0), REFERENCE: (bare_pid, bare_port)}
        for number in range(effort.rounds):
            for batch in BATCHES:
                for name, (pid, port) in servers.items():
                    ingested = _ingest(pid, port, batch, effort.run_s)
                    runs.setdefault((name, batch), []).append(ingested)
                    show_progress(f"round {number + 1}  {name}, batch {batch}: {ingested.rate:,.0f}/s")
    rows = [_row(name, batch, runs) for name, batch in runs]
    return write_table("HTTP ingest", _HEAD, rows, [note.format(rounds=effort.rounds) for note in _NOTES])


@contextmanager
def _bare_server() -> Iterator[tuple[int, int]]:
    port = free_port()
    root = str(Path(__file__).resolve().parent.parent)
    options = (
        "--app-dir",
        root,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--http",
        "httptools",
        "--lifespan",
        "off",
    )
    command = [sys.executable, "-m", "uvicorn", "benchmarks.bare_http:application", *options, "--no-access-log"]
    with Server(command) as server:
        server.wait_listening(port)
        yield server.pid, port


def _ingest(server_pid: int, port: int, batch: int, run_s: float) -> Ingested:
    with Worker(post_batches, port, batch, run_s) as client:
        client.wait_ready()
        before = cpu_s(server_pid), cpu_s(client.pid)
        client.go()
        answered, failed, took_s = client.result()
        server_s, client_s = cpu_s(server_pid) - before[0], cpu_s(client.pid) - before[1]
    count = max(answered * batch, 1)
    return Ingested(answered * batch, failed, count / took_s, server_s * 1e6 / count, client_s * 1e6 / count)


def post_batches(line: Line, port: int, batch: int, run_s: float) -> tuple[int, int, float]:
    """Posts on every connection for `run_s`. Returns (requests answered with 200, failed requests, seconds)."""
    return asyncio.run(_post_batches(line, port, _requests(batch), run_s))


async def _post_batches(line: Line, port: int, requests: list[bytes], run_s: float) -> tuple[int, int, float]:
    loop = asyncio.get_running_loop()
    posters = [
        (await loop.create_connection(lambda: Poster(requests), "127.0.0.1", port))[1] for _ in range(CONNECTIONS)
    ]
    wait_for_go(line)
    began_s = time.monotonic()
    for poster in posters:
        poster.post_until(began_s + min(run_s, RUN_S))
    async with asyncio.timeout(2 * RUN_S):
        for poster in posters:
            await poster.is_done.wait()
    took_s = time.monotonic() - began_s
    return sum(poster.answered for poster in posters), sum(poster.failed for poster in posters), took_s


def _requests(batch: int) -> list[bytes]:
    """Returns complete requests, built in advance so that the client uses little CPU."""
    head = b"POST /v1/notifications HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    bodies = [msgspec.json.encode(part) for part in rounds_of(make_readings(seed=1), batch, _BODIES * batch)]
    return [b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body) for body in bodies]


class Poster(asyncio.Protocol):
    """A connection that sends the next request when the last one is answered."""

    def __init__(self, requests: list[bytes]) -> None:
        self.is_done = asyncio.Event()
        self.answered = 0
        self.failed = 0
        self._requests = requests
        self._deadline_s = 0.0
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.failed += not self.is_done.is_set()
        self.is_done.set()

    def post_until(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._post()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        head, separator, body = self._rest.partition(b"\r\n\r\n")
        if separator and len(body) >= _content_length(head):
            self.answered += head.startswith(b"HTTP/1.1 200")
            self.failed += not head.startswith(b"HTTP/1.1 200")
            self._rest = b""
            self._post()

    def _post(self) -> None:
        if time.monotonic() >= self._deadline_s:
            self.is_done.set()
            self._transport.close()
        else:
            self._transport.write(self._requests[(self.answered + self.failed) % len(self._requests)])


def _content_length(head: bytes) -> int:
    name = b"content-length: "
    start = head.lower().index(name) + len(name)
    return int(head[start:].split(b"\r\n", 1)[0])


def _row(name: str, batch: int, runs: dict[tuple[str, int], list[Ingested]]) -> list[str]:
    mine, reference = runs[name, batch], runs[REFERENCE, batch]
    rate, reference_rate = (median(each.rate for each in some) for some in (mine, reference))
    server_us, reference_us = (median(each.server_us for each in some) for some in (mine, reference))
    return [
        name,
        str(batch),
        f"{rate:,.0f}",
        f"{server_us:.2f}",
        f"{median(each.client_us for each in mine):.2f}",
        str(sum(each.failed for each in mine)),
        ratio(rate, reference_rate),
        ratio(server_us, reference_us),
    ]
