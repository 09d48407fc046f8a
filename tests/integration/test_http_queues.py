"""Queues over HTTP: enqueued messages are delivered until they are deleted, and held requests are woken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from broker_process import BrokerProcess
from http_client import (
    code_of,
    error_of,
    exchange,
    metrics,
    open_client,
    parse_response,
    publish,
    queue_metrics,
    wait_until,
)
from queue_client import QueueClient, post_bytes


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as opened:
        yield opened


@pytest.fixture
def queue(client: httpx.Client) -> QueueClient:
    return QueueClient(client)


# Queues.


def test_a_queue_is_made_once_changed_and_dropped(client: httpx.Client) -> None:
    made = client.put("/v1/queues/life", json={"max_deliveries": 3})
    assert made.status_code == 201
    assert (
        made.json().items() >= {"name": "life", "max_deliveries": 3, "method": "wakeup", "durability": "fsync"}.items()
    )
    assert client.put("/v1/queues/life", json={"max_deliveries": 3}).status_code == 200
    assert client.put("/v1/queues/life", json={"max_deliveries": 7}).json()["max_deliveries"] == 7
    assert client.get("/v1/queues/life").json()["max_deliveries"] == 7
    assert code_of(client.put("/v1/queues/life", json={"physical_queues": 9})) == (409, "Q904")
    assert client.delete("/v1/queues/life").status_code == 204
    assert code_of(client.get("/v1/queues/life")) == (404, "Q901")
    assert client.put("/v1/queues/life").status_code == 201


def test_concurrent_makers_make_one(broker: BrokerProcess, client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: client.put("/v1/queues/race").status_code, range(16)))
    assert set(answers) <= {200, 201}
    assert sum(each["name"] == "race" for each in client.get("/v1/queues").json()["queues"]) == 1


def test_queues_are_listed_with_their_levels(client: httpx.Client, queue: QueueClient) -> None:
    queue.enqueue(1, 2, 3)
    queue.dequeue(max=1)
    [shown] = [each for each in client.get("/v1/queues").json()["queues"] if each["name"] == queue.name]
    assert shown == client.get(queue.path).json()
    assert {name: shown[name] for name in ("messages", "waiting", "leased", "parked", "dead_letters")} == {
        "messages": 3, "waiting": 2, "leased": 1, "parked": 0, "dead_letters": 0,
    }  # fmt: skip
    names = {each["name"] for each in client.get("/v1/queues", params={"all": "1"}).json()["queues"]}
    assert {queue.name, f"{queue.name}.dead"} <= names


def test_statistics_and_metrics_agree(client: httpx.Client, queue: QueueClient) -> None:
    queue.enqueue(1, 2)
    queue.delete(queue.dequeue())
    queue.enqueue(3)
    told, seen = queue.statistics(), queue_metrics(client, queue.name)
    assert (told["enqueued"], told["delivered"], told["deleted"], told["messages"]) == (3, 2, 2, 1)
    for statistic, metric in (
        ("enqueued", "enqueued_total"), ("delivered", "delivered_total"), ("deleted", "deleted_total"),
        ("messages", "messages"), ("hits", "hits_total"), ("hit_rate", "hit_rate"), ("requests", "requests_total"),
    ):  # fmt: skip
        assert told[statistic] == seen[metric], statistic


# Messages.


@pytest.mark.parametrize(
    "body",
    [None, True, 0, -1, 2**63, 2**64 - 1, -(2**63), 0.5, 1e300, "", "ñandú 🌊\u2028\x00", [], {}, [[]], {"": None},
     {"a": [1, {"b": "c"}]}, "x" * 200_000],
    ids=lambda body: repr(body)[:20],
)  # fmt: skip
def test_every_body_comes_out_as_it_went_in(queue: QueueClient, body: Any) -> None:
    queue.enqueue(body)
    [message] = queue.dequeue()
    assert (message["body"], type(message["body"])) == (body, type(body))


def test_a_message_has_all_that_was_said_about_it(queue: QueueClient) -> None:
    before = time.time()
    posted = {"body": 1, "group": "g", "device": "d", "sequence": 7, "headers": {"kind": "ñ"}}
    assert queue.post("messages", posted).json() == {"accepted": 1, "duplicates": 0, "durability": "fsync"}
    [message] = queue.dequeue()
    assert before <= message.pop("enqueued_at") <= time.time()
    assert message.pop("receipt")
    assert message.pop("queue") in range(4)
    assert message == {
        "body": 1, "group": "g", "device": "d", "device_sequence": 7, "headers": {"kind": "ñ"},
        "delivery": 1, "sequence": 1,
    }  # fmt: skip


def test_what_was_not_said_is_not_there(queue: QueueClient) -> None:
    queue.enqueue(1)
    [message] = queue.dequeue()
    assert message.keys() == {"body", "receipt", "delivery", "queue", "sequence", "enqueued_at", "headers"}


def test_what_is_sent_again_is_kept_once(queue: QueueClient) -> None:
    batch = [{"body": i, "device": "d", "sequence": i} for i in range(1, 4)]
    assert queue.post("messages", batch).json()["duplicates"] == 0
    assert queue.post("messages", batch).json() == {"accepted": 3, "duplicates": 3, "durability": "fsync"}
    assert sorted(queue.take_all()) == [1, 2, 3]


def test_a_device_that_does_not_count_loses_nothing(queue: QueueClient) -> None:
    for body in range(3):
        assert queue.post("messages", {"body": body, "device": "d"}).json()["duplicates"] == 0
    assert sorted(queue.take_all()) == [0, 1, 2]


def test_many_messages_come_out_once(queue: QueueClient) -> None:
    queue.enqueue(*range(10_000))
    assert sorted(queue.take_all()) == list(range(10_000))
    assert queue.statistics()["messages"] == 0


def test_leases_are_extended_released_and_deleted(queue: QueueClient) -> None:
    queue.enqueue(1, 2)
    messages = queue.dequeue(max=2, min=2)
    assert queue.settle("extend", messages, visibility_s=60) == {"extended": 2, "stale": 0}
    assert queue.dequeue(wait_s=0) == []
    assert queue.settle("release", messages) == {"released": 2, "stale": 0}
    assert queue.delete(messages) == {"deleted": 0, "stale": 2}
    again = queue.dequeue(max=2, min=2)
    assert [message["delivery"] for message in again] == [2, 2]
    assert queue.delete(again + again) == {"deleted": 2, "stale": 2}


def test_a_lease_that_ends_wakes_who_waits(queue: QueueClient) -> None:
    queue.enqueue(1)
    queue.dequeue(visibility_s=0.3)
    [message] = queue.dequeue()
    assert (message["body"], message["delivery"]) == (1, 2)


def test_a_release_may_be_delayed(queue: QueueClient) -> None:
    queue.enqueue(1)
    queue.settle("release", queue.dequeue(), delay_s=0.3)
    assert queue.dequeue(wait_s=0) == []
    assert [message["body"] for message in queue.dequeue()] == [1]


def test_dead_letters_are_seen_and_redriven(client: httpx.Client) -> None:
    queue = QueueClient(client, max_deliveries=1)
    queue.enqueue("poison")
    queue.settle("release", queue.dequeue())
    assert queue.dequeue(wait_s=0) == []
    wait_until(lambda: client.get(queue.path).json()["dead_letters"] == 1)
    [letter] = client.post(f"{queue.path}.dead/dequeue", json={}).json()["messages"]
    assert letter["body"] == "poison"
    assert letter["headers"]["dead-letter-deliveries"] == "1"
    client.post(f"{queue.path}.dead/release", json={"receipts": [letter["receipt"]]})
    assert queue.post("redrive", {}).json() == {"redriven": 1}
    assert [message["body"] for message in queue.dequeue()] == ["poison"]


def test_a_full_queue_says_when_to_come_back(client: httpx.Client) -> None:
    queue = QueueClient(client, messages_max=2)
    queue.enqueue(1, 2)
    refused = queue.post("messages", {"body": 3})
    assert code_of(refused) == (429, "L608")
    assert int(refused.headers["retry-after"]) >= 1
    queue.delete(queue.dequeue(max=1))
    queue.enqueue(3)
    assert len(queue.take_all()) == 2


def test_plain_bytes_are_enough(broker: BrokerProcess, queue: QueueClient) -> None:
    for action, body in (("messages", {"body": "hello"}), ("dequeue", {})):
        request = post_bytes(f"{queue.path}/{action}", body).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        answer = parse_response(exchange(broker.http_port, request))
        assert answer.status_code == 200
    [message] = answer.json()["messages"]
    assert message["body"] == "hello"


# Waiting.


@pytest.mark.parametrize("method", ["wakeup", "rds"])
def test_a_held_request_is_woken_by_an_enqueue(client: httpx.Client, method: str) -> None:
    queue = QueueClient(client, method=method)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(queue.dequeue, wait_s=8)
        wait_until(lambda: queue.statistics()["parked"] == 1)
        queue.enqueue("now")
        assert [message["body"] for message in waiting.result()] == ["now"]
    assert queue.statistics()["parked"] == 0


def test_a_request_that_waited_in_vain_gets_nothing(queue: QueueClient) -> None:
    assert queue.dequeue(wait_s=0.1) == []
    assert queue.dequeue(wait_s=0) == []


def test_a_queue_that_is_dropped_or_changed_does_not_keep_its_clients(client: httpx.Client) -> None:
    queue = QueueClient(client)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(queue.dequeue, wait_s=8)
        wait_until(lambda: queue.statistics()["parked"] == 1)
        client.put(queue.path, json={"max_deliveries": 9}).raise_for_status()
        assert not waiting.done()
        client.delete(queue.path)
        assert waiting.result() == []


def test_held_requests_end_with_the_broker() -> None:
    with BrokerProcess() as broker, open_client(broker) as client, ThreadPoolExecutor() as threads:
        queue = QueueClient(client)
        waiting = [threads.submit(queue.dequeue, wait_s=60) for _ in range(5)]
        wait_until(lambda: queue.statistics()["parked"] == 5)
        assert broker.terminate() == 0
        assert [each.result() for each in waiting] == [[]] * 5


# Notifications in queues.


def test_a_bound_queue_has_what_was_acknowledged(client: httpx.Client) -> None:
    queue = QueueClient(client, filter="level>1")
    publish(client, [{"level": 1}, {"level": 2}, {"level": 3}], "gauge").raise_for_status()
    assert queue.statistics()["messages"] == 2
    messages = queue.dequeue(min=2)
    found = sorted((each["body"]["level"], each["device"], each["device_sequence"]) for each in messages)
    assert found == [(2, "gauge", 2), (3, "gauge", 3)]
    assert metrics(client)["queue_bindings"] >= 1


def test_a_full_bound_queue_holds_back_the_acknowledgement() -> None:
    with BrokerProcess("--request-timeout-s", "1") as broker, open_client(broker) as client:
        queue = QueueClient(client, filter="n", messages_max=2)
        publish(client, [{"n": 1}, {"n": 2}], "p", 1).raise_for_status()
        assert code_of(publish(client, {"n": 3}, "p", 3)) == (503, "U703")
        assert publish(client, {"other": 1}, "q", 1).status_code == 200
        assert sorted(body["n"] for body in queue.take_all()) == [1, 2]
        wait_until(lambda: publish(client, {"n": 3}, "p", 3).status_code == 200)
        assert [body["n"] for body in queue.take_all()] == [3]


def test_a_full_bound_queue_may_forget_the_oldest(client: httpx.Client) -> None:
    queue = QueueClient(client, filter="old", messages_max=3, policy="drop-oldest", physical_queues=1)
    for n in range(10):
        publish(client, {"old": n}).raise_for_status()
    assert [body["old"] for body in queue.take_all()] == [7, 8, 9]
    assert queue.statistics()["dropped"] == 7


def test_what_was_acknowledged_survives_a_crash() -> None:
    with BrokerProcess() as broker, open_client(broker) as client:
        bound, posted = QueueClient(client, filter="n"), QueueClient(client)
        for n in range(20):
            publish(client, {"n": n}, "p", n + 1).raise_for_status()
            posted.enqueue(n)
        posted.dequeue(max=5)
        broker.kill()
        broker.start()
        assert sorted(body["n"] for body in bound.take_all()) == list(range(20))
        assert sorted(posted.take_all()) == list(range(20))


# Range reads.


def test_a_physical_queue_is_read_in_order_and_again(client: httpx.Client) -> None:
    queue = QueueClient(client, physical_queues=1)
    queue.enqueue(*range(10))
    queue.dequeue(max=3)
    read: list[tuple[int, int]] = []
    start = 0
    while messages := (answer := read_range(queue, start, max=4))["messages"]:
        read += [(message["sequence"], message["body"]) for message in messages]
        start = answer["next"]
    assert read == [(n + 1, n) for n in range(10)]
    assert [message["body"] for message in read_range(queue, 3, to=5)["messages"]] == [2, 3]
    assert read_range(queue, 11) == {"messages": [], "next": 11}
    path = f"{queue.path}/physical/0/delete-below"
    assert client.post(path, json={"sequence": 6}).json() == {"deleted": 5}
    assert client.post(path, json={"sequence": 6}).json() == {"deleted": 0}
    assert [message["body"] for message in read_range(queue, 0)["messages"]] == [5, 6, 7, 8, 9]
    assert sorted(queue.take_all()) == [5, 6, 7, 8, 9]


def read_range(queue: QueueClient, start: int, **query: int) -> dict[str, Any]:
    response = queue.client.get(f"{queue.path}/physical/0/messages", params={"from": start} | query)
    answer: dict[str, Any] = response.raise_for_status().json()
    return answer


# Named subscriptions.


def test_a_subscription_is_made_changed_and_dropped(client: httpx.Client) -> None:
    asked = {"name": "alarm", "filter": "NO2>200"}
    expected = asked | {"policy": "block", "queue": "subscription.alarm"}
    assert (made := client.post("/v1/subscriptions", json=asked)).status_code == 201
    assert made.json() == expected
    assert (same := client.post("/v1/subscriptions", json=asked)).status_code == 200
    assert same.json() == expected
    publish(client, [{"NO2": 212}, {"NO2": 20}]).raise_for_status()
    [shown] = [each for each in client.get("/v1/subscriptions").json()["subscriptions"] if each["name"] == "alarm"]
    assert shown.items() >= (expected | {"messages": 1, "waiting": 1}).items()
    assert client.get("/v1/subscriptions/alarm").json() == shown
    changed = client.post("/v1/subscriptions", json=asked | {"filter": "NO2>300", "policy": "drop-oldest"})
    assert (changed.status_code, changed.json()["filter"], changed.json()["policy"]) == (200, "NO2>300", "drop-oldest")
    assert "subscription.alarm" not in {each["name"] for each in client.get("/v1/queues").json()["queues"]}
    assert client.delete("/v1/subscriptions/alarm").status_code == 204
    for response in (client.delete("/v1/subscriptions/alarm"), client.get("/v1/subscriptions/alarm")):
        assert code_of(response) == (404, "Q901")
        assert "subscription 'alarm'" in error_of(response)["message"]
