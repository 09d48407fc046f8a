"""Whatever one client requests, memory is bounded: requests beyond the bound are refused and counted, and other clients
are served."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from broker_checks import assert_healthy, broker_load, wait_until
from broker_process import BrokerProcess
from http_client import code_of, open_client
from http_client import publish as post
from prometheus_client.parser import text_string_to_metric_families
from raw_client import RawClient, publish
from websocket_client import WebSocketClient

from tidegate.frames import ErrorBody, Kind, Rebind, Subscribe, Unsubscribe, decode_body, encode_frame
from tidegate.messages import QueueCall

FLAGS = (
    "--subscriptions-bytes-max=400000",
    "--subscriptions-per-connection-bytes-max=200000",
    "--attribute-names-per-connection-max=40",
    "--publishers-bytes-max=40000",
    "--queues-bytes-max=600000",
    "--queue-attribute-names-max=30",
    "--outboxes-bytes-max=1000000",
)
SENT_AT_ONCE = 200


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(*FLAGS) as process:
        yield process


@pytest.fixture(autouse=True)
def others_are_served(broker: BrokerProcess) -> Iterator[None]:
    yield
    assert_healthy(broker)
    wait_until(lambda: broker_load(broker)["subscriptions"] == 0)
    assert broker_load(broker)["filter_bytes"] == 0


def refused(broker: BrokerProcess, code: str) -> int:
    """Returns how often the broker has refused with this code, by its metrics."""
    with open_client(broker) as client:
        text = client.get("/metrics").raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return int(sum(s.value for s in samples if s.name == "tidegate_refused_total" and s.labels["code"] == code))


def subscribe_all(client: RawClient, texts: list[str], first: int = 1) -> list[str]:
    """Subscribes to all filters, some at a time, and returns the codes of refusals."""
    codes: list[str] = []
    for start in range(0, len(texts), SENT_AT_ONCE):
        some = texts[start : start + SENT_AT_ONCE]
        numbered = enumerate(some, first + start)
        client.send(*(encode_frame(Kind.SUBSCRIBE, Subscribe(number, text)) for number, text in numbered))
        for _ in some:
            frame = client.receive()
            assert frame is not None, "the broker closed the connection"
            if frame.kind == Kind.ERROR:
                error = decode_body(frame.body, ErrorBody)
                assert error.message
                assert error.remedy
                codes.append(error.code)
    return codes


def test_filters_of_one_connection_are_bounded_by_bytes_and_another_connection_has_its_own(
    broker: BrokerProcess,
) -> None:
    before = refused(broker, "L620")
    with RawClient(broker.native_port) as greedy, RawClient(broker.native_port) as other:
        greedy.hello()
        other.hello()
        codes = subscribe_all(greedy, [f"long=='{number}{'x' * 3000}'" for number in range(1000)])
        assert set(codes) == {"L620"}
        assert 900 < len(codes) < 1000
        assert broker_load(broker)["filter_bytes"] <= 200_000
        assert refused(broker, "L620") == before + len(codes)
        assert subscribe_all(other, ["short==1"]) == []
        # Released capacity can be used again.
        greedy.send(encode_frame(Kind.UNSUBSCRIBE, Unsubscribe(1)))
        greedy.skip_to(Kind.UNSUBSCRIBED)
        assert subscribe_all(greedy, [f"long=='{'y' * 3000}'"], first=5000) == []


def test_filters_of_all_connections_together_are_bounded_by_bytes(broker: BrokerProcess) -> None:
    clients = [RawClient(broker.native_port) for _ in range(4)]
    try:
        for client in clients:
            client.hello()
        codes = [subscribe_all(client, [f"a=='{'x' * 3000}'"] * 100) for client in clients]
        assert broker_load(broker)["filter_bytes"] <= 400_000
        assert set(codes[3]) == {"L620"}
        assert len(codes[3]) > len(codes[0])
        with open_client(broker) as http:
            answer = http.get("/v1/stream", params={"filter": f"a=='{'x' * 3900}'"})
            assert code_of(answer) == (429, "L620")
    finally:
        for client in clients:
            client.socket.close()


def test_one_connection_cannot_use_up_the_attribute_names(broker: BrokerProcess) -> None:
    with RawClient(broker.native_port) as greedy, RawClient(broker.native_port) as other:
        greedy.hello()
        other.hello()
        codes = subscribe_all(greedy, [f"name{number}>{number}" for number in range(1000)])
        assert codes == ["L621"] * 960
        assert subscribe_all(greedy, ["name1==5;name2"], first=2000) == [], "known names cost nothing"
        greedy.send(encode_frame(Kind.REBIND, Rebind(1, "one_more")))
        frame = greedy.receive()
        assert frame is not None
        assert decode_body(frame.body, ErrorBody).code == "L621"
        assert subscribe_all(other, [f"name{number}" for number in range(1000, 1040)]) == []
        assert broker.is_up()
    assert refused(broker, "L621") >= 961


def test_many_names_in_one_filter_of_a_web_socket_are_refused_as_well(broker: BrokerProcess) -> None:
    with WebSocketClient(broker.http, ";".join(f"a{number}" for number in range(32))):
        pass
    with RawClient(broker.native_port) as client:
        client.hello()
        assert subscribe_all(client, [";".join(f"b{number}" for number in range(k, k + 32)) for k in (0, 30)]) == [
            "L621"
        ]


def test_the_context_of_a_subscriber_is_bounded(broker: BrokerProcess) -> None:
    with open_client(broker) as client:
        large = msgspec.json.encode({f"name{number}": number for number in range(65)}).decode()
        assert code_of(client.get("/v1/stream", params={"filter": "a==$name1", "context": large})) == (429, "L624")
    with WebSocketClient(broker.http, "a==$a", context='{"a": 1}') as socket:
        for number in range(100):
            socket.say(msgspec.json.encode({"context": {f"name{number}": "x"}}).decode())
        assert {"L624"} == {event["error"]["code"] for event in socket if "error" in event}
    assert refused(broker, "L624") >= 2


def test_publishers_with_long_names_are_remembered_within_a_budget(broker: BrokerProcess) -> None:
    with open_client(broker) as client:
        for number in range(200):
            assert post(client, [{"a": number}], f"{number:0>128}", 1).status_code == 200
    load = broker_load(broker)
    assert load["publisher_bytes"] <= 2 * 40_000
    assert load["publishers_forgotten"] > 50
    with RawClient(broker.native_port) as other:
        other.hello(secrets.token_hex(8))


def test_busy_publishers_beyond_the_budget_are_refused(broker: BrokerProcess) -> None:
    clients = [RawClient(broker.native_port) for _ in range(100)]
    try:
        codes = []
        for number, client in enumerate(clients):
            client.send(encode_frame(Kind.HELLO, {"version": 1, "publisher": f"busy{number:0>120}"}))
            frame = client.receive()
            assert frame is not None
            codes.append(decode_body(frame.body, ErrorBody).code if frame.kind == Kind.ERROR else "welcome")
        assert set(codes) == {"welcome", "L604"}
    finally:
        for client in clients:
            client.socket.close()
    assert refused(broker, "L604") == codes.count("L604")


def test_queues_with_many_physical_queues_are_bounded_over_http_and_native(broker: BrokerProcess) -> None:
    refused_before = refused(broker, "L622")
    with open_client(broker) as client:
        answers = [client.put(f"/v1/queues/wide{number}", json={"physical_queues": 64}) for number in range(6)]
        made = [answer.status_code for answer in answers].count(201)
        assert 1 <= made < 5
        assert {code_of(answer) for answer in answers[made:]} == {(429, "L622")}
        with RawClient(broker.native_port) as native:
            native.hello()
            call = QueueCall("define", "wider", {"physical_queues": 64})
            native.send(encode_frame(Kind.QUEUE_CALL, call, 1))
            assert decode_body(native.wait_for(Kind.FAILED).body, ErrorBody).code == "L622"
        assert client.put("/v1/queues/wide0", json={"physical_queues": 64}).status_code == 200, "it exists already"
        assert client.delete("/v1/queues/wide0").status_code == 204
        assert client.put("/v1/queues/again", json={"physical_queues": 64}).status_code == 201
        for name in ("again", *(f"wide{number}" for number in range(1, made))):
            assert client.delete(f"/v1/queues/{name}").status_code == 204
    assert refused(broker, "L622") - refused_before == 7 - made


def test_named_subscriptions_and_their_names_of_attributes_are_bounded(broker: BrokerProcess) -> None:
    with open_client(broker) as client:
        answers = [
            client.post("/v1/subscriptions", json={"name": f"s{number}", "filter": f"own{number}"})
            for number in range(35)
        ]
        assert [answer.status_code for answer in answers[:30]] == [201] * 30
        assert {code_of(answer) for answer in answers[30:]} == {(429, "L621")}
        for number in range(30):
            assert client.delete(f"/v1/subscriptions/s{number}").status_code == 204
        answers = [
            client.post("/v1/subscriptions", json={"name": f"t{number}", "filter": "same"}) for number in range(100)
        ]
        assert {code_of(answer) for answer in answers if answer.status_code != 201} == {(429, "L622")}
        for number in range(100):
            client.delete(f"/v1/subscriptions/t{number}")


def test_queues_that_exist_are_served_by_a_broker_with_a_smaller_budget(tmp_path: Path) -> None:
    with BrokerProcess("--data", str(tmp_path)) as before, open_client(before) as client:
        assert client.put("/v1/queues/wide", json={"physical_queues": 64}).status_code == 201
        assert client.post("/v1/queues/wide/messages", json={"body": {"a": 1}}).status_code == 200
        before.terminate()
    with BrokerProcess("--data", str(tmp_path), "--queues-bytes-max=1000") as after, open_client(after) as client:
        assert client.get("/v1/queues/wide").raise_for_status().json()["messages"] == 1
        assert code_of(client.put("/v1/queues/other", json={})) == (429, "L622")


def test_what_waits_for_all_slow_subscribers_together_is_bounded_and_one_that_reads_misses_nothing(
    broker: BrokerProcess,
) -> None:
    slow = [RawClient(broker.native_port, receive_bytes=4096) for _ in range(4)]
    try:
        with RawClient(broker.native_port) as publisher, RawClient(broker.native_port) as reader:
            for client in (*slow, reader):
                client.hello()
                client.subscribe(1, "flood")
            publisher.hello(secrets.token_hex(8))
            taken = 0
            for number in range(1, 301):
                publisher.send(publish(number, {"flood": number, "text": "x" * 60_000}))
                publisher.wait_acknowledged(number)
                taken += len(reader.take(1))
            load = broker_load(broker)
            assert load["outbox_bytes"] <= 2 * 1_000_000 + 5 * 61_000
            assert load["dropped"] > 0
            assert taken == 300
    finally:
        for client in slow:
            client.socket.close()


def test_calls_about_queues_that_are_not_answered_hold_up_only_their_sender(broker: BrokerProcess) -> None:
    """The broker stops reading from a client that sends large calls and does not read. It keeps a window of calls."""
    large = encode_frame(Kind.QUEUE_CALL, QueueCall("describe", "n" * 900_000), 1)
    with RawClient(broker.native_port, receive_bytes=4096) as client:
        client.hello()
        client.send(*(encode_frame(Kind.STATUS) for _ in range(2000)))  # the answers fill its buffers
        client.socket.settimeout(2)
        sent = 0
        with contextlib.suppress(TimeoutError):
            for number in range(1, 200):
                client.socket.sendall(large[:8] + number.to_bytes(8, "little") + large[16:])
                sent += 1
        assert sent < 50
        assert_healthy(broker)


def test_twenty_thousand_subscriptions_with_names_of_their_own_stay_small() -> None:
    """Each would take 25 KB if cells were kept for one number (22 KB). The bound is generous, because memory is
    measured from outside."""
    with BrokerProcess("--attribute-names-per-connection-max=30000") as broker:
        before = resident_bytes(broker)
        with RawClient(broker.native_port) as client:
            client.hello()
            assert subscribe_all(client, [f"attribute_{number}>{number}" for number in range(20_000)]) == []
            assert resident_bytes(broker) - before < 250_000_000
        assert_healthy(broker)


def resident_bytes(broker: BrokerProcess) -> int:
    lines = Path(f"/proc/{broker.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
