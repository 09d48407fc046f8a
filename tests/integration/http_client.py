"""A broker's HTTP interface, as a user's program sees it: requests, errors, metrics, and invalid bytes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import httpx
from broker_process import BrokerProcess
from prometheus_client.parser import text_string_to_metric_families

WAIT_S = 30.0
# If this were smaller than a segment of the loopback interface, every read would wait for a timer of the kernel.
SMALL_BUFFER_BYTES = 256 * 1024


def open_client(broker: BrokerProcess, *, verify: ssl.SSLContext | bool = False, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=broker.http, timeout=WAIT_S, trust_env=False, verify=verify, **options)


def publish(client: httpx.Client, notifications: Any, publisher: str = "", sequence: int = 1) -> httpx.Response:
    """Posts notifications. If a name is given, posts them as that publisher, from this sequence on."""
    headers = {"Tidegate-Publisher": publisher, "Tidegate-Sequence": str(sequence)} if publisher else {}
    return client.post("/v1/notifications", json=notifications, headers=headers)


def push_query(subscription_filter: str, policy: str, name: str | None) -> dict[str, str]:
    """Returns the query of a push subscriber, for a live subscription or a durable one by its name."""
    if name is None:
        return {"filter": subscription_filter, "policy": policy}
    return {"name": name} | ({"filter": subscription_filter} if subscription_filter else {})


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Returns the error of a response, after checking the form that every error has."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() - {"column"} == {"code", "message", "remedy"}
    assert all(error.values())
    return error


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, error_of(response)["code"]


def metrics(client: httpx.Client) -> dict[str, float]:
    """Returns the broker's own samples, by name without the prefix."""
    families = text_string_to_metric_families(client.get("/metrics").raise_for_status().text)
    return {
        sample.name.removeprefix("tidegate_"): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("tidegate_")
    }


def queue_metrics(client: httpx.Client, queue: str) -> dict[str, float]:
    """Returns the samples of one queue, by name without the prefix."""
    return _labelled(client, "queue", queue, "tidegate_queue_")


def lane_metrics(client: httpx.Client, lane: str) -> dict[str, float]:
    """Returns the samples of one lane of the knowledge base, by name without the prefix."""
    return _labelled(client, "lane", lane, "tidegate_knowledge_")


def connection_metrics(client: httpx.Client, name: str) -> dict[str, float]:
    """Returns the samples of one metric of connections, by listener."""
    families = text_string_to_metric_families(client.get("/metrics").raise_for_status().text)
    return {
        sample.labels["listener"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"tidegate_{name}"
    }


def _labelled(client: httpx.Client, label: str, value: str, prefix: str) -> dict[str, float]:
    families = text_string_to_metric_families(client.get("/metrics").raise_for_status().text)
    return {
        sample.name.removeprefix(prefix): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get(label) == value
    }


def wait_until(is_so: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + wait_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.01)


def wait_for_metric(client: httpx.Client, name: str, value: float) -> None:
    wait_until(lambda: metrics(client)[name] == value)


def exchange(port: int, data: bytes) -> bytes:
    """Sends bytes, and returns everything received until the broker closes the connection."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
        with contextlib.suppress(OSError):  # even if it closes before it has read all, the answer may have arrived
            connection.sendall(data)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65_536):
            received += chunk
    return bytes(received)


def parse_response(data: bytes) -> httpx.Response:
    """Parses a response from bytes that end with the connection."""
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *lines = head.split(b"\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    return httpx.Response(int(status_line.split()[1]), headers=headers, content=body)
