"""From a publisher into a queue: notifications that a bound filter matches are stored once and in order, and
acknowledged when they are durable."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidegate.filters import Filter
from tidegate.hosts.embedded_host import EmbeddedHost
from tidegate.hosts.session import Session
from tidegate.layers.batch import BatchReader
from tidegate.layers.connection_point import Bounds
from tidegate.layers.session_events import PublishAcknowledged, SessionEvent
from tidegate.messages import Dequeue, NewMessage, Settle
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import FED_BYTES_MIN, Definition
from tidegate.queues.records import decode_record
from tidegate.queues.stores.lmdb_store import LmdbStore

READER = BatchReader()


class World:
    """An embedded host with queues, and one publisher."""

    def __init__(self, directory: Path) -> None:
        self.failures: list[Exception] = []
        self.host = EmbeddedHost(Bounds(), lambda: 0.0, self.failures.append)
        self.queues = LogicalQueues(LmdbStore(directory))
        self.queues.on_change = self.bind
        self.feeder = self.host.use_feeder(self.queues)
        self.session = Session(self.host, self)
        self.session.open()
        self.session.attach_publisher("p")
        self.acknowledged = 0
        self.sent = 0

    def bind(self, queue: str, definition: Definition | None, _is_heard: bool) -> None:
        text = definition.settings.filter if definition is not None else None
        self.host.bind(queue, Filter.parse(text) if text is not None else None)

    def on_event(self, event: SessionEvent) -> None:
        if isinstance(event, PublishAcknowledged):
            self.acknowledged = event.sequence

    def publish(self, *notifications: dict[str, Any]) -> None:
        batch = READER.read_array("p", self.sent + 1, msgspec.msgpack.encode(notifications))
        self.sent += len(notifications)
        self.session.submit([batch], self.sent)

    async def wait_acknowledged(self) -> None:
        async with asyncio.timeout(10):
            while self.acknowledged < self.sent:
                await asyncio.sleep(0.001)

    async def take(self, queue: str, *, wait_s: float = 0.0) -> list[tuple[Any, str, int]]:
        """Takes and deletes everything in a queue, and returns (notification, publisher, its sequence)."""
        found: list[tuple[Any, str, int]] = []
        while leased := await self.queues.dequeue(Dequeue(queue, wait_s=wait_s)):
            records = [decode_record(message.record) for message in leased]
            found += [(msgspec.msgpack.decode(each.body), each.device, each.sequence) for each in records]
            await self.queues.settle(Settle(queue, "delete", [message.receipt for message in leased]))
        return sorted(found, key=lambda each: each[2])

    async def close(self) -> None:
        await self.feeder.close(0.0)
        await self.queues.close()
        assert self.failures == []


def in_a_world(directory: Path, scenario: Any) -> None:
    async def run() -> None:
        world = World(directory)
        await world.queues.open()
        body: Coroutine[Any, Any, None] = scenario(world)
        await body
        await world.close()

    asyncio.run(run())


def test_a_bound_queue_gets_what_matches_and_the_publish_waits_for_the_disk(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.queues.define("hot", {"filter": "t>30"})
        await world.queues.define("all", {"filter": "*"})
        world.publish({"t": 20}, {"t": 31}, {"t": 40})
        assert world.acknowledged == 0
        await world.wait_acknowledged()
        assert await world.take("hot") == [({"t": 31}, "p", 2), ({"t": 40}, "p", 3)]
        assert len(await world.take("all")) == 3
        world.publish({"x": 1})
        await world.wait_acknowledged()
        assert world.host.queue_point.statistics().unacknowledged_batches == 0

    in_a_world(tmp_path, scenario)


def test_what_no_queue_wants_is_acknowledged_at_once(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.queues.define("hot", {"filter": "t>30"})
        world.publish({"t": 20})
        assert world.acknowledged == 1

    in_a_world(tmp_path, scenario)


def test_a_changed_filter_counts_from_now_on_and_a_dropped_queue_holds_up_nobody(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.queues.define("q", {"filter": "t>30"})
        await world.queues.define("q", {"filter": "t<10"})
        world.publish({"t": 5}, {"t": 40})
        await world.wait_acknowledged()
        assert [each[0] for each in await world.take("q")] == [{"t": 5}]
        world.publish({"t": 6})
        await world.queues.drop("q")
        await world.wait_acknowledged()
        world.publish({"t": 7})
        assert world.acknowledged == world.sent
        assert world.host.matcher.statistics().subscriptions == 0

    in_a_world(tmp_path, scenario)


def test_whoever_follows_waits_for_others_to_put_and_puts_what_nobody_does(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.queues.define("q", {"filter": "*", "physical_queues": 1})
        world.feeder.follow("q")
        world.publish({"a": 3}, {"a": 4})
        await asyncio.sleep(0.05)
        assert world.acknowledged == 0
        by_another = [NewMessage(msgspec.Raw(msgspec.msgpack.encode({"a": a})), "", "p", a - 2) for a in (3, 4)]
        await world.queues.enqueue("q", [NewMessage(msgspec.Raw(b"\x80"), "", "p", 99), *by_another])
        await world.wait_acknowledged()
        world.publish({"a": 5})
        await world.wait_acknowledged()
        places = [each.record for each in await world.queues.dequeue(Dequeue("q"))]
        assert [decode_record(each).sequence for each in places] == [99, 1, 2, 3]

    in_a_world(tmp_path, scenario)


def test_a_full_queue_holds_up_its_publisher_until_there_is_room(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.queues.define("small", {"filter": "*", "messages_max": 3})
        world.publish({"a": 1}, {"a": 2}, {"a": 3})
        await world.wait_acknowledged()
        world.publish({"a": 4})
        await asyncio.sleep(0.05)
        assert world.acknowledged == 3
        assert len(await world.take("small")) == 3
        await world.wait_acknowledged()
        assert [each[0] for each in await world.take("small", wait_s=1.0)] == [{"a": 4}]

    in_a_world(tmp_path, scenario)


def test_a_queue_may_drop_the_oldest_instead(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        settings = {"filter": "*", "messages_max": 3, "policy": "drop-oldest", "physical_queues": 1}
        await world.queues.define("last", settings)
        for value in range(10):
            world.publish({"a": value})
            await world.wait_acknowledged()
        assert [each[0]["a"] for each in await world.take("last")] == [7, 8, 9]
        assert (await world.queues.statistics("last")).dropped == 7

    in_a_world(tmp_path, scenario)


def test_a_batch_larger_than_the_queue_passes_through_it(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        latest = {"filter": "*", "messages_max": 3, "policy": "drop-oldest", "physical_queues": 1}
        await world.queues.define("last", latest)
        world.publish(*({"a": value} for value in range(10)))
        await world.wait_acknowledged()
        assert [each[0]["a"] for each in await world.take("last")] == [7, 8, 9]
        await world.queues.drop("last")
        await world.queues.define("small", {"filter": "*", "messages_max": 3, "physical_queues": 1})
        world.publish(*({"a": value} for value in range(10)))
        taken: list[int] = []
        while len(taken) < 10:
            taken += [each[0]["a"] for each in await world.take("small", wait_s=1.0)]
        await world.wait_acknowledged()
        assert taken == list(range(10))

    in_a_world(tmp_path, scenario)


@pytest.mark.parametrize("policy", ["block", "drop-oldest"])
def test_a_batch_of_more_bytes_than_the_queue_passes_through_it(tmp_path: Path, policy: str) -> None:
    async def scenario(world: World) -> None:
        bounds = {"filter": "*", "bytes_max": FED_BYTES_MIN, "policy": policy, "physical_queues": 1}
        await world.queues.define("small", bounds)
        world.publish(*({"a": value, "$payload": b"x" * (FED_BYTES_MIN // 5)} for value in range(10)))
        taken: list[int] = []
        while 9 not in taken:
            taken += [each[0]["a"] for each in await world.take("small", wait_s=1.0)]
        await world.wait_acknowledged()
        assert taken == (sorted(taken) if policy == "drop-oldest" else list(range(10)))

    in_a_world(tmp_path, scenario)


def test_a_batch_that_comes_again_after_a_restart_is_kept_once(tmp_path: Path) -> None:
    async def first(world: World) -> None:
        await world.queues.define("q", {"filter": "*"})
        world.publish({"a": 1}, {"a": 2})
        await world.wait_acknowledged()

    async def second(world: World) -> None:
        world.publish({"a": 1}, {"a": 2}, {"a": 3})
        await world.wait_acknowledged()
        assert [each[0]["a"] for each in await world.take("q")] == [1, 2, 3]

    in_a_world(tmp_path, first)
    in_a_world(tmp_path, second)


def test_a_mistake_of_ours_on_the_way_into_a_queue_does_not_go_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World) -> None:
        async def fail(*_arguments: object, **_options: object) -> None:
            raise RuntimeError("a mistake")

        await world.queues.define("q", {"filter": "*"})
        monkeypatch.setattr(world.queues, "feed", fail)
        world.publish({"a": 1})
        async with asyncio.timeout(10):
            while not world.failures:
                await asyncio.sleep(0.001)
        assert [str(failure) for failure in world.failures] == ["a mistake"]
        assert world.acknowledged == 0
        world.failures.clear()

    in_a_world(tmp_path, scenario)


def test_a_named_subscription_is_a_queue_of_one_physical_queue(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        definition = await world.queues.define_subscription("dash", "t>30")
        assert await world.queues.define_subscription("dash", "t>30") == definition
        for value in range(25, 45):
            world.publish({"t": value})
        await world.wait_acknowledged()
        leased = await world.queues.dequeue(Dequeue("subscription.dash", wait_s=0))
        assert [msgspec.msgpack.decode(decode_record(each.record).body)["t"] for each in leased] == list(range(31, 45))

    in_a_world(tmp_path, scenario)


def test_a_refused_notification_that_is_sent_again_after_a_restart_is_stored(tmp_path: Path) -> None:
    """Notifications after a refusal must not claim the refused one. Otherwise it would count as a duplicate and be
    lost."""

    async def fill_and_refuse(world: World) -> None:
        await world.queues.define("q", {"filter": "n", "messages_max": 2, "physical_queues": 1, "block_s": 0})
        world.publish({"n": 1}, {"n": 2})
        await world.wait_acknowledged()
        # The second waits for the queue while the first is refused.
        world.publish({"n": 3})
        world.publish({"n": 4})
        await world.wait_acknowledged()
        refused = world.session.refused(1, world.sent)
        assert [(each.first, each.last) for each in refused] == [(3, 4)]
        assert [body["n"] for body, _publisher, _sequence in await world.take("q")] == [1, 2]
        world.publish({"n": 5}, {"n": 6})
        await world.wait_acknowledged()
        assert [body["n"] for body, _publisher, _sequence in await world.take("q")] == [5, 6]

    async def send_again(world: World) -> None:
        world.sent = 2
        for number in range(3, 7):
            world.publish({"n": number})
        await world.wait_acknowledged()
        assert [body["n"] for body, _publisher, _sequence in await world.take("q")] == [3, 4]

    in_a_world(tmp_path, fill_and_refuse)
    in_a_world(tmp_path, send_again)
