"""A full queue blocks its publishers for its `block_s` and no longer: then it refuses single notifications, or drops.

Other subscribers receive everything meanwhile. Notifications that were acknowledged without a refusal are in the queue,
and refused ones are not. A named subscription without a reader behaves the same, and is dropped in the end. The tests
run with both stores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from broker_process import BrokerProcess
from http_client import code_of, error_of, metrics, open_client, publish, queue_metrics, wait_until
from layer_processes import Cluster
from queue_client import QueueClient
from raw_client import RawClient
from raw_client import publish as publish_bytes
from redis_process import RedisProcess

from tidegate import Connection, connect
from tidegate.errors import Overloaded
from tidegate.frames import Kind, Refusal, decode_body

PATIENCE_S = 30.0
FULL = {"filter": "*", "messages_max": 1, "physical_queues": 1, "block_s": 0.3}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with RedisProcess() as process:
        yield process


@pytest.fixture(scope="module", params=["lmdb", "redis"])
def store_broker(request: pytest.FixtureRequest) -> Iterator[BrokerProcess]:
    flags: tuple[str, ...] = ()
    if request.param == "redis":
        flags = ("--queue-store", request.getfixturevalue("redis").url)
    with BrokerProcess(*flags) as broker:
        yield broker


@pytest.fixture
def client(store_broker: BrokerProcess) -> Iterator[httpx.Client]:
    """Yields a client, and drops the queues of a test at its end: queues for everything would block the next test."""
    with open_client(store_broker) as opened:
        yield opened
        for queue in opened.get("/v1/queues").json()["queues"]:
            opened.delete(f"/v1/queues/{queue['name']}")
        for subscription in opened.get("/v1/subscriptions").json()["subscriptions"]:
            opened.delete(f"/v1/subscriptions/{subscription['name']}")


def test_publishing_goes_on_after_block_s_and_each_refusal_names_the_queue(
    store_broker: BrokerProcess, client: httpx.Client
) -> None:
    queue = QueueClient(client, "full", **FULL)

    async def scenario() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            connect(store_broker.native) as broker,
            connect(store_broker.native) as other,
            broker.subscribe("n") as subscription,
        ):
            await broker.publish({"n": 0})
            for n in range(1, 6):
                with pytest.raises(Overloaded, match=r"L611.*queue 'full'"):
                    await (broker if n % 2 else other).publish({"n": n})
            with pytest.raises(Overloaded, match=r"L611: 10 of 10 notifications refused.*queue 'full'"):
                await other.publish([{"n": n} for n in range(6, 16)])
            seen = [(await anext(aiter(subscription))).notification["n"] for _ in range(16)]
            assert sorted(seen) == list(range(16))
            assert queue.take_all() == [{"n": 0}]
            await broker.publish({"n": 16})
            assert queue.take_all() == [{"n": 16}]

    asyncio.run(scenario())
    assert queue.statistics()["notifications_refused"] == 15
    assert metrics(client)["notifications_refused_by_queues_total"] >= 15
    assert 'tidegate_refused_total{code="L611"}' in client.get("/metrics").text


def test_what_was_acknowledged_is_stored_and_what_was_refused_is_not(
    store_broker: BrokerProcess, client: httpx.Client
) -> None:
    """With a consumer that is much too slow and publishers that never wait, the two ledgers agree."""
    queue = QueueClient(client, "slow", filter="n", messages_max=20, physical_queues=2, block_s=0.0)
    acknowledged: set[int] = set()
    refused: set[int] = set()

    async def publish_one(broker: Connection, n: int) -> None:
        try:
            await broker.publish({"n": n})
            acknowledged.add(n)
        except Overloaded:
            refused.add(n)

    async def publish_some(publisher: int) -> None:
        async with connect(store_broker.native) as broker:
            for first in range(publisher, 600, 60):
                await asyncio.gather(*(publish_one(broker, n) for n in range(first, first + 60, 3)))

    async def scenario() -> list[int]:
        taken: list[int] = []
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            publishers = [tasks.create_task(publish_some(number)) for number in range(3)]
            while not all(task.done() for task in publishers):
                messages = await asyncio.to_thread(queue.dequeue, max=3, wait_s=0)
                taken += [message["body"]["n"] for message in messages]
                await asyncio.to_thread(queue.delete, messages)
        return taken

    taken = asyncio.run(scenario())
    taken += [body["n"] for body in queue.take_all()]
    assert acknowledged | refused == set(range(600))
    assert refused, "the queue was never full: the test shows nothing"
    assert sorted(taken) == sorted(acknowledged)


def test_a_forgotten_named_subscription_at_its_bound_refuses_over_http_too(client: httpx.Client) -> None:
    asked = {"name": "forgotten", "filter": "*", "messages_max": 2, "block_s": 0.3}
    client.post("/v1/subscriptions", json=asked).raise_for_status()
    assert publish(client, [{"n": 1}, {"n": 2}], "p", 1).status_code == 200
    for _repetition in range(2):
        refused = publish(client, [{"n": 3}, {"n": 4}], "p", 3)
        assert code_of(refused) == (429, "L611")
        assert "queue 'subscription.forgotten'" in error_of(refused)["message"]
        assert "2 of 2 notifications" in error_of(refused)["message"]
        assert float(refused.headers["retry-after"]) > 0
    assert client.get("/v1/subscriptions/forgotten").json()["messages"] == 2


@pytest.mark.parametrize(("name", "key"), [("away", ""), ("away-with-key", "a-secret-of-the-sensor")])
def test_whoever_was_away_when_its_notifications_were_refused_hears_of_it(
    store_broker: BrokerProcess, client: httpx.Client, name: str, key: str
) -> None:
    queue = QueueClient(client, "full", **FULL)
    queue.enqueue("in the way")
    with RawClient(store_broker.native_port) as publisher:
        publisher.hello(name, key=key)
        publisher.send(publish_bytes(1, {"n": 1}, {"n": 2}))
        wait_until(lambda: client.get("/v1/layers").json()["queue_alarms"] != [])
    wait_until(lambda: metrics(client)["bytes_under_way"] == 0)
    with RawClient(store_broker.native_port) as publisher:
        welcome = publisher.hello(name, key=key)
        assert welcome.acknowledged == 2
        [refusal] = welcome.refused
        assert (refusal.code, refusal.sequence, refusal.last) == ("L611", 1, 2)
        publisher.send(publish_bytes(1, {"n": 1}, {"n": 2}))
        [again] = decode_body(publisher.wait_for(Kind.REFUSE).body, list[Refusal])
        assert (again.sequence, again.last) == (1, 2)


@pytest.mark.parametrize(("after_block", "kept"), [("drop-newest", [0]), ("drop-oldest", [5])])
def test_a_full_queue_drops_where_that_is_chosen(client: httpx.Client, after_block: str, kept: list[int]) -> None:
    queue = QueueClient(client, "dropping", **FULL, after_block=after_block)
    for n in range(6):
        assert publish(client, {"n": n}).status_code == 200
    assert [body["n"] for body in queue.take_all()] == kept
    statistics = queue.statistics()
    assert statistics["notifications_dropped"] + statistics["dropped"] == 5
    assert statistics["notifications_refused"] == 0


def test_the_alarm_comes_before_and_while_publishers_are_held_back(capfd: pytest.CaptureFixture[str]) -> None:
    with BrokerProcess() as broker, open_client(broker) as client:
        check_alarms(client)
    said = capfd.readouterr().err
    for words in (
        "is 80 % full:",
        "is full and holds back its publishers, for up to 1 s",
        "has stored nothing for",
        "has room again; in all it refused 2 notifications",
    ):
        assert said.count(f"queue 'loud' {words}") == 1, words


def check_alarms(client: httpx.Client) -> None:
    queue = QueueClient(client, "loud", filter="loud", messages_max=10, physical_queues=1, block_s=1.0)
    publish(client, [{"loud": n} for n in range(8)]).raise_for_status()
    assert queue_metrics(client, "loud")["fill_ratio"] == 0.8
    [alarm] = client.get("/v1/layers").json()["queue_alarms"]
    assert alarm.items() >= {"queue": "loud", "fill_ratio": 0.8, "is_overflowing": False}.items()
    assert metrics(client)["queues_near_their_bound"] == 1
    assert code_of(publish(client, [{"loud": n} for n in range(4)])) == (429, "L611")
    shown = queue_metrics(client, "loud")
    assert (shown["overflowing"], shown["notifications_refused_total"], shown["fill_ratio"]) == (1, 2, 1.0)
    assert shown["held_back_seconds_total"] >= 1.0
    assert len(queue.take_all()) == 10
    publish(client, {"loud": 1}).raise_for_status()
    assert queue_metrics(client, "loud")["overflowing"] == 0


def test_messages_leave_a_queue_when_they_are_older_than_its_lifetime(client: httpx.Client) -> None:
    queue = QueueClient(client, "short", lifetime_s=0.5, after_lifetime="dead-letter")
    queue.enqueue(1, 2, 3)
    wait_until(lambda: queue.statistics()["messages"] == 0)
    shown = queue.statistics()
    assert (shown["expired_messages"], shown["dead_letters"]) == (3, 3)
    assert queue_metrics(client, "short")["expired_messages_total"] == 3
    queue.enqueue(4)
    time.sleep(0.5)
    for physical in range(4):
        answer = client.get(f"{queue.path}/physical/{physical}/messages").json()
        assert answer["messages"] == []


def test_a_subscription_that_nobody_reads_is_dropped_and_one_that_is_read_stays(
    store_broker: BrokerProcess, client: httpx.Client
) -> None:
    for name in ("unread", "read", "kept"):
        asked = {"name": name, "filter": "n", "expires_s": 0 if name == "kept" else 2.0}
        client.post("/v1/subscriptions", json=asked).raise_for_status()
    expired = metrics(client)["queues_expired_total"]
    publish(client, {"n": 1}).raise_for_status()

    async def read() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            connect(store_broker.native) as broker,
            connect(store_broker.native) as reader,
        ):
            subscription = reader.subscribe(name="read")
            async with subscription:
                assert (await anext(aiter(subscription))).notification == {"n": 1}
                waiting = asyncio.ensure_future(subscription.take())
                while "unread" in [each["name"] for each in await broker.subscriptions()]:
                    await asyncio.sleep(0.1)
                [listed] = [each for each in await broker.subscriptions() if each["name"] == "read"]
                assert listed["expires_at"] == pytest.approx(listed["last_read_at"] + 2.0)
                await broker.publish({"n": 2})
                assert [each.notification for each in await waiting] == [{"n": 2}]

    asyncio.run(read())
    shown = {each["name"]: each for each in client.get("/v1/subscriptions").json()["subscriptions"]}
    assert "unread" not in shown
    assert shown["kept"]["expires_at"] is None
    assert metrics(client)["queues_expired_total"] == expired + 1
    wait_until(lambda: client.get("/v1/subscriptions/read").status_code == 404)


def test_when_a_subscription_was_read_survives_a_crash() -> None:
    with BrokerProcess() as broker, open_client(broker) as client:
        client.post("/v1/subscriptions", json={"name": "s", "filter": "n"}).raise_for_status()

        def shown() -> Any:
            return client.get("/v1/subscriptions/s").json()

        wait_until(lambda: shown()["last_read_at"] is not None)
        before = shown()
        time.sleep(1.5)
        broker.kill()
        broker.start()
        assert shown()["last_read_at"] == before["last_read_at"]
        assert shown()["expires_at"] == pytest.approx(before["last_read_at"] + 7 * 86_400)


def test_a_publisher_that_is_held_back_over_http_hears_which_queue_it_waits_for() -> None:
    flags = ("--request-timeout-s", "1", "--publisher-window-bytes", "1")
    with BrokerProcess(*flags) as broker, open_client(broker) as client:
        QueueClient(client, "slow", **FULL | {"block_s": 60}).enqueue("in the way")
        assert code_of(publish(client, {"n": 1}, "p", 1)) == (503, "U703")
        refused = publish(client, {"n": 2}, "p", 2)
        assert code_of(refused) == (429, "L605")
        assert "full queues hold up the broker: 'slow'" in error_of(refused)["message"]


def test_refusals_come_back_through_the_processes_of_a_cluster() -> None:
    """Both brokers feed the queue in Redis. The publisher's broker reports what neither could store."""
    with RedisProcess() as redis, Cluster() as cluster:
        one, other = (cluster.add_broker("--queue-store", redis.url) for _ in range(2))
        with open_client(one) as client:
            queue = QueueClient(client, "full", **FULL)

            async def scenario() -> None:
                async with (
                    asyncio.timeout(2 * PATIENCE_S),
                    connect(one.native) as publisher,
                    connect(other.native) as elsewhere,
                    elsewhere.subscribe("n") as subscription,
                ):
                    await publisher.publish({"n": 0})
                    for n in range(1, 4):
                        with pytest.raises(Overloaded, match=r"L611.*queue 'full'"):
                            await publisher.publish({"n": n})
                    seen = [(await anext(aiter(subscription))).notification["n"] for _ in range(4)]
                    assert seen == [0, 1, 2, 3]

            asyncio.run(scenario())
            assert queue.take_all() == [{"n": 0}]
