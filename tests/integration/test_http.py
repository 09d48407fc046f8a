"""HTTP: posted notifications are delivered once and in order, or refused with a reason; the broker reports its state.

Push subscriptions, queues and bad input have their own files.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from broker_process import BrokerProcess
from event_stream import EventStream
from http_client import code_of, error_of, exchange, metrics, open_client, publish, wait_until
from openapi_spec_validator import validate

import tidegate
from tidegate import Filter

GOOD = {"NO2": 212}
PATHS = {f"/v1/{name}" for name in ("notifications", "stream", "subscribe", "why", "layers", "rates", "scale")}
PATHS |= {"/healthz", "/readyz", "/metrics", "/openapi.json"}
PATHS |= {"/v1/queues", "/v1/queues/{q}", "/v1/subscriptions", "/v1/subscriptions/{name}"}
PATHS |= {
    f"/v1/queues/{{q}}/{name}" for name in ("stats", "messages", "dequeue", "delete", "extend", "release", "redrive")
}
PATHS |= {f"/v1/queues/{{q}}/physical/{{i}}/{name}" for name in ("messages", "delete-below")}


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as opened:
        yield opened


def values(stream: EventStream, name: str, count: int) -> list[Any]:
    """Returns the attribute `name` of the next `count` deliveries."""
    return [stream.receive()["notification"][name] for _ in range(count)]


# Publishing.


def test_one_notification_and_many_arrive_in_order(broker: BrokerProcess, client: httpx.Client) -> None:
    with EventStream(broker.http, "order") as stream:
        assert publish(client, {"order": 0}).json() == {"accepted": 1}
        assert publish(client, [{"order": 1}, {"other": 1}, {"order": 2}]).json() == {"accepted": 3}
        assert values(stream, "order", 3) == [0, 1, 2]


def test_a_body_may_hold_more_than_a_batch(broker: BrokerProcess, client: httpx.Client) -> None:
    with EventStream(broker.http, "many") as stream:
        assert publish(client, [{"many": i} for i in range(10_000)]).json() == {"accepted": 10_000}
        assert values(stream, "many", 10_000) == list(range(10_000))


def test_native_and_http_see_each_other(broker: BrokerProcess, client: httpx.Client) -> None:
    with tidegate.connect_sync(broker.native) as native, native.subscribe("both") as subscription:
        publish(client, {"both": 1})
        assert next(iter(subscription)).notification == {"both": 1}
        with EventStream(broker.http, "both") as stream:
            native.publish({"both": 2})
            assert values(stream, "both", 1) == [2]


def test_a_payload_travels_as_base64(broker: BrokerProcess, client: httpx.Client) -> None:
    payload = base64.b64encode(bytes(range(256))).decode()
    with EventStream(broker.http, "photo") as stream:
        publish(client, {"photo": 1, "$payload": payload})
        assert stream.receive()["notification"] == {"photo": 1, "$payload": payload}


@pytest.mark.parametrize(
    "value",
    ["", "ñandú 🌊", "\x00", "x" * 65_535, 0, -1, 2**53, -(2**53), 0.5, -0.0, 1e300, 5e-324, True, False],
)
def test_every_value_comes_out_as_it_went_in(broker: BrokerProcess, client: httpx.Client, value: Any) -> None:
    with EventStream(broker.http, "value") as stream:
        publish(client, {"value": value})
        [received] = values(stream, "value", 1)
        assert (received, type(received)) == (value, type(value))


# Resending.


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([(1, 3), (1, 3)], id="the same"),
        pytest.param([(1, 2), (2, 2), (3, 1)], id="overlapping"),
        pytest.param([(1, 3), (2, 1)], id="a part"),
        pytest.param([(1, 1), (1, 3)], id="more than before"),
    ],
)
def test_what_is_sent_again_is_delivered_once(
    broker: BrokerProcess, client: httpx.Client, requests: list[tuple[int, int]], request: pytest.FixtureRequest
) -> None:
    publisher = request.node.name
    with EventStream(broker.http, "again") as stream:
        for first, count in requests:
            body = [{"again": first + i} for i in range(count)]
            assert publish(client, body, publisher, first).json() == {"accepted": count}
        publish(client, {"again": 4}, publisher, 4)
        deliveries = [stream.receive() for _ in range(4)]
        assert [(each["notification"]["again"], each["sequence"]) for each in deliveries] == [
            (1, 1), (2, 2), (3, 3), (4, 4),
        ]  # fmt: skip
        assert {each["publisher"] for each in deliveries} == {publisher}


def test_concurrent_resends_are_delivered_once(broker: BrokerProcess, client: httpx.Client) -> None:
    body = [{"race": i} for i in range(100)]
    with EventStream(broker.http, "race") as stream, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: publish(client, body, "racer").json(), range(16)))
        assert answers == [{"accepted": 100}] * 16
        publish(client, {"race": 100}, "racer", 101)
        assert values(stream, "race", 101) == list(range(101))


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Tidegate-Publisher": "half"}, "P313"),
        ({"Tidegate-Sequence": "1"}, "P313"),
        ({"Tidegate-Publisher": "", "Tidegate-Sequence": "1"}, "P313"),
        ({"Tidegate-Publisher": "x" * 129, "Tidegate-Sequence": "1"}, "P313"),
        ({"Tidegate-Publisher": "p", "Tidegate-Sequence": "²"}, "P313"),
        *(
            ({"Tidegate-Publisher": "p", "Tidegate-Sequence": sequence}, "P308")
            for sequence in ["", "0", "-1", "+1", "1.0", "1e3", "one", str(2**62), "0" * 19 + "1" + "9" * 5000]
        ),
    ],
)
def test_a_publisher_is_named_fully_or_not_at_all(client: httpx.Client, headers: dict[str, str], code: str) -> None:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    assert code_of(client.post("/v1/notifications", json=GOOD, headers=encoded)) == (400, code)


# All or nothing.

BAD = {
    "N201": {},
    "N202": {f"a{i}": i for i in range(65)},
    "N203": {"x" * 256: 1},
    "N204": {"$price": 1},
    "N205": {"a": None},
    "N206": {"a": "x" * 65_536},
    "N207": {"a": 2**53 + 1},
    "N209": {"a": 1, "$payload": "not base64"},
    "N211": {f"a{i}": "x" * 60_000 for i in range(5)},
}


@pytest.mark.parametrize("code", BAD)
def test_a_bad_notification_is_named_and_its_neighbours_stay_out(
    broker: BrokerProcess, client: httpx.Client, code: str
) -> None:
    with EventStream(broker.http, "whole") as stream:
        response = publish(client, [{"whole": 0}, BAD[code], {"whole": 1}, {}])
        assert code_of(response) == (422, code)
        assert "[1] of 4" in error_of(response)["message"]
        publish(client, {"whole": 2})
        assert values(stream, "whole", 1) == [2]


@pytest.mark.parametrize("bad", [{"a": [1]}, {"a": 10**30}, {"a": 1, "$payload": "?"}])
def test_the_index_counts_over_the_whole_body(client: httpx.Client, bad: dict[str, Any]) -> None:
    response = publish(client, [*([GOOD] * 4999), bad])
    assert response.status_code == 422
    assert "[4999] of 5000" in error_of(response)["message"]


def test_a_refused_body_uses_up_no_sequence(broker: BrokerProcess, client: httpx.Client) -> None:
    with EventStream(broker.http, "retry") as stream:
        assert publish(client, [{"retry": 1}, {}], "careful").status_code == 422
        assert publish(client, [{"retry": 1}, {"retry": 2}], "careful").status_code == 200
        assert values(stream, "retry", 2) == [1, 2]


# Overload. test_http_push.py tests blocking subscribers.


def test_a_client_over_its_rate_is_told_when_to_come_back() -> None:
    with (
        BrokerProcess("--rate-notifications-s", "100") as broker,
        open_client(broker) as client,
        EventStream(broker.http, "fast") as stream,
    ):
        assert publish(client, [{"fast": i} for i in range(150)]).status_code == 200
        refused = publish(client, {"fast": 150})
        assert code_of(refused) == (429, "L606")
        assert int(refused.headers["retry-after"]) >= 1
        wait_until(lambda: publish(client, {"fast": 150}).status_code == 200)
        assert values(stream, "fast", 151) == list(range(151))


# The state of the broker.


def test_it_is_healthy_and_ready(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "up"}
    assert client.get("/readyz").json() == {"status": "ready"}


def test_metrics_count_what_happens() -> None:
    with BrokerProcess() as broker, open_client(broker) as client:
        with EventStream(broker.http, "NO2>200") as first, EventStream(broker.http, "NO2") as second:
            publish(client, [{"NO2": 150}, {"NO2": 212}], "station")
            publish(client, [{"NO2": 150}, {"NO2": 212}], "station")
            publish(client, [{"NO2": None}, {"NO2": 1}])
            first.receive()
            second.receive()
            seen = metrics(client)
        expected = {
            "notifications_accepted_total": 2,
            "notifications_duplicate_total": 2,
            "notifications_refused_total": 2,
            "deliveries_total": 3,
            "deliveries_dropped_total": 0,
            "subscriptions": 2,
            "sessions": 2,
            "publishers": 1,
            "bytes_under_way": 0,
            "matches_total": 3,
            "filters": 2,
        }
        assert {name: seen[name] for name in expected} == expected
        wait_until(lambda: metrics(client)["subscriptions"] == metrics(client)["sessions"] == 0)


def test_layers_tell_the_configuration_and_the_load(client: httpx.Client) -> None:
    before = client.get("/v1/layers").json()
    publish(client, GOOD)
    after = client.get("/v1/layers").json()
    assert after["configuration"].keys() == {"access_points", "matchers", "exit_points"}
    assert after["load"].keys() == {"connection_point", "access_point", "matcher", "exit_point", "queue_point"}
    accepted = [layers["load"]["connection_point"]["accepted"] for layers in (before, after)]
    assert accepted[1] == accepted[0] + 1
    assert after["uptime_s"] >= before["uptime_s"]


@pytest.mark.parametrize("text", ["NO2>200", "NO2>200;kind==traffic,industrial", "!NO2", "station^=2807", "*"])
@pytest.mark.parametrize("notification", [{}, {"NO2": 150}, {"NO2": "high"}, {"NO2": None}, {"station": 28079004}])
def test_why_agrees_with_the_filter(client: httpx.Client, text: str, notification: dict[str, Any]) -> None:
    explained = Filter.parse(text).explain(notification)
    assert client.post("/v1/why", json={"filter": text, "notification": notification}).json() == {
        "matches": explained.matches,
        "constraints": [
            {"text": each.text, "holds": each.holds, "reason": each.reason} for each in explained.constraints
        ],
    }


def test_openapi_describes_the_routes_that_answer(broker: BrokerProcess, client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    validate(document)
    assert document["paths"].keys() == PATHS
    operations = {
        (method, path) for path, item in document["paths"].items() for method in item if method != "parameters"
    }
    for method, path in sorted(operations):
        # The head of the answer is enough, because a stream does not end.
        with client.stream(method, path.replace("{i}", "0"), params={"filter": "*"}) as response:
            assert response.status_code != 405, path
            # The answer is that the queue does not exist, which differs from an unknown path.
            assert response.status_code != 404 or error_of_stream(response)["code"] == "Q901"
            assert str(response.status_code) in document["paths"][path][method]["responses"], (method, path)
    for path in document["paths"]:
        allowed = client.request("PATCH", path)
        assert allowed.status_code == 405
        assert {method.lower() for method in allowed.headers["allow"].split(", ")} - {"head"} == {
            method for method, described in operations if described == path
        }


def error_of_stream(response: httpx.Response) -> dict[str, Any]:
    response.read()
    return error_of(response)


def test_an_old_client_without_keep_alive_is_served(broker: BrokerProcess) -> None:
    answer = exchange(broker.http_port, b"GET /healthz HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b'{"status":"up"}')
