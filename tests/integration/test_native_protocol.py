"""The central law: an acknowledged publish reaches every subscription that was acknowledged before it, once, in the
publisher's order. The tests use many clients at once, publishers that resend, and bad notifications among good ones.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest
from broker_checks import assert_in_order, broker_load, run, take, take_until
from broker_process import BrokerProcess
from random_world import Notification, make_random, random_filter, random_notification
from raw_client import RawClient, publish

from tidegate import Connection, Delivery, Filter, NotificationError, Subscription, connect
from tidegate.client import publisher
from tidegate.frames import Kind, Refusal, Unsubscribe, decode_body, encode_frame

LAST = {"last": True}
NOT_A_NUMBER = float("nan")


def is_last(delivery: Delivery) -> bool:
    return delivery.notification == LAST


def notifications_of(deliveries: list[Delivery]) -> list[Notification]:
    return [delivery.notification for delivery in deliveries]


class TestEverySubscriptionGetsExactlyWhatItMatches:
    def test_of_several_publishers_to_many_random_filters(self, broker: BrokerProcess) -> None:
        chance = make_random()
        filters = [random_filter(chance) for _ in range(60)]
        published = {name: [random_notification(chance) for _ in range(400)] for name in ("a", "b", "c")}

        async def scenario() -> list[list[Delivery]]:
            async with connect(broker.native) as one, connect(broker.native) as other:
                subscriptions = [chance.choice([one, other]).subscribe(f) for f in filters]
                ends = [connection.subscribe("last") for connection in (one, other)]
                for subscription in [*subscriptions, *ends]:
                    await subscription.__aenter__()
                async with asyncio.TaskGroup() as tasks:
                    for name, notifications in published.items():
                        tasks.create_task(publish_mixed(broker, name, notifications))
                await one.publish(LAST)
                for end in ends:
                    await anext(end)
                return [await waiting(subscription) for subscription in subscriptions]

        for text, deliveries in zip(filters, run(scenario()), strict=True):
            expected_of = Filter.parse(text)
            got = defaultdict(list)
            for delivery in deliveries:
                got[delivery.publisher.split("-")[0]].append(delivery.notification)
            got.pop("client", None)  # the end marker
            for name, notifications in published.items():
                assert got[name] == [n for n in notifications if expected_of.matches(n)], text
            assert_in_order(deliveries)

    def test_when_the_calls_are_concurrent(self, broker: BrokerProcess) -> None:
        async def scenario() -> list[Delivery]:
            async with connect(broker.native) as connection, connection.subscribe("n") as subscription:
                async with asyncio.TaskGroup() as tasks:
                    for n in range(2000):
                        tasks.create_task(connection.publish({"n": n} if n % 3 else [{"n": n}, {"n": -n}]))
                return await take(subscription, 2000 + 667)

        deliveries = run(scenario())
        assert_in_order(deliveries)
        expected = [m for n in range(2000) for m in ([n] if n % 3 else [n, -n])]
        assert sorted(d.notification["n"] for d in deliveries) == sorted(expected)

    def test_when_flush_waits_for_what_was_published_soon(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection, connection.subscribe("n") as subscription:
                for n in range(3000):
                    await connection.publish_soon({"n": n})
                await connection.flush()
                statistics = connection.statistics()
                assert statistics is not None
                assert statistics.acknowledged == statistics.sent == 3000
                assert [d.notification["n"] for d in await take(subscription, 3000)] == list(range(3000))

        run(scenario())

    def test_when_a_list_is_larger_than_a_frame(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            notifications = [{"n": n, "text": "x" * 500} for n in range(5000)]
            async with connect(broker.native) as connection, connection.subscribe("n") as subscription:
                await connection.publish(notifications)
                assert notifications_of(await take(subscription, 5000)) == notifications

        run(scenario())

    def test_when_notifications_are_large(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            notifications = [{"n": n, "$payload": bytes((n,)) * 200_000} for n in range(40)]
            async with connect(broker.native) as connection, connection.subscribe("n", policy="block") as subscription:
                sending = asyncio.gather(
                    connection.publish(notifications[:20]), *(connection.publish(n) for n in notifications[20:])
                )
                got = notifications_of(await take(subscription, 40))
                await sending
                assert [n for n in got if n["n"] < 20] == notifications[:20]
                assert sorted(got, key=lambda n: int(n["n"])) == notifications

        run(scenario())

    def test_when_a_connection_has_a_thousand_subscriptions(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection:
                subscriptions = [connection.subscribe(f"n=={k};x" if k % 2 else f"n<{k}") for k in range(1000)]
                await asyncio.gather(*(subscription.__aenter__() for subscription in subscriptions))
                notifications = [{"n": n, "x": 1} for n in range(0, 1000, 7)]
                await connection.publish([*notifications, {"n": -1, "x": 1}])
                for k, subscription in enumerate(subscriptions):
                    expected = [n for n in notifications if (n["n"] == k if k % 2 else n["n"] < k)]
                    expected += [] if k % 2 else [{"n": -1, "x": 1}]
                    if expected:
                        assert notifications_of(await take(subscription, len(expected))) == expected

        run(scenario())

    def test_between_its_subscribe_and_its_unsubscribe(self, broker: BrokerProcess) -> None:
        """A publisher never stops. The subscriber receives nothing from before its request, and everything after its
        acknowledgement."""
        acknowledged = 0

        async def publish_on(connection: Connection, is_over: asyncio.Event) -> None:
            nonlocal acknowledged
            while not is_over.is_set():
                await connection.publish([{"n": acknowledged + 1 + at} for at in range(20)])
                acknowledged += 20

        async def churn(connection: Connection, chance: random.Random) -> None:
            for _ in range(30):
                asked_at = acknowledged
                async with connection.subscribe("n") as subscription:
                    live_from = acknowledged
                    numbers = [d.notification["n"] for d in await subscription.take()]
                    while numbers[-1] < live_from + chance.randint(50, 400):
                        numbers += [d.notification["n"] for d in await subscription.take()]
                    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
                    # One list is in flight at any time. It may be on either side.
                    assert asked_at < numbers[0] <= live_from + 21

        async def scenario() -> None:
            chance = make_random()
            is_over = asyncio.Event()
            async with (
                connect(broker.native) as publisher,
                connect(broker.native) as one,
                connect(broker.native) as other,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(publish_on(publisher, is_over))
                async with asyncio.TaskGroup() as churning:
                    for connection in (one, one, other):
                        churning.create_task(churn(connection, chance))
                is_over.set()

        run(scenario())
        assert broker_load(broker)["subscriptions"] == 0

    def test_and_nothing_after_the_broker_has_confirmed_its_end(self, broker: BrokerProcess) -> None:
        with RawClient(broker.native_port) as client:
            client.hello("churner")
            client.subscribe(1, "n")
            client.subscribe(2, "n")
            client.send(publish(1, {"n": 1}))
            client.wait_acknowledged(1)
            client.send(encode_frame(Kind.UNSUBSCRIBE, Unsubscribe(1)))
            assert client.skip_to(Kind.UNSUBSCRIBED).sequence == 1
            client.send(publish(2, {"n": 2}))
            ((_publisher, delivered),) = client.take(1)
            assert (delivered.subscriptions, delivered.sequence) == (2, 2)

    def test_two_subscriptions_of_one_connection_share_a_delivery(self, broker: BrokerProcess) -> None:
        with RawClient(broker.native_port) as client:
            client.hello("sharer")
            client.subscribe(7, "n>0")
            client.subscribe(9, "n<5")
            client.send(publish(1, {"n": 1}, {"n": 9}, {"n": -1}))
            got = [(d.subscriptions, d.sequence) for _, d in client.take(3)]
            assert got == [((7, 9), 1), (7, 2), (9, 3)]


async def publish_mixed(broker: BrokerProcess, name: str, notifications: list[Notification]) -> None:
    """Publishes in lists, one by one, and without waiting. A publisher's order is that of its calls."""
    chance = random.Random(name)
    async with connect(broker.native, name=name) as connection:
        while notifications:
            count = chance.choice([1, 1, 2, 50])
            part, notifications = notifications[:count], notifications[count:]
            if chance.random() < 0.5:
                await connection.publish(part)
            else:
                for notification in part:
                    await connection.publish_soon(notification)


async def waiting(subscription: Subscription) -> list[Delivery]:
    """Returns the deliveries that have arrived so far, perhaps none."""
    return await subscription.take() if subscription.statistics().waiting else []


class TestAPublisherThatSendsAgain:
    """Raw clients resend unacknowledged notifications with the same name and numbers."""

    @pytest.mark.parametrize("waits", [True, False], ids=["after the acknowledgement", "before the acknowledgement"])
    def test_is_delivered_once(self, broker: BrokerProcess, waits: bool) -> None:
        name = f"again-{waits}"
        batch = publish(1, *({"again": n} for n in range(1, 101)))
        with RawClient(broker.native_port) as subscriber:
            subscriber.hello()
            subscriber.subscribe(1, "again")
            with RawClient(broker.native_port) as first:
                first.hello(name)
                first.send(batch)
                if waits:
                    first.wait_acknowledged(100)
            with RawClient(broker.native_port) as second:
                acknowledged = second.hello(name).acknowledged
                assert acknowledged in ({100} if waits else {0, 100})
                second.send(batch, publish(101, {"again": 101}))
                second.wait_acknowledged(101)
            got = [(publisher, d.sequence, d.notification["again"]) for publisher, d in subscriber.take(101)]
            assert got == [(name, n, n) for n in range(1, 102)]

    def test_may_overlap_in_any_way(self, broker: BrokerProcess) -> None:
        """Whatever ranges are resent, cut anywhere, in one segment or many, each number arrives once and in order."""
        chance = make_random()
        with RawClient(broker.native_port) as subscriber:
            subscriber.hello()
            subscriber.subscribe(1, "overlap")
            for round_ in range(20):
                sent, name = 0, f"overlap-{round_}"
                while sent < 200:
                    with RawClient(broker.native_port) as publisher:
                        known = publisher.hello(name).acknowledged
                        assert known <= sent
                        for _ in range(chance.randint(1, 4)):
                            first = chance.randint(max(1, known - 20), sent + 1)
                            last = min(chance.randint(first, sent + 60), 200)
                            publisher.send(publish(first, *({"overlap": n} for n in range(first, last + 1))))
                            sent = max(sent, last)
                        if chance.random() < 0.5 and sent > known:
                            publisher.wait_acknowledged(sent)
                        elif sent > known:
                            # It may be cut while the broker has unread bytes. These count as not sent.
                            publisher.send(encode_frame(Kind.PING))
                            publisher.skip_to(Kind.PONG)
                got = subscriber.take(200)
                assert [(p, d.sequence, d.notification["overlap"]) for p, d in got] == [
                    (name, n, n) for n in range(1, 201)
                ]

    def test_is_told_how_far_it_is_acknowledged(self, broker: BrokerProcess) -> None:
        with RawClient(broker.native_port) as client:
            assert client.hello("told").acknowledged == 0
            client.send(publish(1, {"a": 1}, {"a": 2}))
            client.wait_acknowledged(2)
        with RawClient(broker.native_port) as client:
            assert client.hello("told").acknowledged == 2
        with RawClient(broker.native_port) as client:
            assert client.hello("another").acknowledged == 0

    def test_is_acknowledged_again_though_it_ignores_the_welcome(self, broker: BrokerProcess) -> None:
        """Otherwise a client whose acknowledgements were lost would wait forever."""
        batch = publish(1, *({"ignored": n} for n in range(10)))
        for _connection in range(2):
            with RawClient(broker.native_port) as publisher:
                publisher.hello("ignores-welcome")
                publisher.send(batch)
                publisher.wait_acknowledged(10)
                publisher.send(publish(4, {"ignored": 3}))
                publisher.wait_acknowledged(4)

    def test_takes_over_from_its_half_open_connection(self, broker: BrokerProcess) -> None:
        with RawClient(broker.native_port) as subscriber, RawClient(broker.native_port) as first:
            subscriber.hello()
            subscriber.subscribe(1, "over")
            first.hello("twin")
            first.send(publish(1, {"over": 1}))
            first.wait_acknowledged(1)
            with RawClient(broker.native_port) as second:
                assert second.hello("twin").acknowledged == 1
                error = first.wait_closed()
                assert error is not None
                assert error.code == "A504"
                second.send(publish(2, {"over": 2}))
                second.wait_acknowledged(2)
            assert [d.sequence for _, d in subscriber.take(2)] == [1, 2]

    def test_counts_as_duplicates(self, broker: BrokerProcess) -> None:
        before = broker_load(broker)["duplicates"]
        with RawClient(broker.native_port) as client:
            client.hello("doubling")
            client.send(publish(1, {"a": 1}, {"a": 2}), publish(1, {"a": 1}, {"a": 2}, {"a": 3}))
            client.wait_acknowledged(3)
        assert broker_load(broker)["duplicates"] == before + 2


GOOD: dict[str, Any] = {"good": 1}
BAD: list[tuple[Any, str]] = [
    ({}, "N201"),
    ({f"a{n}": n for n in range(65)}, "N202"),
    ({"": 1}, "N203"),
    ({1: 1}, "N203"),
    ({"$x": 1}, "N204"),
    ({"a": None}, "N205"),
    ({"a": [1]}, "N205"),
    ({"a": {"b": 1}}, "N205"),
    ({"a": b"1"}, "N205"),
    ({"a": "x" * 65_536}, "N206"),
    ({"a": 2**53 + 1}, "N207"),
    ({"a": NOT_A_NUMBER}, "N208"),
    ({"a": float("inf")}, "N208"),
    ({"$payload": "text", "a": 1}, "N209"),
    ({"$payload": bytes(270_000), "a": 1}, "N211"),
]


class TestABadNotification:
    @pytest.mark.parametrize(("bad", "code"), BAD, ids=[f"{code}-{at}" for at, (_, code) in enumerate(BAD)])
    def test_is_refused_with_its_code_and_its_neighbours_arrive(
        self, broker: BrokerProcess, bad: Any, code: str
    ) -> None:
        with RawClient(broker.native_port) as client:
            client.hello(f"bad-{code}-{random.random()}")
            client.subscribe(1, "*")
            client.send(publish(1, GOOD, bad, GOOD, GOOD))
            (refusal,) = decode_body(client.wait_for(Kind.REFUSE).body, list[Refusal])
            assert (refusal.sequence, refusal.code) == (2, code)
            assert refusal.message
            assert refusal.remedy
            assert [d.sequence for _, d in client.take(3)] == [1, 3, 4]

    @pytest.mark.parametrize(
        ("batch", "refused"),
        [
            ([GOOD, {}], [2]),
            ([{}, GOOD], [1]),
            ([{}], [1]),
            ([{}, {}, {}], [1, 2, 3]),
            ([{}, GOOD, {}, GOOD, {}], [1, 3, 5]),
        ],
        ids=str,
    )
    def test_is_covered_by_the_acknowledgement(
        self, broker: BrokerProcess, batch: list[Notification], refused: list[int]
    ) -> None:
        name = f"covered-{random.random()}"
        with RawClient(broker.native_port) as client:
            client.hello(name)
            client.send(publish(1, *batch))
            refusals = decode_body(client.wait_for(Kind.REFUSE).body, list[Refusal])
            assert [refusal.sequence for refusal in refusals] == refused
            client.wait_acknowledged(len(batch))
        with RawClient(broker.native_port) as client:
            assert client.hello(name).acknowledged == len(batch)

    def test_an_attribute_that_occurs_twice_is_refused(self, broker: BrokerProcess) -> None:
        twice = b"\x82\xa1a\x01\xa1a\x02"
        with RawClient(broker.native_port) as client:
            client.hello("twice")
            client.send(publish(1).replace(b"\x90", b"\x91" + twice).replace(b"\x01\0\0\0\x02", b"\x08\0\0\0\x02", 1))
            (refusal,) = decode_body(client.wait_for(Kind.REFUSE).body, list[Refusal])
            assert refusal.code == "N210"

    def test_concerns_only_the_call_that_published_it(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection, connection.subscribe("n;!last") as subscription:
                calls = [
                    connection.publish([{"n": n}, {"n": NOT_A_NUMBER}, {"n": n}] if n % 5 == 0 else {"n": n})
                    for n in range(200)
                ]
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
                for n, outcome in enumerate(outcomes):
                    if n % 5 == 0:
                        assert isinstance(outcome, NotificationError)
                        assert outcome.code == "N208"
                        assert "1 of 3" in str(outcome)
                    else:
                        assert outcome is None
                expected = [n for n in range(200) for _ in range(2 if n % 5 == 0 else 1)]
                got = await take(subscription, len(expected))
                assert sorted(d.notification["n"] for d in got) == expected

        run(scenario())

    def test_that_was_published_soon_is_told_by_flush_alone(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection:
                await connection.publish_soon({"n": NOT_A_NUMBER})
                await connection.publish({"n": 1})
                with pytest.raises(NotificationError, match="N208"):
                    await connection.flush()
                await connection.flush()

        run(scenario())

    def test_is_remembered_for_the_next_flush_with_a_bounded_number_of_others(
        self, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(publisher, "REFUSALS_REMEMBERED_MAX", 5)

        async def scenario() -> None:
            async with connect(broker.native) as connection:
                for _ in range(40):
                    await connection.publish_soon({"n": NOT_A_NUMBER})
                with pytest.raises(NotificationError, match=": 5 notifications refused"):
                    await connection.flush()

        run(scenario())

    def test_in_a_long_list_is_not_told_to_a_flush_that_goes_on_beside_it(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            long = [{"n": n, "$payload": bytes(5000)} for n in range(3000)]
            long[0] = {"n": NOT_A_NUMBER}
            async with connect(broker.native) as connection:
                publishing = asyncio.create_task(connection.publish(long))
                while not publishing.done():
                    await connection.flush()
                    await asyncio.sleep(0)
                with pytest.raises(NotificationError, match="1 of 3000"):
                    await publishing

        run(scenario())

    def test_at_the_end_of_the_block_is_raised_there(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection:
                await connection.publish_soon({"n": NOT_A_NUMBER})

        with pytest.raises(NotificationError, match="N208"):
            run(scenario())


def test_a_late_subscriber_gets_nothing_from_before(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with connect(broker.native) as connection:
            await connection.publish([{"n": n} for n in range(100)])
            async with connection.subscribe("*") as subscription:
                await connection.publish([{"n": 100}, LAST])
                assert notifications_of(await take_until(subscription, is_last)) == [{"n": 100}]

    run(scenario())
