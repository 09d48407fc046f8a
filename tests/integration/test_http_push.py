"""Push over HTTP: the subscription is live once the answer arrives, deliveries are in order, and a slow reader is
treated by its policy.

Each law holds for server-sent events and for WebSockets. The kernel and uvicorn buffer some megabytes for a reader
that does not read, so these tests publish until the broker's metrics show the situation under test.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import httpx
import pytest
from broker_process import BrokerProcess
from event_stream import EventStream
from http_client import code_of, error_of, metrics, open_client, publish, wait_for_metric, wait_until
from websocket_client import Rejected, WebSocketClient

import tidegate
from tidegate.frames import HEADER_BYTES, Hello, Kind, encode_frame

Subscriber: TypeAlias = type[EventStream] | type[WebSocketClient]

BIG = "x" * 20_000
BATCH = 50
LAST = {"big": "last"}

both = pytest.mark.parametrize("subscriber", [EventStream, WebSocketClient], ids=["events", "websocket"])


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as opened:
        yield opened


class Flood:
    """Large notifications of one publisher, numbered from 1 in `big_number`."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.published = 0

    def send(self) -> httpx.Response:
        """Sends one request. A refused request does not count, so that the next `send` repeats it."""
        first = self.published + 1
        body = [{"number": first + i, "big": BIG} for i in range(BATCH)]
        response = publish(self._client, body, "flood", first)
        if response.status_code == 200:
            self.published += BATCH
        return response

    def send_until(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            self.send().raise_for_status()
            assert self.published < 10_000, "a reader that does not read has taken 200 MB"

    def finish(self) -> int:
        """Publishes the end of the flood, and returns the total number of notifications."""
        publish(self._client, LAST, "flood", self.published + 1).raise_for_status()
        return self.published + 1


def until_last(reader: EventStream | WebSocketClient) -> tuple[list[int], int]:
    """Reads until the end of the flood. Returns the numbers received, and how many the reader was told it missed."""
    numbers: list[int] = []
    missing = 0
    for event in reader:
        if "gap" in event:
            missing += event["gap"]
        elif event["notification"] == LAST:
            return numbers, missing
        else:
            numbers.append(event["notification"]["number"])
    raise AssertionError("the stream ended before the flood")


# Subscribing.


@both
def test_it_is_live_when_the_answer_is_there(
    broker: BrokerProcess, client: httpx.Client, subscriber: Subscriber
) -> None:
    for number in range(20):
        with subscriber(broker.http, f"live=={number}") as reader:
            publish(client, {"live": number}, f"live-{subscriber.__name__}", number + 1)
            assert reader.receive() == {
                "notification": {"live": number},
                "publisher": f"live-{subscriber.__name__}",
                "sequence": number + 1,
            }


@both
def test_only_what_matches_arrives(broker: BrokerProcess, client: httpx.Client, subscriber: Subscriber) -> None:
    with subscriber(broker.http, "NO2>200;station^=2807") as reader:
        publish(client, [{"NO2": 212}, {"NO2": 150, "station": "28079004"}, {"NO2": 212, "station": "28079004"}])
        assert reader.receive()["notification"] == {"NO2": 212, "station": "28079004"}


@both
@pytest.mark.parametrize("end", ["\n", "\r\n\r\n", "data: no", "\u2028", '"'])
def test_no_text_breaks_the_framing(
    broker: BrokerProcess, client: httpx.Client, subscriber: Subscriber, end: str
) -> None:
    with subscriber(broker.http, "text") as reader:
        publish(client, [{"text": f"a{end}{end}b"}, {"text": "c"}])
        assert [reader.receive()["notification"]["text"] for _ in range(2)] == [f"a{end}{end}b", "c"]


REFUSED = [
    pytest.param("NO2>", "block", (400, "F102"), id="filter"),
    pytest.param("", "block", (400, "F101"), id="no filter"),
    pytest.param("NO2 = 7", "block", (400, "F106"), id="operator"),
    pytest.param("*", "drop-newest", (400, "P311"), id="policy"),
]


@pytest.mark.parametrize(("text", "policy", "code"), REFUSED)
def test_events_are_refused_before_they_begin(
    client: httpx.Client, text: str, policy: str, code: tuple[int, str]
) -> None:
    response = client.get("/v1/stream", params={"filter": text, "policy": policy})
    assert code_of(response) == code
    assert ("column" in error_of(response)) == code[1].startswith("F")


@pytest.mark.parametrize(("text", "policy", "code"), REFUSED)
def test_a_websocket_is_refused_before_the_upgrade(
    broker: BrokerProcess, text: str, policy: str, code: tuple[int, str]
) -> None:
    with pytest.raises(Rejected) as refused, WebSocketClient(broker.http, text, policy):
        pass
    assert code_of(refused.value.response) == code
    assert ("column" in error_of(refused.value.response)) == code[1].startswith("F")


def test_a_websocket_on_another_path_is_refused(broker: BrokerProcess) -> None:
    with pytest.raises(Rejected) as refused, WebSocketClient(broker.http, path="/v1/stream"):
        pass
    assert code_of(refused.value.response) == (404, "P318")


def test_a_plain_request_is_told_of_the_upgrade(client: httpx.Client) -> None:
    response = client.get("/v1/subscribe", params={"filter": "*"})
    assert code_of(response) == (426, "P321")
    assert response.headers["upgrade"] == "websocket"


# Leaving.


@both
def test_leaving_ends_the_subscription(broker: BrokerProcess, client: httpx.Client, subscriber: Subscriber) -> None:
    with subscriber(broker.http, "*"), subscriber(broker.http, "*"):
        assert metrics(client)["subscriptions"] == 2
    wait_for_metric(client, "subscriptions", 0)
    wait_for_metric(client, "sessions", 0)


def test_a_goodbye_is_answered(broker: BrokerProcess, client: httpx.Client) -> None:
    with WebSocketClient(broker.http) as reader:
        publish(client, {"still": "here"})
        assert reader.receive()["notification"] == {"still": "here"}
        reader.close()
    wait_for_metric(client, "subscriptions", 0)


@both
def test_a_slow_reader_that_leaves_ends_its_subscription(subscriber: Subscriber) -> None:
    with BrokerProcess("--outbox-notifications-max", "100") as broker, open_client(broker) as client:
        with subscriber(broker.http, "big", is_small=True):
            Flood(client).send_until(lambda: metrics(client)["deliveries_dropped_total"] > 0)
        wait_for_metric(client, "subscriptions", 0)
        wait_for_metric(client, "outbox_bytes", 0)


# Slow readers.


@pytest.fixture
def strict_broker() -> Iterator[BrokerProcess]:
    """Runs a broker with small outboxes, where a subscriber may block for long."""
    with BrokerProcess("--outbox-notifications-max", "100", "--block-s", "60") as process:
        yield process


@both
def test_drop_oldest_says_how_many_are_missing(strict_broker: BrokerProcess, subscriber: Subscriber) -> None:
    with (
        open_client(strict_broker) as client,
        ThreadPoolExecutor() as threads,
        subscriber(strict_broker.http, "big", "block") as witness,
        subscriber(strict_broker.http, "big", is_small=True) as slow,
    ):
        witnessed = threads.submit(until_last, witness)
        flood = Flood(client)
        flood.send_until(lambda: metrics(client)["deliveries_dropped_total"] >= 200)
        published = flood.finish()
        numbers, missing = until_last(slow)
        assert missing >= 200
        assert len(numbers) + missing + 1 == published
        assert numbers == sorted(set(numbers))
        assert witnessed.result() == (list(range(1, published)), 0)


@both
def test_disconnect_ends_the_slow_one_with_a_reason(strict_broker: BrokerProcess, subscriber: Subscriber) -> None:
    with (
        open_client(strict_broker) as client,
        ThreadPoolExecutor() as threads,
        subscriber(strict_broker.http, "big", "block") as witness,
        subscriber(strict_broker.http, "big", "disconnect", is_small=True) as slow,
    ):
        witnessed = threads.submit(until_last, witness)
        flood = Flood(client)
        flood.send_until(lambda: metrics(client)["sessions_disconnected_total"] == 1)
        published = flood.finish()
        *events, end = list(slow)
        assert end["error"]["code"] == "L603"
        numbers = [event["notification"]["number"] for event in events]
        assert numbers == list(range(1, len(numbers) + 1))
        if isinstance(slow, WebSocketClient):
            assert slow.close_code == 1008
        assert witnessed.result() == (list(range(1, published)), 0)
        wait_for_metric(client, "subscriptions", 1)


@both
def test_block_makes_the_publisher_wait_and_loses_nothing(strict_broker: BrokerProcess, subscriber: Subscriber) -> None:
    with (
        open_client(strict_broker) as client,
        open_client(strict_broker) as publishing,
        ThreadPoolExecutor() as threads,
        subscriber(strict_broker.http, "big", "block", is_small=True) as slow,
    ):
        flood = Flood(publishing)
        waiting = send_until_it_waits(flood, client, threads)
        reading = threads.submit(until_last, slow)
        assert waiting.result().status_code == 200
        published = flood.finish()
        assert reading.result() == (list(range(1, published)), 0)


def send_until_it_waits(flood: Flood, client: httpx.Client, threads: ThreadPoolExecutor) -> Future[httpx.Response]:
    """Publishes until a blocking subscriber delays a request, and returns that request."""
    request = threads.submit(flood.send)
    wait_until(lambda: request.done() or metrics(client)["outboxes_blocked"] == 1)
    if not request.done():
        return request
    request.result().raise_for_status()
    return send_until_it_waits(flood, client, threads)


def test_a_full_window_is_refused_and_the_refused_can_be_sent_again() -> None:
    flags = ("--outbox-notifications-max", "100", "--block-s", "60", "--publisher-window-bytes", "100000")
    with (
        BrokerProcess(*flags) as broker,
        open_client(broker) as client,
        open_client(broker) as publishing,
        ThreadPoolExecutor() as threads,
        EventStream(broker.http, "big", "block", is_small=True) as slow,
    ):
        flood = Flood(publishing)
        waiting = send_until_it_waits(flood, client, threads)
        refused = publish(client, {"big": "more"}, "flood", flood.published + BATCH + 1)
        assert code_of(refused) == (429, "L605")
        assert refused.headers["retry-after"] == "1"
        reading = threads.submit(until_last, slow)
        assert waiting.result().status_code == 200
        published = flood.finish()
        assert reading.result() == (list(range(1, published)), 0)


def test_an_acknowledgement_that_takes_too_long_can_be_asked_for_again() -> None:
    flags = ("--outbox-notifications-max", "100", "--block-s", "60", "--request-timeout-s", "1")
    with (
        BrokerProcess(*flags) as broker,
        open_client(broker) as client,
        ThreadPoolExecutor() as threads,
        EventStream(broker.http, "big", "block", is_small=True) as slow,
    ):
        flood = Flood(client)
        while (response := flood.send()).status_code == 200:
            pass
        assert code_of(response) == (503, "U703")
        reading = threads.submit(until_last, slow)
        wait_until(lambda: flood.send().status_code == 200)
        published = flood.finish()
        assert reading.result() == (list(range(1, published)), 0)
        wait_for_metric(client, "sessions", 1)


def test_a_publisher_that_is_taken_over_does_not_end_the_others(strict_broker: BrokerProcess) -> None:
    with (
        open_client(strict_broker) as client,
        open_client(strict_broker) as publishing,
        ThreadPoolExecutor() as threads,
        EventStream(strict_broker.http, "big", "block", is_small=True),
    ):
        waiting = send_until_it_waits(Flood(publishing), client, threads)
        take_over(strict_broker, "flood")
        assert code_of(waiting.result()) == (409, "A504")
        assert publish(client, {"small": 1}).status_code == 200
        assert publish(client, {"small": 1}, "another").status_code == 200


def take_over(broker: BrokerProcess, publisher: str) -> None:
    """Sends HELLO on the native port with the name of a publisher."""
    with socket.create_connection(("127.0.0.1", broker.native_port), 10) as connection:
        connection.sendall(encode_frame(Kind.HELLO, Hello(publisher=publisher)))
        assert len(connection.recv(HEADER_BYTES)) == HEADER_BYTES


def test_a_blocking_subscriber_that_stays_away_is_disconnected() -> None:
    flags = ("--outbox-notifications-max", "100", "--block-s", "1")
    with (
        BrokerProcess(*flags) as broker,
        open_client(broker) as client,
        EventStream(broker.http, "big", "block", is_small=True) as slow,
    ):
        Flood(client).send_until(lambda: metrics(client)["sessions_disconnected_total"] == 1)
        *_events, end = list(slow)
        assert end["error"]["code"] == "L603"


# Shutdown.


@both
def test_a_broker_that_goes_down_gives_out_what_it_acknowledged(subscriber: Subscriber) -> None:
    with (
        BrokerProcess() as broker,
        open_client(broker) as client,
        subscriber(broker.http, "big", is_small=True) as slow,
        subscriber(broker.http, "big") as idle,
    ):
        flood = Flood(client)
        flood.send_until(lambda: metrics(client)["outbox_notifications"] >= 200)
        published = flood.finish()
        broker.send(signal.SIGTERM)
        wait_until(lambda: not is_listening(broker))
        for reader in (slow, idle):
            numbers, missing = until_last(reader)
            assert (numbers, missing) == (list(range(1, published)), 0)
            assert list(reader) == []
            if isinstance(reader, WebSocketClient):
                assert reader.close_code == 1001
        assert broker.wait() == 0


def is_listening(broker: BrokerProcess) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", broker.http_port)) == 0


def is_ready(client: httpx.Client) -> bool:
    try:
        response = client.get("/readyz")
    except httpx.TransportError:
        return False
    if response.status_code == 200:
        return True
    assert code_of(response) == (503, "U702")
    return False


def test_a_broker_that_goes_down_takes_no_more() -> None:
    with (
        BrokerProcess() as broker,
        open_client(broker) as publishing,
        EventStream(broker.http, "big", is_small=True) as slow,
    ):
        flood = Flood(publishing)
        flood.send_until(lambda: metrics(publishing)["outbox_notifications"] >= 200)
        published = flood.finish()
        broker.send(signal.SIGTERM)
        wait_until(lambda: not is_ready(publishing))
        with contextlib.suppress(httpx.TransportError):  # once it no longer listens
            assert code_of(publish(publishing, {"big": "late"})) == (503, "U702")
        assert until_last(slow) == (list(range(1, published)), 0)
        assert list(slow) == []
        assert broker.wait() == 0


@both
def test_a_reader_that_never_reads_does_not_keep_the_broker_up(subscriber: Subscriber) -> None:
    with (
        BrokerProcess("--drain-s", "1") as broker,
        open_client(broker) as client,
        subscriber(broker.http, "big", is_small=True),
    ):
        Flood(client).send_until(lambda: metrics(client)["outbox_notifications"] >= 200)
        assert broker.terminate() == 0


def test_native_subscribers_get_what_was_posted_before_the_end() -> None:
    with (
        BrokerProcess() as broker,
        open_client(broker) as client,
        tidegate.connect_sync(broker.native) as native,
        native.subscribe("*") as subscription,
    ):
        assert publish(client, [{"n": i} for i in range(5000)]).status_code == 200
        broker.send(signal.SIGTERM)
        received = iter(subscription)
        assert [next(received).notification["n"] for _ in range(5000)] == list(range(5000))
        assert broker.wait() == 0
