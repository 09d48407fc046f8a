"""Peers cut their connections at every step of every protocol, while others block the broker.

After each cut the broker serves, no connection keeps its place, and the log is empty. At the end SIGTERM ends the
broker with exit code 0. An error of a peer's socket must affect nothing but its connection.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import quote

import pytest
import trustme
from broker_process import BrokerProcess
from http_client import WAIT_S, connection_metrics, open_client, wait_until
from raw_client import RawClient, header_only, publish
from ssap_world import Kp, graph_of, masks
from websocket_client import WebSocketClient
from wsproto import ConnectionType
from wsproto.connection import Connection
from wsproto.events import CloseConnection, Event, Message, Ping

from tidegate.frames import Hello, Kind, encode_frame
from tidegate.messages import Dequeue

ANY = "http://www.nokia.com/NRC/M3/sib#any"
WINDOW_BYTES = 4096
FLAGS = (
    "--publisher-window-bytes",
    str(WINDOW_BYTES),
    "--outbox-notifications-max",
    "50",
    "--block-s",
    "600",
    "--request-timeout-s",
    "5",
    "--drain-s",
    "1",
)
LARGE = "x" * 900
# The broker may wait 10 s for a peer that does not read.
SETTLED_S = 30.0


# How a peer leaves.


def close(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def close_half(connection: socket.socket) -> None:
    """Closes the sending side, and reads nothing."""
    socket.socket.shutdown(connection, socket.SHUT_WR)


def close_both_halves(connection: socket.socket) -> None:
    """Shuts both sides down without closing the socket, so that later data is answered with a reset."""
    socket.socket.shutdown(connection, socket.SHUT_RDWR)


CUTS = [close, reset, close_half, close_both_halves]


class World:
    """A broker under load, with or without TLS: a subscriber that blocks its publishers, and a stream of deliveries."""

    def __init__(self, broker: BrokerProcess, log: Path, tls: ssl.SSLContext | None) -> None:
        self.broker = broker
        self.tls = tls
        self._log = log
        self._open = ExitStack()
        self._changes = 0
        self._has_begun = threading.Event()
        self._is_over = threading.Event()
        self._flooding = threading.Thread(target=self._flood)

    def __enter__(self) -> World:
        self.http = self._open.enter_context(open_client(self.broker, verify=self.tls or False))
        stuck = self.native(receive_bytes=4096)
        stuck.hello()
        stuck.subscribe(1, "stuck", "block")
        self.http.put("/v1/queues/cut").raise_for_status()
        self._flooding.start()
        assert self._has_begun.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._flooding.join(WAIT_S)
        self._open.close()

    def native(self, receive_bytes: int | None = None) -> RawClient:
        return self._open.enter_context(RawClient(self.broker.native_port, receive_bytes=receive_bytes, tls=self.tls))

    def connect(self, port: int, receive_bytes: int | None = None) -> socket.socket:
        connection = self.connect_plain(port, receive_bytes)
        if self.tls is not None:
            connection = self.tls.wrap_socket(connection, server_hostname="127.0.0.1")
        return self._open.enter_context(connection)

    def connect_plain(self, port: int, receive_bytes: int | None = None) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(WAIT_S)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect(("127.0.0.1", port))
        return self._open.enter_context(connection)

    def kp(self, receive_bytes: int | None = None) -> Kp:
        return self._open.enter_context(Kp(self.broker, receive_bytes=receive_bytes, tls=self.tls))

    def websocket(self, path: str = "/v1/subscribe", query: dict[str, str] | None = None) -> WebSocketClient:
        return self._open.enter_context(
            WebSocketClient(self.broker.http, "flow", path=path, query=query, is_small=True, tls=self.tls)
        )

    def check(self, places: dict[str, float]) -> None:
        """Checks that the broker serves on all ports, that all places are free again, and that the log is empty."""
        assert self.http.get("/healthz").status_code == 200
        with RawClient(self.broker.native_port, tls=self.tls) as client:
            client.hello()
        self.change_graph()

        def is_settled() -> bool:
            if self.places() == places:
                return True
            # A KP that closes its sending side may still read. The broker notices its end only when it sends.
            self.change_graph()
            return False

        wait_until(is_settled, SETTLED_S)
        assert self.complaints() == []

    def change_graph(self) -> None:
        with Kp(self.broker, tls=self.tls) as kp:
            self._changes += 1
            kp.ask("INSERT", graph_of("insert_graph", ("changed", "p", str(self._changes))))

    def places(self) -> dict[str, float]:
        return connection_metrics(self.http, "connections")

    def complaints(self) -> list[str]:
        """Returns the warnings that the broker has logged."""
        return [line for line in self._log.read_text().splitlines() if "compiling the kernels" not in line]

    def _flood(self) -> None:
        with RawClient(self.broker.native_port, tls=self.tls) as client:
            first = client.hello("flood").acknowledged + 1
            while not self._is_over.wait(0.002):
                client.send(publish(first, *({"flow": number, "text": LARGE} for number in range(20))))
                first += 20
                client.wait_acknowledged(first - 1)
                self._has_begun.set()


# The steps at which a connection is cut. Each returns its socket.

Step = Callable[[World], socket.socket]


def native_connected(world: World) -> socket.socket:
    return world.native().socket


def native_in_hello(world: World) -> socket.socket:
    client = world.native()
    client.send(encode_frame(Kind.HELLO, Hello(publisher="half"))[:20])
    return client.socket


def native_greeted(world: World) -> socket.socket:
    client = world.native()
    client.hello("greeted")
    return client.socket


def native_greeting_unread(world: World) -> socket.socket:
    client = world.native()
    client.send(encode_frame(Kind.HELLO, Hello(publisher="unread")))
    return client.socket


def native_in_frame(world: World) -> socket.socket:
    client = world.native()
    client.hello("in-frame")
    client.send(publish(1, {"flow": 0}), header_only(1000, Kind.PUBLISH, 2), b"\x91")
    return client.socket


def native_subscribed(world: World) -> socket.socket:
    client = world.native()
    client.hello()
    client.subscribe(1, "nothing")
    return client.socket


def native_not_reading(world: World) -> socket.socket:
    client = world.native(receive_bytes=4096)
    client.hello()
    client.subscribe(1, "flow")
    return client.socket


def native_reading(world: World) -> socket.socket:
    client = world.native()
    client.hello()
    client.subscribe(1, "flow")
    client.skip_to(Kind.DELIVER)
    return client.socket


def native_held_back(world: World) -> socket.socket:
    """Fills the window of a publisher that has read every acknowledgement, so that the broker stops reading."""
    client = world.native()
    first = client.hello("held").acknowledged + 1
    client.socket.settimeout(0.3)
    try:
        while True:
            client.send(publish(first, *({"stuck": number, "text": LARGE} for number in range(20))))
            first += 20
            client.wait_acknowledged(first - 1)
    except TimeoutError:
        return client.socket


def native_held_back_sending(world: World) -> socket.socket:
    """Does the same, with much more data in flight."""
    client = world.native()
    first = client.hello("held").acknowledged + 1
    client.socket.settimeout(0.3)
    try:
        while True:
            client.send(publish(first, *({"stuck": number, "text": LARGE} for number in range(20))))
            first += 20
    except TimeoutError:
        return client.socket


def native_dequeueing(world: World) -> socket.socket:
    client = world.native()
    client.hello()
    client.send(encode_frame(Kind.DEQUEUE, Dequeue("cut", wait_s=60.0), sequence=1))
    return client.socket


def native_asking(world: World) -> socket.socket:
    client = world.native(receive_bytes=4096)
    client.hello()
    client.send(encode_frame(Kind.STATUS) * 500)
    return client.socket


def native_closing(world: World) -> socket.socket:
    client = world.native()
    client.hello()
    client.send(encode_frame(Kind.GOODBYE))
    return client.socket


def native_refused(world: World) -> socket.socket:
    client = world.native(receive_bytes=4096)
    client.hello()
    client.subscribe(1, "flow")
    client.send(header_only(0, 250))
    return client.socket


def http_connected(world: World) -> socket.socket:
    return world.connect(world.broker.http_port)


def http_with(data: bytes, receive_bytes: int | None = None) -> Step:
    def step(world: World) -> socket.socket:
        connection = world.connect(world.broker.http_port, receive_bytes)
        connection.sendall(data)
        return connection

    return step


def request(target: str, head: str = "", body: str = "", method: str = "GET") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n{body}".encode()


UPGRADE = (
    f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n"
)
TRIPLES = quote(ANY)


def events_not_read(world: World) -> socket.socket:
    connection = world.connect(world.broker.http_port, 4096)
    connection.sendall(request("/v1/stream?filter=flow"))
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def websocket_open(world: World) -> socket.socket:
    return world.websocket()._socket


def websocket_reading(world: World) -> socket.socket:
    client = world.websocket()
    client.receive()
    return client._socket


def websocket_saying(*said: bytes) -> Step:
    """Returns a step that sends part of a frame, or frames whose answers are not read."""

    def step(world: World) -> socket.socket:
        client = world.websocket(query={"filter": "flow==$here", "context": '{"here": 1}'})
        for each in said:
            client._socket.sendall(each)
        return client._socket

    return step


def websocket_frames() -> dict[str, bytes]:
    """Returns frames that a client may send, masked as required."""

    def frame(event: Event) -> bytes:
        return Connection(ConnectionType.CLIENT).send(event)

    context = frame(Message('{"context": {"here": 2}}'))
    return {
        "in a frame": context[:7],
        "with contexts unread": context * 500,
        "with pings unread": frame(Ping(b"x" * 100)) * 500,
        "closing": frame(CloseConnection(1000)),
        "wrong": b"\xff" * 20,
        "with no context": frame(Message("nonsense")),
    }


def websocket_refused(world: World) -> socket.socket:
    connection = world.connect(world.broker.http_port)
    connection.sendall(request("/v1/subscribe?filter=((", UPGRADE))
    return connection


def persistent_open(world: World) -> socket.socket:
    return world.websocket("/v1/persistent", {"query": "SELECT * { ?s ?p ?o }"})._socket


def ssap_connected(world: World) -> socket.socket:
    return world.kp().socket


def ssap_in_join(world: World) -> socket.socket:
    kp = world.kp()
    kp.socket.sendall(kp.message("JOIN")[:60])
    return kp.socket


def ssap_joined(world: World) -> socket.socket:
    kp = world.kp()
    kp.ask("JOIN")
    return kp.socket


def ssap_asking(world: World) -> socket.socket:
    kp = world.kp(receive_bytes=4096)
    for number in range(100):
        kp.send("INSERT", graph_of("insert_graph", ("s", "p", str(number))))
        kp.send("QUERY", masks((ANY, ANY, ANY)))
    return kp.socket


def ssap_subscribed(world: World) -> socket.socket:
    kp = world.kp()
    kp.ask("SUBSCRIBE", masks((ANY, ANY, ANY)))
    return kp.socket


def ssap_told(world: World) -> socket.socket:
    """Subscribes, so that indications are in flight."""
    subscriber, writer = world.kp(receive_bytes=4096), world.kp()
    subscriber.ask("SUBSCRIBE", masks((ANY, ANY, ANY)))
    for number in range(50):
        writer.send("UPDATE", graph_of("insert_graph", ("t", "p", f"{number}{LARGE}")))
    writer.read()
    writer.socket.close()
    return subscriber.socket


def ssap_leaving(world: World) -> socket.socket:
    kp = world.kp()
    kp.ask("SUBSCRIBE", masks((ANY, ANY, ANY)))
    kp.send("LEAVE")
    return kp.socket


def ssap_malformed(world: World) -> socket.socket:
    kp = world.kp()
    kp.socket.sendall(b"<SSAP_message><a></b>")
    return kp.socket


def client_hello() -> bytes:
    """Returns the first bytes of a TLS client."""
    outgoing = ssl.MemoryBIO()
    handshake = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing.read()


def in_handshake(port: str, sent_bytes: int | None) -> Step:
    """Returns a step within the TLS handshake, after so many bytes of the client's first message, or all for None."""

    def step(world: World) -> socket.socket:
        connection = world.connect_plain(getattr(world.broker, port))
        connection.sendall(client_hello()[:sent_bytes])
        return connection

    return step


STEPS: dict[str, Step] = {
    **{
        f"{port} in a handshake, {sent_bytes} bytes": in_handshake(port, sent_bytes)
        for port in ("native_port", "http_port", "port")
        for sent_bytes in (0, 40, None)
    },
    **{name: step for name, step in list(globals().items()) if name.startswith(("native_", "ssap_", "http_connected"))},
    "http in a head": http_with(request("/healthz")[:20]),
    "http in a body": http_with(request("/v1/notifications", "Content-Length: 9\r\n", "[{", "POST")),
    "http with answers unread": http_with(request("/metrics") * 50, 4096),
    "http held": http_with(
        request("/v1/queues/cut/dequeue", "Content-Length: 15\r\n", '{"wait_s": 60.0', "POST")[:-1] + b"}"
    ),
    "http refused": http_with(b"NONSENSE\r\n\r\n"),
    "events not read": events_not_read,
    "events of a graph": http_with(request(f"/v1/persistent?s={TRIPLES}")),
    "websocket in its handshake": http_with(request("/v1/subscribe?filter=flow", UPGRADE)[:-2]),
    "websocket accepted": http_with(request("/v1/subscribe?filter=flow", UPGRADE)),
    "websocket refused": websocket_refused,
    "websocket open": websocket_open,
    "websocket reading": websocket_reading,
    **{f"websocket {name}": websocket_saying(frame) for name, frame in websocket_frames().items()},
    "websocket of a graph": persistent_open,
}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module", params=["plain", "tls"])
def world(
    request: pytest.FixtureRequest, authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("cut")
    flags: tuple[str, ...] = FLAGS
    tls = None
    if request.param == "tls":
        tls = ssl.create_default_context()
        authority.configure_trust(tls)
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_and_cert_chain_pem.write_to_path(folder / "pair.pem")
        flags += ("--tls-cert", str(folder / "pair.pem"), "--tls-key", str(folder / "pair.pem"))
    log = folder / "log"
    with BrokerProcess(*flags, has_knowledge=True, log=log) as broker:
        with World(broker, log, tls) as world:
            yield world
        assert broker.terminate() == 0
        assert world.complaints() == []


@pytest.mark.parametrize(
    "cut", [reset, *(pytest.param(cut, marks=pytest.mark.crash) for cut in CUTS if cut is not reset)]
)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_connection_that_is_cut_costs_nobody_else_anything(
    world: World, step: Step, cut: Callable[[socket.socket], None]
) -> None:
    places = world.places()
    connections = [step(world) for _ in range(2)]
    for connection in connections:
        with suppress(OSError):  # the broker has closed it first
            cut(connection)
    # The broker does not read a blocked publisher, so it notices its end only when the publisher reconnects.
    with RawClient(world.broker.native_port, tls=world.tls) as again:
        again.hello("held")
    for connection in connections:
        connection.close()
    world.check(places)
