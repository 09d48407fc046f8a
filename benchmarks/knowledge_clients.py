"""Clients of the knowledge base of a real broker, which also publishes every change.

Measured over SSAP:

* inserts and mask queries of four clients, with a connection for each operation, and their latency at half that rate;
* the same operations pipelined on one connection;
* one change of a fact with a thousand subscribers;
* a thousand clients that send the same query at the same time.

Measured over HTTP: single-triple updates with a thousand open SPARQL queries of three patterns, compared with
evaluating all these queries again.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any, Final
from urllib.parse import quote, urlsplit

from benchmarks.job import QUICK, Effort, show_progress
from benchmarks.over_tidegate import Broker, tidegate_broker
from benchmarks.processes import Line, Worker, cpu_s
from benchmarks.tables import ratio, write_table

CLIENTS: Final = 4
OPERATIONS: Final = 1500  # per client
PIPELINED: Final = 10_000
SUBSCRIBERS: Final = 1000
OPEN_QUERIES: Final = 1000
UPDATES: Final = 200
WAIT_S: Final = 120.0
_END: Final = b"</SSAP_message>"
_Message = Callable[[int, str], bytes]


def run(effort: Effort) -> str:
    rounds = min(effort.rounds, 3)
    with tidegate_broker("--ssap-port", "0") as broker:
        port = urlsplit(broker.ssap).port or 0
        tables = [_alone(broker, port, rounds), _pipelined(broker, port, rounds), _fan_out(port, rounds)]
        tables.append(_at_once(broker, port, rounds))
    with tidegate_broker("--ssap-port", "0") as broker:
        tables.append(_open_queries(broker, OPEN_QUERIES // 5 if effort == QUICK else OPEN_QUERIES))
    return "\n".join(tables)


def _envelope(kind: str, number: int, parameters: bytes, kp: str = "KP") -> bytes:
    return (
        b"<SSAP_message><node_id>%s</node_id><space_id>X</space_id><transaction_type>%s</transaction_type>"
        b"<message_type>REQUEST</message_type><transaction_id>%d</transaction_id>%s</SSAP_message>"
        % (kp.encode(), kind.encode(), number, parameters)
    )


def _triple(subject: str, value: str) -> bytes:
    return (
        f'<triple><subject type="uri">http://example.org/{subject}</subject><predicate>http://example.org/p</predicate>'
        f'<object type="literal">{value}</object></triple>'
    ).encode()


def _insert(number: int, name: str) -> bytes:
    triples = b"<triple_list>%s</triple_list>" % _triple(f"{name}/{number}", str(number))
    return _envelope(
        "INSERT", number, b'<parameter name="insert_graph" encoding="RDF-M3">%s</parameter>' % triples, name
    )


def _mask(number: int, name: str) -> bytes:
    """Returns a mask query for a subject of its own, so that the cache answers none."""
    mask = (
        b'<triple_list><triple><subject type="uri">http://example.org/%s/%d</subject><predicate>http://example.org/p'
        b'</predicate><object type="uri">sib:any</object></triple></triple_list>' % (name.encode(), number)
    )
    parameters = b'<parameter name="type">RDF-M3</parameter><parameter name="query">%s</parameter>' % mask
    return _envelope("QUERY", number, parameters, name)


OPERATIONS_OF: Final[dict[str, _Message]] = {"insert": _insert, "mask query": _mask}


# A connection for each operation.


def _alone(broker: Broker, port: int, rounds: int) -> str:
    rows = []
    for what in OPERATIONS_OF:
        found = []
        for number in range(rounds):
            show_progress(f"round {number + 1}  {what}, a connection for each")
            before_s = cpu_s(broker.pid)
            took_s = _in_process(_clients, port, what, f"{what[0]}{number}", 0.0)
            rate = len(took_s[1]) / took_s[0]
            used_us = (cpu_s(broker.pid) - before_s) / len(took_s[1]) * 1e6
            half = _in_process(_clients, port, what, f"{what[0]}half{number}", rate / 2)
            found.append((rate, used_us, *_percentiles_ms(half[1])))
        rate, used_us, p50, p99 = (median(column) for column in zip(*found, strict=True))
        rows.append([what, f"{rate:,.0f}", f"{used_us:.0f}", f"{p50:.1f}", f"{p99:.1f}"])
    head = ("operation", "a second", "server CPU us", "p50 ms at half of that", "p99 ms")
    return write_table(f"SSAP with a connection for each operation, {CLIENTS} clients", head, rows)


def _clients(line: Line, port: int, what: str, name: str, rate: float) -> tuple[float, list[float]]:
    """Runs all clients, at a rate or as fast as possible. Returns the total seconds and those of each operation."""
    line.ready(0)
    took_s: list[list[float]] = [[] for _ in range(CLIENTS)]
    began_s = time.perf_counter()

    def work(client: int) -> None:
        for number in range(OPERATIONS):
            if rate:
                time.sleep(max(0.0, began_s + (number * CLIENTS + client) / rate - time.perf_counter()))
            message = OPERATIONS_OF[what](number, f"{name}c{client}")
            sent_s = time.perf_counter()
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(message)
                received = b""
                while _END not in received:
                    received += connection.recv(1 << 16)
            took_s[client].append(time.perf_counter() - sent_s)

    threads = [threading.Thread(target=work, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began_s, [each for client in took_s for each in client]


def _percentiles_ms(took_s: list[float]) -> tuple[float, float]:
    cuts = quantiles(took_s, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


def _in_process(job: Callable[..., Any], *arguments: Any) -> Any:
    with Worker(job, *arguments) as worker:
        worker.wait_ready()
        return worker.result()


# One connection for all operations.


def _pipelined(broker: Broker, port: int, rounds: int) -> str:
    rows = []
    for what in OPERATIONS_OF:
        found = []
        for number in range(rounds):
            show_progress(f"round {number + 1}  {what}, pipelined")
            before_s = cpu_s(broker.pid)
            rate = _in_process(_pipeline, port, what, f"pipelined{number}")
            found.append((rate, (cpu_s(broker.pid) - before_s) / PIPELINED * 1e6))
        rate, used_us = (median(column) for column in zip(*found, strict=True))
        rows.append([what, f"{rate:,.0f}", f"{used_us:.0f}"])
    return write_table("The same, pipelined on one connection", ("operation", "a second", "server CPU us"), rows)


def _pipeline(line: Line, port: int, what: str, name: str) -> float:
    line.ready(0)
    return pipeline(port, what, name)


def pipeline(port: int, what: str, name: str) -> float:
    """Returns the operations per second, from the first one sent to the last one confirmed."""
    messages = b"".join(OPERATIONS_OF[what](number, name) for number in range(PIPELINED))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        began_s = time.perf_counter()
        sender = threading.Thread(target=connection.sendall, args=(messages,))
        sender.start()
        confirmed, rest = 0, b""
        while confirmed < PIPELINED:
            received = rest + connection.recv(1 << 18)
            confirmed += received.count(_END)
            rest = received[received.rfind(_END) + len(_END) :] if _END in received else received
        sender.join()
        return PIPELINED / (time.perf_counter() - began_s)


# A thousand clients at once.


def _fan_out(port: int, rounds: int) -> str:
    show_progress(f"one change, {SUBSCRIBERS} subscribers")
    took_s = _in_process(_subscribers, port, rounds)
    row = [f"{SUBSCRIBERS:,}", f"{median(took_s) * 1000:.0f}"]
    return write_table("One change of a fact, until its last subscriber knows", ("subscribers", "ms"), [row])


def _subscribers(line: Line, port: int, rounds: int) -> list[float]:
    line.ready(0)

    async def scenario() -> list[float]:
        mask = (
            b'<parameter name="type">RDF-M3</parameter><parameter name="query"><triple_list><triple>'
            b'<subject type="uri">http://example.org/fact</subject><predicate>http://example.org/p</predicate>'
            b'<object type="uri">sib:any</object></triple></triple_list></parameter>'
        )
        connections = []
        for number in range(SUBSCRIBERS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_envelope("SUBSCRIBE", 1, mask, f"KP{number}"))
            connections.append((reader, writer))
        await asyncio.gather(*(reader.readuntil(_END) for reader, _ in connections))
        took_s = []
        for number in range(rounds):
            changer_reader, changer = await asyncio.open_connection("127.0.0.1", port)
            began_s = time.perf_counter()
            triples = b"<triple_list>%s</triple_list>" % _triple("fact", str(number))
            changer.write(
                _envelope("INSERT", 1, b'<parameter name="insert_graph" encoding="RDF-M3">%s</parameter>' % triples)
            )
            await asyncio.gather(*(reader.readuntil(_END) for reader, _ in connections))
            took_s.append(time.perf_counter() - began_s)
            await changer_reader.readuntil(_END)
            changer.close()
        for _, writer in connections:
            writer.close()
        return took_s

    return asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def _at_once(broker: Broker, port: int, rounds: int) -> str:
    show_progress(f"{SUBSCRIBERS} clients ask the same")
    before = _evaluations(broker)
    took_s = _in_process(_askers, port, rounds)
    asked = (_evaluations(broker) - before) / rounds
    row = [f"{SUBSCRIBERS:,}", f"{asked:.1f}", f"{median(took_s) * 1000:.0f}"]
    return write_table(
        "The same SPARQL query of all clients at once, after a change", ("clients", "evaluations", "ms"), [row]
    )


def _evaluations(broker: Broker) -> int:
    """Returns the number of SPARQL evaluations. Queries that joined another or had a cached answer do not count."""
    pool = _get(broker, "/v1/layers")["knowledge"]["pool"]
    return int(pool["lanes"]["sparql"]["answered"] - pool["joined"] - pool["cached"])


def _askers(line: Line, port: int, rounds: int) -> list[float]:
    line.ready(0)
    query = b"SELECT ?s ?o WHERE { ?s &lt;http://example.org/p&gt; ?o } LIMIT 10"

    async def ask(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        parameters = b'<parameter name="type">sparql</parameter><parameter name="query">%s</parameter>' % query
        writer.write(_envelope("QUERY", 1, parameters, f"KP{number}"))
        await reader.readuntil(_END)
        writer.close()

    async def scenario() -> list[float]:
        took_s = []
        for number in range(rounds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_insert(number, "before"))
            await reader.readuntil(_END)
            writer.close()
            began_s = time.perf_counter()
            await asyncio.gather(*(ask(each) for each in range(SUBSCRIBERS)))
            took_s.append(time.perf_counter() - began_s)
        return took_s

    return asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


# Open queries.


def _open_queries(broker: Broker, count: int) -> str:
    """Measures updates of rooms with sensors. Each room has an open query of three patterns, and an update changes the
    result of one query."""
    show_progress(f"{count} open queries")
    _update(broker, "INSERT DATA {" + " ".join(map(_room, range(count))) + "}")
    without_us = _updates_us(broker, count)
    with Worker(_keep_open, broker.http, count) as keeper:
        keeper.wait_ready()
        with_us = _updates_us(broker, count)
        keeper.kill()
    began_s = time.perf_counter()
    for room in range(count):
        _get(broker, "/v1/sparql?query=" + quote(_query_of(room) + f" # {room}"))
    again_us = (time.perf_counter() - began_s) * 1e6
    rows = [
        ["none", f"{without_us:,.0f}", ""],
        [f"{count:,}, of which one is concerned", f"{with_us:,.0f}", ""],
        [f"all {count:,} asked again, over HTTP", f"{again_us:,.0f}", ratio(again_us, with_us)],
    ]
    return write_table("A single-triple update over HTTP", ("open SPARQL queries", "us", "against the row above"), rows)


def _room(room: int) -> str:
    return (
        f"<http://e/s{room}> <http://e/in> <http://e/r{room}> ; <http://e/is> <http://e/warm> ; "
        f"<http://e/value{room}> 1 ."
    )


def _query_of(room: int) -> str:
    return (
        f"SELECT ?s ?v {{ ?s <http://e/in> <http://e/r{room}> . ?s <http://e/is> <http://e/warm> . "
        f"?s <http://e/value{room}> ?v }}"
    )


def _updates_us(broker: Broker, count: int) -> float:
    took_us = []
    for number in range(UPDATES):
        began_s = time.perf_counter()
        _update(broker, f"INSERT DATA {{ <http://e/s{number % count}> <http://e/value{number % count}> {number + 2} }}")
        took_us.append((time.perf_counter() - began_s) * 1e6)
    return median(took_us)


def _keep_open(line: Line, address: str, count: int) -> None:
    """Keeps the queries open as server-sent events, on one connection per query."""
    place = urlsplit(address)

    async def read(reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass

    async def scenario() -> None:
        readers = []
        for room in range(count):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            target = "/v1/persistent?query=" + quote(_query_of(room))
            writer.write(f"GET {target} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
            await reader.readuntil(b"data:")
            readers.append((reader, writer))
        line.ready(0)
        await asyncio.gather(*(read(reader) for reader, _ in readers))

    asyncio.run(scenario())


def _update(broker: Broker, text: str) -> None:
    _call(broker, "POST", "/v1/sparql", text, {"Content-Type": "application/sparql-update"})


def _get(broker: Broker, target: str) -> Any:
    return json.loads(_call(broker, "GET", target, None, {"Accept": "application/sparql-results+json"}))


def _call(broker: Broker, method: str, target: str, body: str | None, headers: dict[str, str]) -> bytes:
    place = urlsplit(broker.http)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    try:
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status < 300, data
        return data
    finally:
        connection.close()
