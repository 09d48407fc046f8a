"""A web page can make its visitor's browser send requests: no page of another site can read or change anything.

An image tag or a link sends a GET without an Origin header, but browsers mark it with Sec-Fetch-Site. Some requests
lack that header, such as those to plain HTTP on another machine. They do no harm, because no GET changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from broker_process import BrokerProcess
from event_stream import EventStream
from http_client import code_of, exchange, open_client, parse_response, publish
from websocket_client import Rejected, WebSocketClient

PAGE = "https://dashboard.example"
IMAGE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
PATHS = [
    "/v1/stream?filter=*", "/v1/stream?name=kept&filter=*", "/v1/subscriptions", "/v1/queues", "/v1/layers",
    "/v1/rates", "/v1/sparql?query=ASK%7B%7D", "/v1/persistent?query=ASK%7B%7D", "/v1/persistent/named", "/metrics",
    "/openapi.json", "/v1/subscribe?filter=*", "/nowhere",
]  # fmt: skip


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess("--origins", PAGE, has_knowledge=True) as process:
        yield process


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as opened:
        yield opened


@pytest.mark.parametrize("site", ["cross-site", "same-site", "something-new"])
@pytest.mark.parametrize("path", PATHS)
def test_what_another_site_asks_for_is_refused(client: httpx.Client, path: str, site: str) -> None:
    assert code_of(client.get(path, headers=IMAGE | {"Sec-Fetch-Site": site})) == (403, "A503")


def test_a_header_twice_is_no_way_in(broker: BrokerProcess) -> None:
    head = b"GET /v1/layers HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    answer = exchange(broker.http_port, head + b"Sec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site\r\n\r\n")
    assert code_of(parse_response(answer)) == (403, "A503")


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_the_brokers_own_page_and_a_typed_address_pass(client: httpx.Client, site: str) -> None:
    assert client.get("/v1/layers", headers={"Sec-Fetch-Site": site}).status_code == 200
    assert publish(client, {"a": 1}).status_code == 200


def test_a_link_may_lead_to_the_page_which_holds_no_data(client: httpx.Client) -> None:
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    for path in ("/", "/page/broker.js", "/healthz", "/readyz"):
        assert client.get(path, headers=followed).status_code == 200


def test_a_configured_origin_passes_when_it_names_itself(broker: BrokerProcess, client: httpx.Client) -> None:
    script = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    assert client.get("/v1/layers", headers=script | {"Origin": PAGE}).status_code == 200
    assert code_of(client.get("/v1/layers", headers=script)) == (403, "A503")
    assert code_of(client.get("/v1/layers", headers=script | {"Origin": "https://evil.example"})) == (403, "A503")
    with WebSocketClient(broker.http, headers={"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}):
        pass


@pytest.mark.parametrize("path", ["/v1/subscribe", "/v1/persistent"])
def test_a_websocket_of_another_site_is_refused(broker: BrokerProcess, path: str) -> None:
    """Browsers always send Origin with a WebSocket, even if they send no Sec-Fetch-Site."""
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        query = {"name": "made-by-evil", "filter": "*", "query": "ASK {}"}
        with (
            pytest.raises(Rejected) as refused,
            WebSocketClient(broker.http, path=path, query=query, headers=headers),
        ):
            pass
        assert code_of(refused.value.response) == (403, "A503")


# No GET changes anything.


def test_no_get_creates_or_empties_a_named_subscription(broker: BrokerProcess, client: httpx.Client) -> None:
    for method in ("GET", "HEAD"):
        response = client.request(method, "/v1/stream", params={"name": "new", "filter": "*"})
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert code_of(client.get("/v1/stream", params={"name": "new", "filter": "*"})) == (405, "P325")
    assert code_of(client.get("/v1/subscriptions/new")) == (404, "Q901")
    client.post("/v1/subscriptions", json={"name": "full", "filter": "taken"}).raise_for_status()
    publish(client, {"taken": 1}).raise_for_status()
    assert code_of(client.get("/v1/stream", params={"name": "full"})) == (405, "P325")
    assert client.get("/v1/subscriptions/full").json()["messages"] == 1
    with EventStream(broker.http, "", name="full") as reader:
        assert reader.receive()["notification"] == {"taken": 1}


def test_no_get_creates_a_named_persistent_query(broker: BrokerProcess, client: httpx.Client) -> None:
    asked = {"name": "new", "query": "SELECT ?o { <s> <p> ?o }"}
    assert code_of(client.get("/v1/persistent", params=asked)) == (405, "P325")
    assert client.get("/v1/persistent/named").json() == {"queries": []}
    with EventStream(broker.http, path="/v1/persistent", query=asked) as reader:
        assert reader.receive()["result"] == []
    assert [each["name"] for each in client.get("/v1/persistent/named").json()["queries"]] == ["new"]


# Headers of every answer, and required headers of every request.


def test_every_answer_forbids_to_guess_its_type(broker: BrokerProcess, client: httpx.Client) -> None:
    answers = [
        *(client.get(path) for path in ("/", "/page/broker.js", "/page/none.js", "/healthz", "/metrics", "/nowhere")),
        client.get("/", headers={"If-None-Match": client.get("/").headers["etag"]}),
        client.get("/v1/layers", headers=IMAGE),
        client.get("/v1/subscribe"),
        client.post("/healthz"),
        client.post("/v1/notifications", content=b"{"),
        client.options("/v1/layers", headers={"Origin": PAGE, "Access-Control-Request-Method": "GET"}),
        parse_response(exchange(broker.http_port, b"\x16\x03\x01nonsense\r\n\r\n")),
        parse_response(exchange(broker.http_port, b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n")),
        parse_response(
            exchange(
                broker.http_port,
                b"GET /v1/subscribe HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            )
        ),
    ]
    for path in ("/v1/subscribe", "/nowhere"):
        with pytest.raises(Rejected) as refused, WebSocketClient(broker.http, path=path, query={"filter": "a>"}):
            pass
        answers.append(refused.value.response)
    with client.stream("GET", "/v1/stream?filter=*") as streamed:
        answers.append(streamed)
    shown = [(answer.status_code, answer.headers.get_list("x-content-type-options")) for answer in answers]
    assert shown == [(status, ["nosniff"]) for status, _ in shown]
    assert {status for status, _ in shown} >= {200, 304, 400, 403, 404, 405, 426, 431}


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET /healthz HTTP/1.1\r\n", (400, "P326")),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", (400, "P326")),
        (b"GET /healthz HTTP/1.0\r\nHost: localhost\r\nHost: evil.example\r\n", (400, "P326")),
        (b"POST /v1/notifications HTTP/1.1\r\nContent-Length: 0\r\n", (400, "P326")),
        (b"GET /v1/subscribe?filter=* HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n", (400, "P326")),
        (b"GET /healthz HTTP/1.1\r\nConnection: close\r\nhOST: localhost\r\n", None),
        (b"GET /healthz HTTP/1.0\r\n", None),
    ],
)
def test_a_request_names_one_host(broker: BrokerProcess, head: bytes, expected: tuple[int, str] | None) -> None:
    answer = parse_response(exchange(broker.http_port, head + b"\r\n"))
    assert answer.status_code == 200 if expected is None else code_of(answer) == expected


# Duplicate keys.


TWICE = [
    ("POST", "/v1/notifications", '{"a": 1, "a": 2}'),
    ("POST", "/v1/notifications", '[{"b": 1}, {"a": "x:y", "a": "x:y"}]'),
    ("POST", "/v1/notifications", '{"a": 1, "\\u0061": 2}'),
    ("POST", "/v1/why", '{"filter": "a", "notification": {"a": 1, "a": 2}}'),
    ("PUT", "/v1/queues/twice", '{"messages_max": 1, "messages_max": 2}'),
    ("POST", "/v1/queues/bodies/messages", '{"body": {"a": [{"b": 1, "b": 2}]}}'),
    ("POST", "/v1/queues/bodies/messages", '[{"body": 1, "headers": {"h": "1", "h": "2"}}]'),
    ("POST", "/v1/subscriptions", '{"name": "twice", "filter": "a", "filter": "b"}'),
]


@pytest.mark.parametrize(("method", "path", "body"), TWICE)
def test_a_key_twice_is_refused_as_in_the_native_protocol(
    client: httpx.Client, method: str, path: str, body: str
) -> None:
    client.put("/v1/queues/bodies", json={}).raise_for_status()
    assert code_of(client.request(method, path, content=body)) == (422, "N210")


def test_a_context_with_a_key_twice_is_refused(broker: BrokerProcess, client: httpx.Client) -> None:
    asked = {"filter": "floor==$floor", "context": '{"floor": 1, "floor": 2}'}
    assert code_of(client.get("/v1/stream", params=asked)) == (422, "N210")
    with WebSocketClient(broker.http, "floor==$floor", context='{"floor": 3}') as subscriber:
        subscriber.say('{"context": {"floor": 4, "floor": 5}}')
        assert subscriber.receive()["error"]["code"] == "N210"
