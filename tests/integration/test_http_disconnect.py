"""A client of a queue that disconnects loses no message, whenever it disconnects.

The connections are plain sockets. They are closed like those of a crash (a reset) or of a program that exits (a FIN).
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from broker_process import BrokerProcess
from http_client import SMALL_BUFFER_BYTES, open_client, publish, wait_until
from queue_client import QueueClient, post_bytes, send_dequeue

PARKED = 2000
# A lease much longer than these tests. So a message that is available again was released, and its lease did not expire.
LONG_S = 600

endings = pytest.mark.parametrize("end", ["fin", "reset"])


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as opened:
        yield opened


@pytest.fixture
def queue(client: httpx.Client) -> QueueClient:
    return QueueClient(client)


def leave(connection: socket.socket, end: str) -> None:
    if end == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def wait_parked(queue: QueueClient, count: int) -> None:
    wait_until(lambda: queue.statistics()["parked"] == count)


def first_deliveries(messages: list[dict[str, Any]]) -> list[Any]:
    """Returns the bodies, after checking that none was delivered before."""
    assert all(message["delivery"] == 1 for message in messages), messages
    return [message["body"] for message in messages]


# While the client waits.


@endings
def test_who_leaves_while_it_waits_gets_nothing(
    broker: BrokerProcess, queue: QueueClient, end: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(10):
        connection = send_dequeue(broker.http_port, queue.name, wait_s=60, visibility_s=LONG_S)
        wait_parked(queue, 1)
        leave(connection, end)
        wait_parked(queue, 0)
    queue.enqueue("for the next")
    assert first_deliveries(queue.dequeue(wait_s=0)) == ["for the next"]
    assert queue.statistics()["delivered"] == 1
    assert capfd.readouterr().err == ""


@endings
def test_the_next_in_line_is_served_at_once(broker: BrokerProcess, queue: QueueClient, end: str) -> None:
    gone = [send_dequeue(broker.http_port, queue.name, wait_s=60, visibility_s=LONG_S) for _ in range(20)]
    wait_parked(queue, 20)
    patient = send_dequeue(broker.http_port, queue.name, wait_s=60, visibility_s=LONG_S)
    wait_parked(queue, 21)
    for connection in gone:
        leave(connection, end)
    queue.enqueue("now")
    assert first_deliveries(read_messages(patient)) == ["now"]
    patient.close()


def read_messages(connection: socket.socket) -> list[dict[str, Any]]:
    """Returns the messages of an answer, from a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65_536)
    head, _, body = received.partition(b"\r\n\r\n")
    [length] = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    while len(body) < length:
        body += connection.recv(65_536)
    messages: list[dict[str, Any]] = json.loads(body)["messages"]
    return messages


@endings
def test_who_leaves_as_messages_come_loses_none(broker: BrokerProcess, queue: QueueClient, end: str) -> None:
    """The client leaves at any moment around the enqueue. If the broker cannot notice it, the lease expires."""
    chance = random.Random(3)
    for number in range(60):
        connection = send_dequeue(broker.http_port, queue.name, wait_s=60, visibility_s=0.5)
        time.sleep(chance.choice([0, 0.001, 0.003]))
        enqueue = post_bytes(f"{queue.path}/messages", {"body": number})
        with socket.create_connection(("127.0.0.1", broker.http_port)) as producer:
            producer.sendall(enqueue)
            time.sleep(chance.choice([0, 0, 0.0005, 0.001, 0.002, 0.004]))
            leave(connection, end)
            assert b'"accepted":1' in read_response(producer)
    wait_parked(queue, 0)
    taken: list[Any] = []
    while len(taken) < 60 and (messages := queue.dequeue(wait_s=2, visibility_s=LONG_S)):
        taken += [message["body"] for message in messages]
    assert sorted(taken) == list(range(60))


def read_response(connection: socket.socket) -> bytes:
    received = b""
    while b"}" not in received:
        received += connection.recv(65_536)
    return received


# While the broker answers.


@endings
def test_who_leaves_before_its_answer_is_read_gives_it_back(end: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A JSON answer is larger than all buffers, so the broker cannot have sent it completely when the client leaves."""
    with BrokerProcess() as broker, open_client(broker) as own:
        queue = QueueClient(own, physical_queues=1)
        bodies = [f"{i:05}" + "\x01" * 99_995 for i in range(39)]
        for body in bodies:
            queue.enqueue(body)
        for _ in range(3):
            connection = slow_dequeue(broker.http_port, queue.name)
            wait_until(lambda: queue.statistics()["leased"] == len(bodies))
            connection.recv(1000)
            leave(connection, end)
            wait_until(lambda: queue.statistics()["leased"] == 0)
        assert queue.statistics()["given_back"] == 3 * len(bodies)
        assert first_deliveries(queue.dequeue(wait_s=0)) == bodies
        assert broker.terminate() == 0
    assert capfd.readouterr().err == ""


def slow_dequeue(port: int, queue: str) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    connection.connect(("127.0.0.1", port))
    connection.sendall(post_bytes(f"/v1/queues/{queue}/dequeue", {"wait_s": 60, "visibility_s": LONG_S}))
    return connection


@endings
def test_who_leaves_at_once_gets_nothing(broker: BrokerProcess, queue: QueueClient, end: str) -> None:
    """The request and the end of the connection arrive together. There are messages, so the request need not wait."""
    queue.enqueue(*range(20))
    for _ in range(20):
        leave(send_dequeue(broker.http_port, queue.name, max=1, visibility_s=1), end)
    taken: list[Any] = []
    while len(taken) < 20 and (messages := queue.dequeue(wait_s=3, visibility_s=LONG_S)):
        taken += [message["body"] for message in messages]
    assert sorted(taken) == list(range(20))


@endings
@pytest.mark.parametrize("size", [1, 1_000_000])
def test_who_has_its_answer_may_close_at_once_and_keeps_its_lease(
    broker: BrokerProcess, queue: QueueClient, end: str, size: int
) -> None:
    """A command that makes one request does this."""
    for _ in range(15):
        queue.enqueue(*["x" * min(size, 100_000)] * max(1, size // 100_000))
        connection = send_dequeue(broker.http_port, queue.name, visibility_s=LONG_S)
        messages = read_messages(connection)
        leave(connection, end)
        queue.statistics()  # after this the broker has noticed the end
        assert queue.delete(messages) == {"deleted": len(messages), "stale": 0}


def test_a_client_that_stays_may_use_its_connection_again(broker: BrokerProcess, queue: QueueClient) -> None:
    queue.enqueue(1)
    with send_dequeue(broker.http_port, queue.name) as connection:
        assert first_deliveries(read_messages(connection)) == [1]
        queue.enqueue(2)
        connection.sendall(post_bytes(f"{queue.path}/dequeue", {}))
        assert first_deliveries(read_messages(connection)) == [2]


# Many clients.


def test_requests_that_wait_cost_little() -> None:
    raise_open_files()
    with BrokerProcess() as broker, open_client(broker) as client, contextlib.ExitStack() as opened:
        queue = QueueClient(client)
        before_bytes = memory_bytes(broker.pid)
        for _ in range(PARKED):
            connection = send_dequeue(broker.http_port, queue.name, wait_s=60, max=1)
            opened.enter_context(contextlib.closing(connection))
        wait_parked(queue, PARKED)
        assert (memory_bytes(broker.pid) - before_bytes) / PARKED < 64 * 1024
        misses = queue.statistics()["misses"]
        time.sleep(1)
        assert queue.statistics()["misses"] == misses, "requests that wait ask the store again and again"
        assert publish(client, {"still": "served"}).status_code == 200
        queue.enqueue(*range(100))
        wait_parked(queue, PARKED - 100)
        opened.close()
        wait_parked(queue, 0)
        assert queue.statistics()["messages"] == 100


def raise_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 3 * PARKED:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(3 * PARKED, hard), hard))


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
