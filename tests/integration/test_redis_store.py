"""Laws of the Redis store only: several brokers at once, and a Redis that is down, full, or less durable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis_process import RedisProcess
from store_worlds import LONG_S, RedisWorld, bodies, entry, eventually, opened, put, receipts, take, with_queue

from tidegate.errors import ConfigError, ConflictingQueue, NoSuchQueue, QueueError, Unavailable
from tidegate.messages import Dequeue, Settle
from tidegate.queues import dequeue_controller
from tidegate.queues.definition import Definition, parse_settings
from tidegate.queues.enqueue_controller import make_message
from tidegate.queues.logical_queues import LogicalQueues
from tidegate.queues.stores import redis_link, redis_listener
from tidegate.queues.stores.redis_store import RedisStore


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisProcess]:
    with RedisProcess() as process:
        yield process


@pytest.fixture
def redis(shared: RedisProcess) -> RedisProcess:
    with shared.client() as client:
        client.flushall()
    return shared


def law(check: Callable[[RedisProcess], Coroutine[Any, Any, None]]) -> Callable[[RedisProcess], None]:
    def test(redis: RedisProcess) -> None:
        asyncio.run(check(redis))

    test.__doc__ = check.__doc__
    return test


@pytest.fixture
def without_safety_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the checks that would find a message after a lost wake-up, so that such a request waits in vain."""
    monkeypatch.setattr(dequeue_controller, "SAFETY_CHECK_S", LONG_S)
    for module in (redis_listener, redis_link):
        monkeypatch.setattr(module, "BLOCK_MS", int(1000 * LONG_S))


@asynccontextmanager
async def brokers(redis: RedisProcess, count: int = 2, **settings: Any) -> AsyncIterator[list[LogicalQueues]]:
    """Yields several brokers on one Redis, which all know a queue `q`."""
    made = [LogicalQueues(RedisStore(redis.url)) for _ in range(count)]
    for each in made:
        await each.open()
    try:
        await made[0].define("q", settings)
        for each in made:
            await wait_until_known(each, "q")
        yield made
    finally:
        for each in made:
            await each.close()


async def wait_until_known(queues: LogicalQueues, name: str, *, is_known: bool = True) -> None:
    async def is_so() -> bool:
        return (name in {each.name for each in queues.definitions()}) == is_known

    await eventually(is_so)


# Several brokers.


@law
async def test_no_two_brokers_lease_the_same_message(redis: RedisProcess) -> None:
    async with with_queue(RedisWorld(redis)) as store, opened(RedisWorld(redis)) as other:
        await put(store, *range(1000))

        async def consume(each: Any) -> list[int]:
            found: list[int] = []
            while granted := await take(each, 7):
                found += bodies(granted)
                assert await each.queue("q").delete(receipts(granted)) == len(granted)
            return found

        parts = await asyncio.gather(*(consume(each) for each in (store, other, store, other)))
        assert sorted(body for part in parts for body in part) == list(range(1000))
        assert all(part == sorted(part) for part in parts)


@pytest.mark.usefixtures("without_safety_checks")
@law
async def test_messages_from_another_broker_wake_a_held_request_at_once(redis: RedisProcess) -> None:
    async with brokers(redis) as [one, other]:
        for n in range(5):
            held = asyncio.create_task(other.dequeue(Dequeue("q", wait_s=20.0)))
            await asyncio.sleep(0.05)
            await one.enqueue("q", [make_message(n)])
            [message] = await held
            await one.settle(Settle("q", "delete", [message.receipt]))


@pytest.mark.usefixtures("without_safety_checks")
@law
async def test_what_one_broker_releases_wakes_another_at_once(redis: RedisProcess) -> None:
    async with brokers(redis, physical_queues=1) as [one, other]:
        await one.enqueue("q", [make_message(1)])
        [message] = await one.dequeue(Dequeue("q", wait_s=5.0))
        held = asyncio.create_task(other.dequeue(Dequeue("q", wait_s=20.0)))
        await asyncio.sleep(0.05)
        await one.settle(Settle("q", "release", [message.receipt]))
        [again] = await held
        assert again.delivery == 2


@pytest.mark.usefixtures("without_safety_checks")
@law
async def test_a_short_lease_of_one_broker_that_ends_wakes_another(redis: RedisProcess) -> None:
    async with brokers(redis, physical_queues=1) as [one, other]:
        await one.enqueue("q", [make_message(1)])
        await one.dequeue(Dequeue("q", wait_s=5.0, visibility_s=0.2))
        [again] = await other.dequeue(Dequeue("q", wait_s=20.0))
        assert again.delivery == 2


@law
async def test_a_request_that_does_not_wait_finds_what_another_broker_has_enqueued(redis: RedisProcess) -> None:
    async with brokers(redis) as [one, other]:
        await one.enqueue("q", [make_message(1)])
        assert len(await other.dequeue(Dequeue("q", wait_s=0.0))) == 1


@law
async def test_brokers_hear_of_each_others_queues(redis: RedisProcess) -> None:
    async with brokers(redis) as [one, other]:
        await other.define("q", {"messages_max": 3})

        async def has_changed() -> bool:
            return one.definition("q").settings.messages_max == 3

        await eventually(has_changed)
        await one.drop("q")
        await wait_until_known(other, "q", is_known=False)
        with pytest.raises(NoSuchQueue):
            await other.enqueue("q", [make_message(1)])
        await other.define("q", {"physical_queues": 2})

        async def is_there() -> bool:
            return any(each.name == "q" and each.settings.physical_queues == 2 for each in one.definitions())

        await eventually(is_there)
        await one.enqueue("q", [make_message(1)])


@law
async def test_a_queue_that_another_broker_made_otherwise_is_a_conflict(redis: RedisProcess) -> None:
    async with with_queue(RedisWorld(redis)), opened(RedisWorld(redis)) as other:
        with pytest.raises(ConflictingQueue, match="Q904"):
            await other.define(Definition("q", parse_settings({"physical_queues": 2})))


@law
async def test_a_broker_that_dies_takes_no_lease_with_it(redis: RedisProcess) -> None:
    async with with_queue(RedisWorld(redis)) as store:
        await put(store, 1)
        [kept] = await take(store, visibility_s=LONG_S)
    async with opened(RedisWorld(redis)) as successor:
        assert await take(successor) == []
        assert await successor.queue("q").delete([kept.receipt]) == 1


@law
async def test_what_is_leased_for_a_caller_who_has_gone_is_given_back(redis: RedisProcess) -> None:
    async with with_queue(RedisWorld(redis)) as store:
        await put(store, *range(100))
        leasing = asyncio.create_task(take(store))
        await asyncio.sleep(0)
        leasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leasing

        async def is_free() -> bool:
            [level] = await store.queue("q").levels()
            return level.leased == 0

        await asyncio.sleep(0.05)
        await eventually(is_free)
        assert {each.delivery for each in await take(store)} == {1}


@law
async def test_a_bound_holds_for_each_physical_queue_in_equal_parts(redis: RedisProcess) -> None:
    async with with_queue(RedisWorld(redis), physical_queues=2, messages_max=3) as store:
        await put(store, 1, 2, physical=0)
        await put(store, 1, 2, physical=1)
        for physical in range(2):
            with pytest.raises(Exception, match="L608"):
                await put(store, 3, physical=physical)


@law
async def test_all_keys_of_a_queue_and_of_its_dead_letters_share_a_tag_and_go_with_it(redis: RedisProcess) -> None:
    async with with_queue(RedisWorld(redis), max_deliveries=1) as store:
        await store.queue("q").enqueue({0: [entry(1, "g", b"1" * 16), entry(2, "g")]})
        await take(store, visibility_s=0)
        await take(store)
        with redis.client() as client:
            keys = set(client.scan_iter()) - {b"tidegate:queues", b"tidegate:changes"}
            assert keys
            assert all(key.startswith(b"{q:0}:") for key in keys)
            await store.drop("q")
            assert set(client.scan_iter()) == {b"tidegate:changes"}


# A Redis that is down, full, or less durable.


def test_the_store_fails_while_redis_is_away_and_goes_on_when_it_is_back() -> None:
    async def check(redis: RedisProcess) -> None:
        async with brokers(redis, count=1, physical_queues=1) as [queues]:
            await queues.enqueue("q", [make_message(n) for n in range(100)])
            leased = await queues.dequeue(Dequeue("q", wait_s=5.0, visibility_s=LONG_S))
            held = asyncio.create_task(queues.dequeue(Dequeue("q", wait_s=15.0)))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(redis.kill)
            with pytest.raises(Unavailable, match="U707"):
                await queues.enqueue("q", [make_message("lost")])
            await asyncio.to_thread(redis.start)
            await queues.enqueue("q", [make_message("new")])
            assert len(await held) == 1
            deleted = await queues.settle(Settle("q", "delete", [each.receipt for each in leased]))
            assert deleted.done == 100, "what was acknowledged survives, and leases too"

    with RedisProcess() as redis:
        asyncio.run(check(redis))


def test_a_redis_that_has_lost_everything_gets_its_queues_back() -> None:
    async def check(redis: RedisProcess) -> None:
        async with brokers(redis, count=1) as [queues]:
            await queues.enqueue("q", [make_message("lost")])
            await asyncio.to_thread(redis.kill)
            await asyncio.to_thread(redis.start)

            async def is_there() -> bool:
                async with opened(RedisWorld(redis)) as store:
                    try:
                        return [level.messages for level in await store.queue("q").levels()] == [0] * 4
                    except NoSuchQueue:
                        return False

            await eventually(is_there)
            await queues.enqueue("q", [make_message("kept")])
            assert len(await queues.dequeue(Dequeue("q", wait_s=5.0))) == 1

    with RedisProcess(fsync=None) as redis:
        asyncio.run(check(redis))


@law
async def test_a_full_redis_refuses_messages_and_lets_consumers_empty_it(redis: RedisProcess) -> None:
    async with with_queue(RedisWorld(redis)) as store:
        await put(store, *("x" * 10_000 for _ in range(100)))
        with redis.client() as client:
            client.config_set("maxmemory", 1_000_000)
            try:
                with pytest.raises(Unavailable, match="U707"):
                    await put(store, "y")
                granted = await take(store)
                assert await store.queue("q").extend(receipts(granted), LONG_S) == 100
                assert await store.queue("q").delete(receipts(granted)) == 100
            finally:
                client.config_set("maxmemory", 0)
        assert (await store.queue("q").levels())[0].messages == 0
        await put(store, "y")


@pytest.mark.parametrize(
    ("fsync", "durability", "too_much"),
    [("always", "fsync", None), ("everysec", "os", "fsync"), (None, "memory", "os")],
)
def test_durability_is_what_redis_gives(fsync: str | None, durability: str, too_much: str | None) -> None:
    async def check(redis: RedisProcess) -> None:
        async with opened(RedisWorld(redis)) as store:
            made = await store.define(Definition("q", parse_settings({})))
            assert made.settings.durability == durability
            if too_much is not None:
                with pytest.raises(QueueError, match=f"Q910.*{too_much}.*redis.conf"):
                    await store.define(Definition("r", parse_settings({"durability": too_much})))

    with RedisProcess(fsync=fsync) as redis:
        asyncio.run(check(redis))


def test_a_url_that_is_none_is_refused_with_a_cure() -> None:
    with pytest.raises(ConfigError, match=r"C416.*redis://"):
        RedisStore("http://localhost")


def test_a_redis_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="U707"):
        asyncio.run(RedisStore("redis://127.0.0.1:1/0").open())
