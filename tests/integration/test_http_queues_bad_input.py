"""Whatever is sent to a queue, the answer is an error with a remedy, and no accepted message is lost."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from broker_process import BrokerProcess
from http_client import WAIT_S, code_of, error_of, open_client
from hypothesis import example, given, settings
from hypothesis import strategies as st
from queue_client import QueueClient, post_bytes

from tidegate.listeners.http.json_message import LEVELS_MAX, body_json
from tidegate.messages import MESSAGE_BYTES_MAX

ACTIONS = ("messages", "dequeue", "delete", "extend", "release", "redrive", "physical/0/delete-below")
BODY_BYTES_MAX = 1_000_000
KEPT = list(range(5))


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess("--body-bytes-max", str(BODY_BYTES_MAX)) as process:
        yield process


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as opened:
        yield opened


@pytest.fixture
def queue(broker: BrokerProcess, client: httpx.Client) -> Iterator[QueueClient]:
    """Yields a queue with some messages, one of them leased. Checks after the test that all exist, and deletes them."""
    queue = QueueClient(client)
    queue.enqueue(*KEPT)
    leased = queue.dequeue(max=1)
    yield queue
    assert broker.is_up()
    assert queue.delete(leased) == {"deleted": 1, "stale": 0}
    assert sorted([*queue.take_all(), leased[0]["body"]]) == KEPT


# Names.


@pytest.mark.parametrize("name", ["none", "none.dead", "subscription.none", "%00", "ñ", "a b", "x" * 1000])
def test_an_unknown_queue_is_named(client: httpx.Client, name: str) -> None:
    path = f"/v1/queues/{name}"
    bodies = {"messages": {"body": 1}, "physical/0/delete-below": {"sequence": 1}}
    settled: dict[str, Any] = {action: {"receipts": []} for action in ("delete", "extend", "release")}
    answers = [client.post(f"{path}/{action}", json=(bodies | settled).get(action, {})) for action in ACTIONS]
    answers += [client.get(path), client.get(f"{path}/stats"), client.get(f"{path}/physical/0/messages")]
    assert {code_of(answer) for answer in answers} == {(404, "Q901")}


@pytest.mark.parametrize("name", ["a.b", "x.dead", "subscription.x", "a b", "ñ", "x" * 101, "%00", "%0A", "a%0A"])
def test_a_bad_name_makes_no_queue(client: httpx.Client, name: str) -> None:
    assert code_of(client.put(f"/v1/queues/{name}")) == (422, "Q902")
    decoded = httpx.URL(f"http://x/{name}").path[1:]
    assert code_of(client.post("/v1/subscriptions", json={"name": decoded, "filter": "a"})) == (422, "Q902")


@pytest.mark.parametrize(
    "path", ["/v1/queues/", "/v1/queues//stats", "/v1/queues/a/b", "/v1/queues/a/physical/0", "/v1/queues/a%2Fb"]
)
def test_a_path_that_leads_nowhere_is_named(client: httpx.Client, path: str) -> None:
    assert code_of(client.get(path)) == (404, "P318")


def test_dead_letters_are_not_dropped_alone(client: httpx.Client, queue: QueueClient) -> None:
    assert code_of(client.delete(f"{queue.path}.dead")) == (422, "Q902")
    assert code_of(client.post(f"{queue.path}.dead/redrive")) == (404, "Q901")


# Settings.


@pytest.mark.parametrize(
    "given_settings",
    [[], 1, "x", None, {"unknown": 1}, {"physical_queues": 0}, {"physical_queues": 65}, {"physical_queues": "4"},
     {"physical_queues": 10**30}, {"method": "fifo"}, {"durability": "paper"}, {"messages_max": 0}, {"bytes_max": -1},
     {"max_deliveries": -1}, {"linger_s": -0.1}, {"sleep_s": 0}, {"policy": "disconnect"}, {"filter": 7}],
    ids=repr,
)  # fmt: skip
def test_bad_settings_are_refused(client: httpx.Client, given_settings: Any) -> None:
    assert code_of(client.put("/v1/queues/unmade", content=json.dumps(given_settings))) == (422, "Q903")
    assert code_of(client.get("/v1/queues/unmade")) == (404, "Q901")


def test_a_bad_filter_is_refused_with_its_column(client: httpx.Client) -> None:
    for response in (
        client.put("/v1/queues/unmade", json={"filter": "NO2>"}),
        client.post("/v1/subscriptions", json={"name": "unmade", "filter": "NO2>"}),
        client.post("/v1/stream", params={"name": "unmade", "filter": "NO2>"}),
    ):
        assert code_of(response) == (400, "F102")
        assert error_of(response)["column"] >= 1


@pytest.mark.parametrize(
    ("asked", "code"),
    [({}, (400, "P322")), ({"name": "s"}, (400, "P322")), ({"filter": "a"}, (400, "P322")), ([], (400, "P322")),
     ({"name": 1, "filter": "a"}, (400, "P322")), ({"name": "s", "filter": None}, (400, "P322")),
     ({"name": "s", "filter": "a", "more": 1}, (400, "P322")), ({"name": "", "filter": "a"}, (422, "Q902")),
     ({"name": "s", "filter": "a", "policy": "disconnect"}, (422, "Q903"))],
    ids=repr,
)  # fmt: skip
def test_a_bad_subscription_is_refused(client: httpx.Client, asked: Any, code: tuple[int, str]) -> None:
    assert code_of(client.post("/v1/subscriptions", json=asked)) == code
    assert code_of(client.get("/v1/subscriptions/s")) == (404, "Q901")


# Bodies.

NOT_JSON = [
    b" ", b"{", b"}", b'{"body":}', b'{"body":1,}', b"{'body':1}", b'{"body":1} x', b"nul", b'{"body":NaN}',
    b'{"body":Infinity}', b'{"body":-Infinity}', b'{"body":1e400}', b'{"body":01}', b'{"body":"\\ud800"}',
    b'{"body":"\xff"}', b'{"\xc3\x28":1}', b"\xff\xfe{\x00", b"\x00", b"[" * 50_000, b'{"body":' * 10_000,
    b'{"body":' + b"[" * 100_000, b"body=1", b"\x81\xa4body\x01", b'{"body":' + b"9" * 10_000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("body", NOT_JSON, ids=lambda body: repr(body[:24]))
def test_what_is_not_json_is_refused(client: httpx.Client, queue: QueueClient, body: bytes) -> None:
    for action in ACTIONS:
        assert code_of(client.post(f"{queue.path}/{action}", content=body)) == (400, "P322"), action
    assert client.put(queue.path, content=body).status_code in (400, 422)
    assert code_of(client.post("/v1/subscriptions", content=body)) == (400, "P322")


SHAPES: dict[str, list[Any]] = {
    "messages": [1, "x", None, {}, [1], [[]], [None], {"body": 1, "other": 1}, {"body": 1, "group": 1}, {"group": "g"},
                 {"body": 1, "device": None}, {"body": 1, "sequence": "1"}, {"body": 1, "sequence": 1.5},
                 {"body": 1, "headers": []}, {"body": 1, "headers": {"a": 1}}, [{"body": 1}, {"bodi": 2}]],
    "dequeue": [1, [], None, {"max": "1"}, {"max": 1.5}, {"max": None}, {"wait_s": "1"}, {"timeout": 1}],
    "delete": [1, [], {}, {"receipts": "x"}, {"receipts": [1]}, {"receipts": [None]}, {"receipts": [], "more": 1}],
    "extend": [{}, {"receipts": [], "visibility_s": "1"}],
    "release": [{}, {"receipts": [], "delay_s": None}],
    "redrive": [1, [], {"max": "1"}, {"more": 1}],
    "physical/0/delete-below": [1, [], {}, {"sequence": "1"}, {"sequence": None}, {"sequence": 1, "more": 1}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("action", "body"), [(action, body) for action, bodies in SHAPES.items() for body in bodies], ids=repr
)
def test_a_body_of_the_wrong_shape_is_refused(queue: QueueClient, action: str, body: Any) -> None:
    assert code_of(queue.post(action, body)) == (400, "P322")


@pytest.mark.parametrize(
    ("body", "field"),
    [({"body": 1, "grup": "g"}, "grup"), ([{"body": 1}, {"body": 1, "sequence": "x"}], "$[1].sequence"), ({}, "body")],
)
def test_the_wrong_field_is_named(queue: QueueClient, body: Any, field: str) -> None:
    assert field in error_of(queue.post("messages", body))["message"]


@pytest.mark.parametrize("depth", [1, 99, 100, 101, 500, *range(900, 1001, 5), 5000])
def test_nesting_is_kept_or_refused(client: httpx.Client, depth: int) -> None:
    queue = QueueClient(client)
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        nested = opening * depth + "1" + closing * depth
        response = client.post(f"{queue.path}/messages", content=f'{{"body":{nested}}}')
        if depth > LEVELS_MAX:
            assert code_of(response) in ((422, "Q905"), (400, "P322"))
        else:
            [message] = queue.dequeue(wait_s=0)
            assert message["body"] == json.loads(nested)
            queue.delete([message])


# Messages.

LONG = "x" * 257
RULES = {
    "an integer over 64 bits": {"body": 2**64},
    "one below": {"body": -(2**63) - 1},
    "one inside": {"body": {"a": [10**30]}},
    "a giant": {"body": "x" * MESSAGE_BYTES_MAX},
    "a long group": {"body": 1, "group": LONG},
    "a long device": {"body": 1, "device": LONG},
    "a negative sequence": {"body": 1, "device": "d", "sequence": -1},
    "a sequence over 63 bits": {"body": 1, "device": "d", "sequence": 2**63},
    "many headers": {"body": 1, "headers": {str(i): "" for i in range(33)}},
    "a long header": {"body": 1, "headers": {"a": "x" * 1024}},
}


@pytest.mark.parametrize("message", RULES.values(), ids=RULES)
def test_a_message_that_breaks_the_rules_is_named_and_its_neighbours_stay_out(
    queue: QueueClient, message: dict[str, Any]
) -> None:
    response = queue.post("messages", [{"body": "in"}, message, {"body": "in"}])
    assert code_of(response) == (422, "Q905")
    assert "[1]" in error_of(response)["message"]


def test_too_many_messages_are_refused(queue: QueueClient) -> None:
    assert code_of(queue.post("messages", [{"body": 1}] * 10_001)) == (422, "Q906")


def test_no_messages_are_no_mistake(queue: QueueClient) -> None:
    assert queue.post("messages", []).json() == {"accepted": 0, "duplicates": 0, "durability": "fsync"}


def test_a_body_over_the_limit_is_refused(queue: QueueClient) -> None:
    for action in ACTIONS:
        response = queue.client.post(f"{queue.path}/{action}", content=b" " * (BODY_BYTES_MAX + 1))
        assert code_of(response) == (413, "P316")


# Limits.


@pytest.mark.parametrize(
    ("action", "body"),
    [
        *(("dequeue", {name: value}) for name, value in (
            ("max", 0), ("max", -1), ("max", 10_001), ("max", 10**30), ("min", 0), ("min", 101), ("min", -1),
            ("wait_s", -1), ("wait_s", 3601), ("wait_s", 1e308), ("visibility_s", -0.1), ("visibility_s", 50_000))),
        ("extend", {"receipts": [], "visibility_s": -1}),
        ("extend", {"receipts": [], "visibility_s": 1e300}),
        ("release", {"receipts": [], "delay_s": -1}),
        ("release", {"receipts": [], "delay_s": 50_000}),
        *(("redrive", {"max": value}) for value in (0, -1, 10_001, 10**30)),
        *(("physical/0/delete-below", {"sequence": value}) for value in (-1, 2**63, 10**30)),
        ("physical/4/delete-below", {"sequence": 1}),
        ("physical/999/delete-below", {"sequence": 1}),
    ],
    ids=repr,
)  # fmt: skip
def test_limits_out_of_range_are_refused(queue: QueueClient, action: str, body: Any) -> None:
    assert code_of(queue.post(action, body)) == (422, "Q908")


@pytest.mark.parametrize(
    ("query", "code"),
    [("from=-1", (400, "P322")), ("from=x", (400, "P322")), ("to=1.5", (400, "P322")), ("max=", (400, "P322")),
     ("from=" + "9" * 5000, (400, "P322")), ("from=%C2%B2", (400, "P322")), ("from=5&to=4", (422, "Q908")),
     ("to=9223372036854775807", (422, "Q908")), ("max=0", (422, "Q908")), ("max=10001", (422, "Q908"))],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_bad_range_is_refused(queue: QueueClient, query: str, code: tuple[int, str]) -> None:
    assert code_of(queue.client.get(f"{queue.path}/physical/0/messages?{query}")) == code


@pytest.mark.parametrize("number", ["-1", "x", "9" * 5000, "%C2%B2", "0x0"])
def test_a_bad_physical_queue_is_refused(queue: QueueClient, number: str) -> None:
    assert code_of(queue.client.get(f"{queue.path}/physical/{number}/messages")) == (400, "P322")


# Receipts.


@pytest.mark.parametrize(
    "receipt", ["", "x", "1.2.3", "a.b.c.d", "1.2.3.4.5", "1.1.-.x", "9" * 5000 + ".1.1.x", "\x00"]
)
@pytest.mark.parametrize("action", ["delete", "extend", "release"])
def test_a_malformed_receipt_spoils_nothing(queue: QueueClient, action: str, receipt: str) -> None:
    leased = queue.dequeue(max=2)
    good = [message["receipt"] for message in leased]
    assert code_of(queue.post(action, {"receipts": [*good, receipt]})) == (422, "Q907")
    assert queue.settle("release", leased) == {"released": len(leased), "stale": 0}


@pytest.mark.parametrize("action", ["delete", "extend", "release"])
def test_stale_receipts_are_counted(queue: QueueClient, action: str) -> None:
    strange = ["0.1.1.0", "99.1.1.x", "-1.1.1.x", "0.-5.1.x", f"0.{10**30}.1.x"]
    done = {"delete": "deleted", "extend": "extended", "release": "released"}[action]
    assert queue.post(action, {"receipts": strange}).json() == {done: 0, "stale": len(strange)}


def test_receipts_of_one_queue_are_stale_in_another(client: httpx.Client, queue: QueueClient) -> None:
    other = QueueClient(client)
    other.enqueue(1)
    [message] = other.dequeue()
    queue.post("delete", {"receipts": [f"0.1.{message['delivery']}.{'0' * 8}"]})
    assert other.delete([message]) == {"deleted": 1, "stale": 0}


# Bodies from other protocols.


@given(st.binary(max_size=60))
@example(msgspec.msgpack.encode({1: 2}))
@example(b"\x81\xc0\x01")
@example(b"\x81\x91\x01\x01")
@example(b"\xa1\xff")
@example(b"\xd4\x05x")
@example(b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00")
@example(b"\x91" * 5000 + b"\x01")
@example(b"\x82\xa11\x01\x01\x02")
@settings(max_examples=300, deadline=None)
def test_any_message_pack_becomes_json(body: bytes) -> None:
    """A message that a native client has enqueued can always be taken over HTTP."""
    json.loads(bytes(body_json(msgspec.Raw(body))))


def test_cut_and_spoilt_requests_cost_nothing(broker: BrokerProcess, queue: QueueClient) -> None:
    chance = random.Random(7)
    request = post_bytes(f"{queue.path}/messages", [{"body": "unfinished"}] * 3)
    for _ in range(100):
        cut = request[: chance.randrange(1, len(request) - 1)]
        spoilt = bytearray(cut)
        spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
        with socket.create_connection(("127.0.0.1", broker.http_port), WAIT_S) as connection:
            connection.sendall(spoilt)
