"""Every buffer that a peer can make the broker fill has a bound, before the peer has sent a token and after."""

from __future__ import annotations

import socket
import ssl
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from broker_process import BrokerProcess
from http_client import WAIT_S, connection_metrics, exchange, open_client, read_all, wait_until
from raw_client import RawClient, header_only
from ssap_world import Kp, graph_of, masks, status, text_of
from websocket_client import WebSocketClient
from wsproto.events import Ping

from tidegate.frames import Hello, Kind, encode_frame
from tidegate.listeners.connections import SURPLUS_MAX

ANY = "http://www.nokia.com/NRC/M3/sib#any"
MIB = 1024 * 1024
# What the sockets of both ends may buffer in a usual system configuration.
SOCKETS_BYTES_MAX = 40 * MIB
CONNECTIONS_MAX = 4
TOKEN = "sixteen-or-more-characters"


@pytest.fixture(scope="module")
def impatient() -> Iterator[BrokerProcess]:
    """Runs a broker with short timeouts, and a token for KPs."""
    flags = ("--hello-timeout-s", "1", "--idle-timeout-s", "1", "--request-timeout-s", "1")
    with BrokerProcess(*flags, environment={"TIDEGATE_TOKEN": TOKEN}, has_knowledge=True) as process:
        yield process


def memory_bytes(broker: BrokerProcess) -> int:
    """Returns the peak memory of the process."""
    for line in Path(f"/proc/{broker.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system does not tell")


# WebSocket.


def send_until_held(client: WebSocketClient, data: bytes) -> int:
    """Sends until the broker stops reading, and returns how often it sent."""
    client._socket.settimeout(1.0)
    sent = 0
    try:
        while sent * len(data) < 2 * SOCKETS_BYTES_MAX:
            client._socket.sendall(data)
            sent += 1
    except TimeoutError:
        return sent
    raise AssertionError(f"the broker has read {sent * len(data)} bytes and nobody reads its answers")


def test_a_websocket_that_does_not_read_its_answers_is_not_read(broker: BrokerProcess) -> None:
    before = memory_bytes(broker)
    with WebSocketClient(broker.http, "floor==$floor", context='{"floor": 0}', is_small=True) as client:
        message = client.encode('{"context": {"floor": 1}}')
        send_until_held(client, message * 1000)
        assert memory_bytes(broker) - before < SOCKETS_BYTES_MAX


def test_contexts_are_answered_when_the_websocket_reads_again(broker: BrokerProcess) -> None:
    count = 5000
    with WebSocketClient(broker.http, "floor==$floor", context='{"floor": 0}', is_small=True) as client:
        for first in range(1, count + 1, 1000):
            for floor in range(first, first + 1000):
                client.say(f'{{"context": {{"floor": {floor}}}}}')
        answers = iter(client)
        assert [next(answers)["context"]["floor"] for _ in range(count)] == list(range(1, count + 1))


def test_a_websocket_that_pings_without_reading_is_not_read(broker: BrokerProcess) -> None:
    before = memory_bytes(broker)
    with WebSocketClient(broker.http, is_small=True) as client:
        send_until_held(client, client.encode(Ping(b"x" * 120)) * 1000)
        assert memory_bytes(broker) - before < SOCKETS_BYTES_MAX


@pytest.mark.parametrize(
    "said",
    [
        pytest.param('{"context": {"floor": "' + "x" * 70_000 + '"}}', id="long"),
        pytest.param('{"context": {' + ", ".join(f'"a{number}": 1' for number in range(65)) + "}}", id="names"),
    ],
)
def test_a_context_that_is_too_large_ends_its_websocket(broker: BrokerProcess, said: str) -> None:
    with WebSocketClient(broker.http, "floor==$floor", context='{"floor": 0}') as client:
        client.say(said)
        assert client.receive()["error"]["code"] == "L624"
        assert list(client) == []
        assert client.close_code == 1008


def test_a_message_that_unpacks_to_very_much_is_refused_before_it_does(broker: BrokerProcess) -> None:
    """A megabyte of zeros needs only a kilobyte on the wire."""
    packer = zlib.compressobj(wbits=-15)
    packed = packer.compress(bytes(256 * MIB)) + packer.flush(zlib.Z_SYNC_FLUSH)[:-4]
    before = memory_bytes(broker)
    head = "Sec-WebSocket-Extensions: permessage-deflate\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    key = f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n"
    with socket.create_connection(("127.0.0.1", broker.http_port), WAIT_S) as connection:
        connection.sendall(f"GET /v1/subscribe?filter=* HTTP/1.1\r\nHost: localhost\r\n{head}{key}\r\n".encode())
        assert b"permessage-deflate" in connection.recv(4096)
        # A final text frame, compressed, with a mask of zeros.
        connection.sendall(struct.pack("!BBQI", 0xC1, 0xFF, len(packed), 0) + packed)
        assert struct.pack("!H", 1009) in read_all(connection)
    assert memory_bytes(broker) - before < 64 * MIB


# SSAP.


@pytest.mark.parametrize("said", [b"", b"<SSAP_message><node_id>KP", b" "])
def test_a_knowledge_processor_that_asks_nothing_is_closed(impatient: BrokerProcess, said: bytes) -> None:
    exchange(impatient.port, said)


def test_one_that_sends_a_byte_now_and_then_is_closed(impatient: BrokerProcess) -> None:
    with Kp(impatient) as kp:
        kp.socket.settimeout(0.1)

        def is_closed() -> bool:
            try:
                kp.socket.send(b" ")
                return kp.socket.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_closed)


def test_one_that_shows_a_wrong_token_again_and_again_is_closed(impatient: BrokerProcess) -> None:
    with Kp(impatient, "guessing") as kp:

        def is_closed() -> bool:
            try:
                refused = kp.ask("JOIN", '<parameter name="credentials">wrong</parameter>')
            except (EOFError, ConnectionError):
                return True
            assert "A502" in text_of(refused, "error")
            return False

        wait_until(is_closed)


def test_one_that_has_joined_may_be_idle_for_a_while_and_a_subscriber_for_ever(impatient: BrokerProcess) -> None:
    with Kp(impatient, "quiet") as subscriber, Kp(impatient, "quiet") as idle:
        assert status(subscriber.ask("JOIN", f'<parameter name="credentials">{TOKEN}</parameter>')) == "m3:Success"
        subscriber.ask("SUBSCRIBE", masks((ANY, ANY, ANY)))
        assert status(idle.ask("QUERY", masks(("s", ANY, ANY)))) == "m3:Success"
        assert read_all(idle.socket) == b""  # closed
        with Kp(impatient, "quiet") as writer:
            writer.ask("INSERT", graph_of("insert_graph", ("quiet", "p", "1")))
        assert b"quiet" in subscriber.socket.recv(65_536)
        with Kp(impatient, "quiet") as kp:
            assert status(kp.ask("LEAVE")) == "m3:Success"


def test_a_large_message_is_read_only_where_somebody_has_joined(impatient: BrokerProcess) -> None:
    large = graph_of("insert_graph", ("large", "p", "x" * 100_000))
    with Kp(impatient, "large") as kp:
        kp.send("INSERT", large)
        refused = kp.read()
        assert "K112" in text_of(refused, "error")
    with Kp(impatient, "large") as kp:
        assert status(kp.ask("JOIN", f'<parameter name="credentials">{TOKEN}</parameter>')) == "m3:Success"
        assert status(kp.ask("INSERT", large)) == "m3:Success"
    with Kp(impatient, "large") as kp:  # like libraries that open a connection per request
        assert status(kp.ask("INSERT", large)) == "m3:Success"
        assert status(kp.ask("LEAVE")) == "m3:Success"


# Native.


@pytest.mark.parametrize("length", [4097, 100_000, 1024 * 1024])
def test_a_first_frame_that_is_large_is_refused_by_its_header(broker: BrokerProcess, length: int) -> None:
    with RawClient(broker.native_port) as client:
        client.send(header_only(length, Kind.HELLO))
        error = client.wait_closed()
        assert error is not None
        assert error.code == "P302"


def test_the_largest_hello_is_read(broker: BrokerProcess) -> None:
    with RawClient(broker.native_port) as client:
        hello = encode_frame(Kind.HELLO, Hello(publisher="p" * 128, token="t" * 3900))
        assert len(hello) <= 16 + 4096
        client.send(hello)
        client.wait_for(Kind.WELCOME)


# HTTP.


def test_who_does_not_read_its_answer_is_closed(impatient: BrokerProcess) -> None:
    with open_client(impatient, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        before = connection_metrics(client, "connections_cut_total")["http"]
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(WAIT_S)
            connection.connect(("127.0.0.1", impatient.http_port))
            connection.sendall(b"GET /page/map.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
            wait_until(lambda: connection_metrics(client, "connections_cut_total")["http"] > before)
        wait_until(lambda: connection_metrics(client, "connections")["http"] == 1)


# Places.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, ssl.SSLContext]]:
    """Runs a broker with TLS and few connections."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "pair.pem")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    pair = str(folder / "pair.pem")
    flags = ("--tls-cert", pair, "--tls-key", pair, "--hello-timeout-s", "2")
    with BrokerProcess(*flags, "--connections-max", str(CONNECTIONS_MAX), has_knowledge=True) as process:
        yield process, trusting


@pytest.mark.parametrize("listener", ["native", "http", "ssap"])
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"], ids=["nothing", "half a hello"])
def test_handshakes_that_never_end_take_places_and_lose_them(
    small: tuple[BrokerProcess, ssl.SSLContext], listener: str, said: bytes
) -> None:
    broker, trusting = small
    port = {"native": broker.native_port, "http": broker.http_port, "ssap": broker.port}[listener]
    silent = [socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(60)]
    try:
        for connection in silent:
            connection.sendall(said) if not _is_closed(connection) else None
        wait_until(lambda: sum(not _is_closed(connection) for connection in silent) <= CONNECTIONS_MAX + SURPLUS_MAX)
        wait_until(lambda: all(_is_closed(connection) for connection in silent))
    finally:
        for connection in silent:
            connection.close()
    with open_client(broker, verify=trusting) as client:
        wait_until(lambda: connection_metrics(client, "connections")[listener] == (listener == "http"))
        assert connection_metrics(client, "connections_refused_total")[listener] >= 60 - CONNECTIONS_MAX
        assert connection_metrics(client, "connections_handshakes_failed_total")[listener] >= CONNECTIONS_MAX
    with RawClient(broker.native_port, tls=trusting) as native, Kp(broker, tls=trusting) as kp:
        native.hello()
        assert status(kp.ask("JOIN")) == "m3:Success"


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(WAIT_S)


def test_native_connections_above_the_limit_are_told_why() -> None:
    with BrokerProcess("--connections-max", "2") as broker:
        first, second = RawClient(broker.native_port), RawClient(broker.native_port)
        with first, second:
            first.hello()
            second.hello()
            with RawClient(broker.native_port) as third:
                error = third.wait_closed()
                assert error is not None
                assert error.code == "L601"
        with open_client(broker) as client:
            wait_until(lambda: connection_metrics(client, "connections")["native"] == 0)
            assert connection_metrics(client, "connections_refused_total")["native"] == 1
        with RawClient(broker.native_port) as again:
            again.hello()
