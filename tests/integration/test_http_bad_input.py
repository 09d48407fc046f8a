"""Whatever bytes arrive on the HTTP port, the answer is an error with a remedy, and the broker serves other clients."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from broker_process import BrokerProcess
from event_stream import EventStream
from http_client import (
    WAIT_S,
    code_of,
    error_of,
    exchange,
    metrics,
    open_client,
    parse_response,
    publish,
    read_all,
    wait_for_metric,
    wait_until,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from websocket_client import Rejected, WebSocketClient

from tidegate.errors import TidegateError
from tidegate.layers.batch import BatchReader
from tidegate.listeners.http.publish import encode_batches, parse_notifications
from tidegate.notification import check

BODY_BYTES_MAX = 100_000


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess("--body-bytes-max", str(BODY_BYTES_MAX)) as process:
        yield process


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _what_was_accepted_before_is_delivered(broker: BrokerProcess, client: httpx.Client) -> Iterator[None]:
    """Checks around every test of this file that a subscriber loses nothing through bad input of others."""
    with EventStream(broker.http, "before") as stream:
        assert publish(client, {"before": 1}).status_code == 200
        yield
        assert publish(client, {"before": 2}).status_code == 200
        assert [stream.receive()["notification"]["before"] for _ in range(2)] == [1, 2]


# Bodies.

NOT_JSON = [
    b"", b" ", b"{", b"}", b'{"a"', b'{"a":}', b'{"a":1,}', b"{'a':1}", b'{"a":1} x', b'{"a":1}{"a":1}', b"[{},",
    b"nul", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":1e400}', b'{"a":01}', b'{"a":.5}',
    b'{"a":+1}', b'{"a":"\\ud800"}', b'{"a":"\\udc00\\ud800"}', b'{"\\udfff":1}', b'{"a":"\\x"}', b'{"a":"\n"}',
    b'{"a":"\xff"}', b'{"\xc3\x28":1}', b'{"a":"\xed\xa0\x80"}', b"\xff\xfe{\x00", b'\xef\xbb\xbf{"a":1}', b"\x00",
    b"[" * 50_000, b'{"a":' * 10_000, b"a=1&b=2", b"\x81\xa1a\x01",
    b'{"a":' + b"9" * 10_000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("body", NOT_JSON, ids=lambda body: repr(body[:24]))
def test_what_is_not_json_is_refused(client: httpx.Client, body: bytes) -> None:
    assert code_of(client.post("/v1/notifications", content=body)) == (400, "P314")
    assert code_of(client.post("/v1/why", content=body)) == (400, "P317")


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "a", [], [1], [None], [[]], [{"a": 1}, 2], [[{"a": 1}]]])
def test_what_is_no_notification_is_refused(client: httpx.Client, value: Any) -> None:
    assert code_of(client.post("/v1/notifications", content=json.dumps(value))) == (400, "P315")


@pytest.mark.parametrize(
    ("notification", "code"),
    [
        ({}, "N201"),
        ({"": 1}, "N203"),
        ({"ñ" * 128: 1}, "N203"),
        ({"$other": 1}, "N204"),
        ({"a": None}, "N205"),
        ({"a": []}, "N205"),
        ({"a": {"b": 1}}, "N205"),
        ({"a": "ñ" * 32_768}, "N206"),
        ({"a": 2**53 + 1}, "N207"),
        ({"a": -(2**53) - 1}, "N207"),
        ({"a": 2**63}, "N207"),
        ({"a": 2**64}, "N207"),
        ({"a": -(2**63) - 1}, "N207"),
        ({"a": 10**300}, "N207"),
        ({"a": 1, "$payload": "a"}, "N209"),
        ({"a": 1, "$payload": "ñ==="}, "N209"),
        ({"a": 1, "$payload": 7}, "N209"),
        ({"a": 1, "$payload": None}, "N209"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_notification_that_breaks_the_rules_is_refused(client: httpx.Client, notification: Any, code: str) -> None:
    assert code_of(publish(client, notification)) == (422, code)


@pytest.mark.parametrize("depth", [10, 100, *range(900, 1001, 5), 5000])
def test_nesting_of_any_depth_is_refused(client: httpx.Client, depth: int) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        nested = '{"a":' + opening * depth + "1" + closing * depth + "}"
        response = client.post("/v1/notifications", content=nested)
        assert code_of(response) in ((422, "N205"), (400, "P314"))


@pytest.mark.parametrize(
    "question",
    [{}, [], {"filter": "*"}, {"notification": {}}, {"filter": 1, "notification": {}},
     {"filter": "*", "notification": 1}, {"filter": "*", "notification": {"a": []}},
     {"filter": "*", "notification": {}, "more": 1}],
)  # fmt: skip
def test_a_question_of_the_wrong_shape_is_refused(client: httpx.Client, question: Any) -> None:
    assert code_of(client.post("/v1/why", json=question)) == (400, "P317")


@pytest.mark.parametrize("text", ["", "NO2>", "NO2 = 1", "(a)", "a==1 or b==2", "a" * 5000, "a==1;" * 40])
def test_a_bad_filter_is_refused_with_its_column(client: httpx.Client, text: str) -> None:
    for response in (
        client.post("/v1/why", json={"filter": text, "notification": {}}),
        client.get("/v1/stream", params={"filter": text}),
    ):
        assert response.status_code == 400
        assert error_of(response)["code"].startswith("F")
        assert error_of(response)["column"] >= 1


# Size.


@pytest.mark.parametrize("path", ["/v1/notifications", "/v1/why"])
def test_a_body_over_the_limit_is_refused(client: httpx.Client, path: str) -> None:
    body = b'{"a":"' + b"x" * (3 * BODY_BYTES_MAX) + b'"}'
    pieces = (body[i : i + 10_000] for i in range(0, len(body), 10_000))
    assert code_of(client.post(path, content=body)) == (413, "P316")
    assert code_of(client.post(path, content=pieces)) == (413, "P316")
    assert client.get("/healthz").status_code == 200


def test_a_body_at_the_limit_is_taken(client: httpx.Client) -> None:
    body = b'[{"a":"' + b"x" * 60_000 + b'"}]'
    assert client.post("/v1/notifications", content=body.ljust(BODY_BYTES_MAX)).status_code == 200
    assert client.post("/v1/notifications", content=body.ljust(BODY_BYTES_MAX + 1)).status_code == 413


def test_an_announced_giant_is_refused_unread(broker: BrokerProcess) -> None:
    request = b"POST /v1/notifications HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", broker.http_port), WAIT_S) as connection:
        connection.sendall(request)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /healthz?" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", id="a long path"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", id="a long header"),
        pytest.param(b"GET /healthz HTTP/1.1\r\n" + b"X: x\r\n" * 20_000 + b"\r\n", id="many headers"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 1_000_000, id="a header without end"),
        pytest.param(b"GET /" + b"x" * 1_000_000, id="a path without end"),
    ],
)
def test_a_head_over_the_limit_is_refused(broker: BrokerProcess, head: bytes) -> None:
    assert code_of(parse_response(exchange(broker.http_port, head))) == (431, "P320")


def test_a_websocket_with_a_giant_head_is_refused(broker: BrokerProcess) -> None:
    with pytest.raises(Rejected) as refused, WebSocketClient(broker.http, headers={"X": "x" * 70_000}):
        pass
    assert code_of(refused.value.response) == (431, "P320")


def test_a_head_below_the_limit_is_served(client: httpx.Client) -> None:
    assert client.get("/healthz", headers={"X": "x" * 60_000}).status_code == 200


# Requests.


@pytest.mark.parametrize(
    "path", ["/page", "/v1", "/v1/", "/v1/layers/", "/v1/nothing", "/v2/layers", "/healthz/x", "/%00", "/ñ"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_unknown_path_is_named(client: httpx.Client, method: str, path: str) -> None:
    assert code_of(client.request(method, path)) == (404, "P318")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/notifications"), ("PUT", "/v1/notifications"), ("PUT", "/v1/stream"), ("DELETE", "/v1/layers"),
     ("POST", "/healthz"), ("OPTIONS", "/v1/notifications"), ("BREW", "/v1/layers")],
)  # fmt: skip
def test_a_wrong_method_is_told_the_right_one(client: httpx.Client, method: str, path: str) -> None:
    if method == "BREW":  # the parser accepts only registered methods
        assert code_of(client.request(method, path)) == (400, "P319")
        return
    response = client.request(method, path)
    assert code_of(response) == (405, "P318")
    assert response.headers["allow"]


@pytest.mark.parametrize("host", ["[", "]", "[::1", "x:y:z", "a b"])
def test_a_strange_host_is_refused(broker: BrokerProcess, host: str) -> None:
    for path in ("/nothing", "/v1/layers/", "/healthz"):
        request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        assert code_of(parse_response(exchange(broker.http_port, request))) == (403, "A506")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x00" * 100, id="zeros"),
        pytest.param(b"\x00" * 100_000, id="more zeros than a head may have"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="a TLS hello"),
        pytest.param(b"GET\r\n\r\n", id="no path"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="a version to come"),
        pytest.param(b"GET /\xff HTTP/1.1\r\n\r\n", id="a path of bytes"),
        pytest.param(b"GET http://[ HTTP/1.1\r\n\r\n", id="a malformed address"),
        pytest.param(b"CONNECT localhost:80 HTTP/1.1\r\n\r\n", id="a proxy request"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", id="a negative length"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", id="a length over 64 bits"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", id="two lengths"),
        pytest.param(b"GET / HTTP/1.1\r\nbad header\r\n\r\n", id="a header without colon"),
        pytest.param(b"GET / HTTP/1.1\nHost: x\n\n\x01\x02", id="bare line ends"),
    ],
)
def test_what_is_no_request_is_refused(broker: BrokerProcess, data: bytes) -> None:
    assert code_of(parse_response(exchange(broker.http_port, data))) == (400, "P319")


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", b"5\r\nabcdefgh\r\n"])
def test_a_malformed_chunk_is_refused(broker: BrokerProcess, chunk: bytes) -> None:
    head = b"POST /v1/notifications HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert code_of(parse_response(exchange(broker.http_port, head + chunk))) == (400, "P319")


def test_a_request_that_offers_http_2_is_served_by_http_1(broker: BrokerProcess) -> None:
    """Java's client offers HTTP/2 with every request."""
    body = b'{"a":1}'
    request = b"POST /v1/notifications HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
    request += b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\nContent-Length: 7\r\n\r\n"
    answer = parse_response(exchange(broker.http_port, request + body))
    assert (answer.status_code, answer.json()) == (200, {"accepted": 1})


def test_leaving_in_the_middle_costs_nothing_and_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    head = b"POST /v1/notifications HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    upgrade = b"GET /v1/subscribe?filter=* HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    with BrokerProcess() as broker, open_client(broker) as client:
        for data in (
            b"",
            b"GET",
            head,
            head + b'{"a":',
            b"GET /v1/stream?filter=* HTTP/1.1\r\nHost: localhost\r\n\r\n",
            upgrade,
            upgrade + b"\r\n",
        ):
            with socket.create_connection(("127.0.0.1", broker.http_port), WAIT_S) as connection:
                connection.sendall(data)
        wait_for_metric(client, "sessions", 0)
        assert broker.terminate() == 0
    assert capfd.readouterr().err == ""


# Timeouts and numbers of connections.


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: local", id="half a head"),
        pytest.param(
            b"POST /v1/notifications HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", id="half a body"
        ),
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", id="one request and no more"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n", id="one request and an empty line"),
    ],
)
def test_who_sends_no_request_is_closed(impatient: BrokerProcess, data: bytes) -> None:
    exchange(impatient.http_port, data)


def test_who_sends_a_byte_now_and_then_is_closed(impatient: BrokerProcess) -> None:
    head = b"GET /healthz HTTP/1.1\r\nX: "
    with socket.create_connection(("127.0.0.1", impatient.http_port), WAIT_S) as connection:
        connection.sendall(head)
        connection.settimeout(0.1)

        def is_closed() -> bool:
            try:
                connection.send(b"x")
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_closed)


@pytest.fixture(scope="module")
def impatient() -> Iterator[BrokerProcess]:
    with BrokerProcess("--request-timeout-s", "1") as process:
        yield process


def test_a_stream_outlives_the_time_for_a_request(impatient: BrokerProcess) -> None:
    with (
        open_client(impatient) as client,
        EventStream(impatient.http, "late") as stream,
        WebSocketClient(impatient.http, "late") as messages,
    ):
        exchange(impatient.http_port, b"")  # takes as long as a request may take
        exchange(impatient.http_port, b"")
        publish(client, {"late": 1})
        assert stream.receive()["notification"] == messages.receive()["notification"] == {"late": 1}


def test_more_connections_than_allowed_are_refused_until_one_ends() -> None:
    with BrokerProcess("--connections-max", "3") as broker, open_client(broker) as client:
        with EventStream(broker.http, "*"), EventStream(broker.http, "*"):
            assert client.get("/healthz").status_code == 200
            with open_client(broker) as fourth:
                refused = fourth.get("/healthz")
                assert code_of(refused) == (503, "L601")
                assert int(refused.headers["retry-after"]) >= 1
            with pytest.raises(Rejected) as rejected, WebSocketClient(broker.http):
                pass
            assert code_of(rejected.value.response) == (503, "L601")
            assert client.get("/healthz").status_code == 200
        wait_for_metric(client, "sessions", 0)
        with open_client(broker) as again:
            assert publish(again, {"a": 1}).status_code == 200


# Random input.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just("$payload"), inner, max_size=4),
    max_leaves=12,
)
scalars = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.booleans()
likely = st.lists(st.dictionaries(st.text(min_size=1) | st.just("$payload"), scalars, max_size=4), max_size=4)
reader = BatchReader()


def read(body: bytes) -> None:
    """Reads a body as the endpoint does: into batches of valid notifications, or an error with a remedy."""
    try:
        notifications = parse_notifications(body)
        batches = encode_batches(reader, "fuzz", 1, notifications)
    except TidegateError as error:
        json.dumps(error.to_dict()).encode()
    else:
        read_back = [notification for batch in batches for notification in batch.notifications()]
        assert read_back == notifications
        for notification in notifications:
            check(notification)


@given(st.binary())
@settings(max_examples=500, deadline=None)
@example(b'{"a":"\\ud83c\\udf0a"}')
def test_any_bytes_are_batches_or_an_error(body: bytes) -> None:
    read(body)


@given(json_values | likely)
@settings(max_examples=500, deadline=None)
def test_any_json_is_batches_or_an_error(value: Any) -> None:
    read(json.dumps(value).encode())


@given(likely, st.integers(0), st.binary(min_size=1, max_size=3))
@settings(max_examples=500, deadline=None)
def test_any_damaged_json_is_batches_or_an_error(value: Any, place: int, damage: bytes) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    place %= len(body)
    read(body[:place] + damage + body[place + len(damage) :])


REQUESTS = [
    b'POST /v1/notifications HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nConnection: close\r\n\r\n{"NO2":1}',
    b'POST /v1/notifications HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{"NO2":1}\r\n0\r\n\r\n',
    b"POST /v1/notifications HTTP/1.1\r\nHost: localhost\r\nTidegate-Publisher: p\r\nTidegate-Sequence: 1\r\n\r\n",
    b"GET /v1/stream?filter=NO2%3E200&policy=block HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n\r\n",
    (
        b"GET /v1/subscribe?filter=* HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n\x81\x85abcdefghi"
    ),
]  # fmt: skip


def damage(request: bytes, chance: random.Random) -> bytes:
    data = bytearray(request)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[place] = chance.randrange(256)
            case 1:
                del data[place : place + chance.randint(1, 20)]
            case 2:
                data[place:place] = chance.randbytes(chance.randint(1, 20))
            case 3:
                data[place:place] = data[: chance.randrange(len(data))]
        if not data:
            return b""
    return bytes(data)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_requests_and_noise_leave_a_healthy_broker(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(seed)
    with BrokerProcess() as broker, open_client(broker) as client:
        for _ in range(150):
            is_noise = chance.random() < 0.2
            data = chance.randbytes(chance.randint(1, 2000)) if is_noise else damage(chance.choice(REQUESTS), chance)
            with socket.create_connection(("127.0.0.1", broker.http_port), WAIT_S) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = read_all(connection)
            assert b"HTTP/1.1 500" not in answer, data
        assert publish(client, {"still": "up"}).status_code == 200
        wait_until(lambda: metrics(client)["sessions"] == metrics(client)["subscriptions"] == 0)
        assert broker.terminate() == 0
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (400, "P346")),
        ({"matchers": 0}, (400, "P322")),
        ({"matchers": 65}, (400, "P322")),
        ({"matchers": "2"}, (400, "P322")),
        ({"matcher": 2}, (400, "P322")),
    ],
)
def test_wrong_wishes_for_layers_are_refused(
    client: httpx.Client, body: dict[str, object], expected: tuple[int, str]
) -> None:
    assert code_of(client.post("/v1/scale", json=body)) == expected
