"""The laws of `queues.store` for LMDB and for Redis: both stores behave the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_process import RedisProcess
from store_worlds import (
    LONG_S,
    LmdbWorld,
    RedisWorld,
    World,
    bodies,
    body_of,
    entry,
    eventually,
    opened,
    put,
    receipts,
    record_of,
    take,
    with_queue,
)

from tidegate.errors import NoSuchQueue, Overloaded, QueueError
from tidegate.messages import BATCH_NUMBER_MAX, Level
from tidegate.queues.dead_letters import DELIVERIES, QUEUE, REASON, SEQUENCE
from tidegate.queues.definition import Definition, QueueSettings, parse_settings
from tidegate.queues.records import decode_record, unseal
from tidegate.queues.store import PRODUCERS_MAX, Numbered, Store


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with RedisProcess() as process:
        yield process


@pytest.fixture(params=["lmdb", "redis"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    if request.param == "lmdb":
        return LmdbWorld(tmp_path)
    process = request.getfixturevalue("redis")
    with process.client() as client:
        client.flushall()
    return RedisWorld(process)


def law(check: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[World], None]:
    def test(world: World) -> None:
        asyncio.run(check(world))

    test.__doc__ = check.__doc__
    return test


# Order, leases.


@law
async def test_messages_come_in_order_with_sequences_from_1(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a", "b")
        await put(store, "c")
        granted = await store.queue("q").lease(0, 2, 1 << 30, LONG_S)
        assert bodies(granted.leased) == ["a", "b"]
        assert [(each.sequence, each.delivery) for each in granted.leased] == [(1, 1), (2, 1)]
        assert granted.waiting == 1
        assert bodies(await take(store)) == ["c"]
        assert await take(store) == []


@law
async def test_what_is_leased_is_nobody_elses_until_its_time_is_over(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a")
        [kept] = await take(store, visibility_s=LONG_S)
        assert await take(store) == []
        assert await store.queue("q").extend([kept.receipt], 0.0) == 1
        assert [each.delivery for each in await take(store)] == [2]


@law
async def test_visibility_of_0_is_over_at_once(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a")
        [first] = await take(store, visibility_s=0)
        [second] = await take(store)
        assert (first.delivery, second.delivery) == (1, 2)
        assert store.queue("q").counts().expired == 1
        assert store.queue("q").counts().redelivered == 1


@law
async def test_what_is_to_be_delivered_again_comes_before_what_never_was(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a", "b", "c")
        granted = await take(store, 2)
        assert await store.queue("q").release(receipts(granted)[::-1], 0.0) == 2
        assert bodies(await take(store)) == ["a", "b", "c"]


@law
async def test_a_delayed_release_hides_the_message_and_ends_the_lease(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a")
        [kept] = await take(store)
        assert await store.queue("q").release([kept.receipt], LONG_S) == 1
        assert await take(store) == []
        assert await store.queue("q").extend([kept.receipt], 0.0) == 0
        assert await store.queue("q").delete([kept.receipt]) == 0


@law
async def test_a_delayed_release_comes_again_when_the_delay_is_over(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a")
        await store.queue("q").release(receipts(await take(store)), 0.05)

        async def is_there() -> bool:
            return [each.delivery for each in await take(store)] == [2]

        await eventually(is_there)


@law
async def test_what_is_given_back_was_not_delivered(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a")
        for _ in range(10):
            [kept] = await take(store)
            assert kept.delivery == 1
            assert await store.queue("q").give_back([kept.receipt]) == 1


@law
async def test_what_is_given_back_was_not_delivered_after_a_start_either(world: World) -> None:
    async with with_queue(world, max_deliveries=3) as store:
        await put(store, "a")
        for _ in range(2):
            await take(store, visibility_s=0)
        [last] = await take(store)
        assert last.delivery == 3
        await store.queue("q").give_back([last.receipt])
    async with opened(world) as store:
        assert [each.delivery for each in await take(store)] == [3]


@law
async def test_when_leases_are_ended_all_messages_wait_in_order_and_receipts_are_stale(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a", "b", "c", "d")
        before = await take(store, 2) + await take(store, 1)
        assert await store.queue("q").end_leases() == 3
        assert await store.queue("q").delete(receipts(before)) == 0
        again = await take(store)
        assert bodies(again) == ["a", "b", "c", "d"]
        assert [each.delivery for each in again] == [2, 2, 2, 1]
        assert await store.queue("q").delete(receipts(again)) == 4
        assert await store.queue("q").end_leases() == 0


@law
async def test_a_store_knows_what_it_was_given_lately(world: World) -> None:
    one, two = entry(1, identity=b"one"), entry(2, identity=b"two")
    async with with_queue(world) as store:
        assert not await store.queue("q").has({0: [one]})
        await store.queue("q").enqueue({0: [one]})
        assert await store.queue("q").has({0: [one]})
        assert not await store.queue("q").has({0: [one, two]})
        await store.queue("q").delete(receipts(await take(store)))
        assert await store.queue("q").has({0: [one]})


@law
async def test_stale_receipts_do_nothing(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a", "b")
        [expired] = await take(store, 1, visibility_s=0)
        [again] = await take(store, 1)
        [deleted] = await take(store, 1)
        assert await store.queue("q").delete([deleted.receipt, deleted.receipt]) == 1
        stale = [expired.receipt, deleted.receipt, "0.77.1.0", "5.1.1.0", again.receipt.replace(".2.", ".3.")]
        assert await store.queue("q").delete(stale) == 0
        assert await store.queue("q").extend(stale, 0.0) == 0
        assert await store.queue("q").release(stale, 0.0) == 0
        assert await store.queue("q").give_back(stale) == 0
        assert await store.queue("q").delete([again.receipt]) == 1
        with pytest.raises(QueueError, match="Q907"):
            await store.queue("q").delete(["nonsense"])


@law
async def test_a_lease_is_bounded_by_bytes_but_gives_at_least_one(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, *("x" * 1000 for _ in range(10)))
        assert len((await store.queue("q").lease(0, 10, 1, LONG_S)).leased) == 1
        assert len((await store.queue("q").lease(0, 10, 2500, LONG_S)).leased) == 2
        assert len((await store.queue("q").lease(0, 10, 1 << 30, LONG_S)).leased) == 7


@law
async def test_no_more_than_leased_max_are_leased(world: World) -> None:
    async with with_queue(world, leased_max=3) as store:
        await put(store, *range(10))
        first = await take(store)
        assert bodies(first) == [0, 1, 2]
        granted = await store.queue("q").lease(0, 10, 1 << 30, LONG_S)
        assert (granted.leased, granted.waiting) == ([], 0)
        await store.queue("q").delete(receipts(first[:2]))
        assert bodies(await take(store)) == [3, 4]


@law
async def test_deleted_is_deleted(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a", "b")
        [first, _second] = await take(store)
        assert await store.queue("q").delete([first.receipt]) == 1
        assert (await store.queue("q").read(0, 1, 99, 99)).sequences == [2]
        assert store.queue("q").counts().deleted == 1
    async with opened(world) as store:
        assert (await store.queue("q").levels())[0].messages == 1


# Enqueueing.


@law
async def test_what_was_sent_twice_is_kept_once(world: World) -> None:
    async with with_queue(world) as store:
        first, second = entry("a", identity=b"1" * 16), entry("b", identity=b"2" * 16)
        assert await store.queue("q").enqueue({0: [first, first]}) == 1
        assert await store.queue("q").enqueue({0: [first, second]}) == 1
        await store.queue("q").delete(receipts(await take(store)))
        assert await store.queue("q").enqueue({0: [first]}) == 1
        assert (store.queue("q").counts().enqueued, store.queue("q").counts().duplicates) == (2, 3)
    async with opened(world) as store:
        assert await store.queue("q").enqueue({0: [second, entry("c")]}) == 1
        assert bodies(await take(store)) == ["c"]


@law
async def test_identities_are_forgotten_by_count_oldest_first(world: World) -> None:
    async with with_queue(world, deduplication_messages_max=2) as store:
        first, second, third = (entry(name, identity=name.encode() * 16) for name in "abc")
        for each in (first, second, third):
            assert await store.queue("q").enqueue({0: [each]}) == 0
        assert await store.queue("q").enqueue({0: [third]}) == 1
        assert await store.queue("q").enqueue({0: [first]}) == 0


@law
async def test_identities_are_forgotten_by_time(world: World) -> None:
    async with with_queue(world, deduplication_s=0.02) as store:
        repeated = entry("a", identity=b"1" * 16)
        assert await store.queue("q").enqueue({0: [repeated]}) == 0
        await asyncio.sleep(0.05)
        assert await store.queue("q").enqueue({0: [repeated]}) == 0


@law
async def test_a_queue_without_deduplication_keeps_everything(world: World) -> None:
    async with with_queue(world, deduplication_s=0) as store:
        repeated = entry("a", identity=b"1" * 16)
        assert await store.queue("q").enqueue({0: [repeated, repeated]}) == 0
        assert len(await take(store)) == 2


@law
async def test_a_queue_that_is_full_by_count_refuses_the_whole_batch(world: World) -> None:
    async with with_queue(world, messages_max=3) as store:
        await put(store, 1, 2)
        again = entry(3, identity=b"1" * 16)
        with pytest.raises(Overloaded, match=r"L608.*messages_max"):
            await store.queue("q").enqueue({0: [again, entry(4)]})
        assert store.queue("q").counts().refused == 2
        assert await store.queue("q").enqueue({0: [again]}) == 0, "what was refused is no duplicate"
        with pytest.raises(Overloaded):
            await put(store, 5)
        await store.queue("q").delete(receipts(await take(store, 1)))
        await put(store, 6)
        assert bodies(await take(store)) == [2, 3, 6]


@law
async def test_a_queue_that_is_full_by_bytes_refuses(world: World) -> None:
    async with with_queue(world, bytes_max=2500) as store:
        await put(store, "x" * 1000, "y" * 1000)
        with pytest.raises(Overloaded, match=r"L608.*bytes_max"):
            await put(store, "z" * 1000)
        await put(store, "z")
        await store.queue("q").delete(receipts(await take(store, 1)))
        await put(store, "z" * 1000)


@law
async def test_to_make_room_the_oldest_go(world: World) -> None:
    async with with_queue(world, messages_max=3) as store:
        await put(store, 1, 2, 3)
        await store.queue("q").enqueue({0: [entry(4), entry(5)]}, make_room=True)
        assert bodies(await take(store)) == [3, 4, 5]
        assert store.queue("q").counts().dropped == 2


@law
async def test_to_make_room_for_bytes_the_oldest_go(world: World) -> None:
    async with with_queue(world, bytes_max=2500) as store:
        await put(store, "x" * 1000, "y" * 1000)
        await store.queue("q").enqueue({0: [entry("z" * 1200)]}, make_room=True)
        assert [body[0] for body in bodies(await take(store))] == ["y", "z"]


@law
async def test_to_make_room_what_is_leased_stays(world: World) -> None:
    async with with_queue(world, messages_max=3) as store:
        await put(store, 1, 2, 3)
        [kept] = await take(store, 1)
        await store.queue("q").enqueue({0: [entry(4)]}, make_room=True)
        await store.queue("q").release([kept.receipt], 0.0)
        assert bodies(await take(store)) == [1, 3, 4]
        with pytest.raises(Overloaded):
            await store.queue("q").enqueue({0: [entry(5)]}, make_room=True)


@law
async def test_to_make_room_what_was_released_goes_first(world: World) -> None:
    async with with_queue(world, messages_max=3) as store:
        await put(store, 1, 2, 3)
        kept = await take(store, 1)
        await store.queue("q").enqueue({0: [entry(4)]}, make_room=True)
        await store.queue("q").release(receipts(kept), 0.0)
        await store.queue("q").enqueue({0: [entry(5)]}, make_room=True)
        assert bodies(await take(store)) == [3, 4, 5]


# Numbered batches.

ONE, OTHER = b"1" * 16, b"2" * 16


async def put_numbered(store: Store, number: int, *bodies: Any, producer: bytes = ONE, physical: int = 0) -> int:
    """Puts a numbered batch, and returns how many of its messages were duplicates."""
    entries = {physical: [entry(body) for body in bodies]}
    return await store.queue("q").enqueue(entries, numbered=Numbered(producer, number))


@law
async def test_a_number_that_is_not_above_the_producers_last_keeps_nothing(world: World) -> None:
    async with with_queue(world, deduplication_s=0) as store:
        assert await put_numbered(store, 7, "a", "b") == 0
        assert await put_numbered(store, 7, "b", "a") == 2, "in another order"
        assert await put_numbered(store, 3, "c") == 1, "a lower number"
        assert await put_numbered(store, 3, "d", producer=OTHER) == 0, "another producer counts for itself"
        assert await put_numbered(store, 8, "e") == 0
        assert (store.queue("q").counts().enqueued, store.queue("q").counts().duplicates) == (4, 3)
        granted = await take(store)
        assert bodies(granted) == ["a", "b", "d", "e"]
        await store.queue("q").delete(receipts(granted))
    async with opened(world) as store:
        assert await put_numbered(store, 8, "e") == 1, "after a start, and when its messages are gone"
        assert await put_numbered(store, 9, "f") == 0
        assert bodies(await take(store)) == ["f"]


@law
async def test_the_largest_number_is_exact(world: World) -> None:
    async with with_queue(world) as store:
        assert await put_numbered(store, BATCH_NUMBER_MAX - 1, "a") == 0
        assert await put_numbered(store, BATCH_NUMBER_MAX, "b") == 0
        assert await put_numbered(store, BATCH_NUMBER_MAX, "b") == 1


@law
async def test_each_physical_queue_has_marks_of_its_own(world: World) -> None:
    """If a batch has reached only some of its physical queues, its repetition reaches the others."""
    async with with_queue(world, physical_queues=2) as store:
        assert await put_numbered(store, 1, "a", physical=1) == 0
        batches = {0: [entry("b"), entry("c")], 1: [entry("a")]}
        assert await store.queue("q").enqueue(batches, numbered=Numbered(ONE, 1)) == 1
        assert await store.queue("q").enqueue(batches, numbered=Numbered(ONE, 1)) == 3
        assert [bodies(await take(store, physical=physical)) for physical in (0, 1)] == [["b", "c"], ["a"]]


@law
async def test_a_numbered_batch_that_is_refused_sets_no_mark(world: World) -> None:
    async with with_queue(world, messages_max=3) as store:
        await put(store, 1, 2)
        with pytest.raises(Overloaded, match="L608"):
            await put_numbered(store, 1, 3, 4)
        await store.queue("q").delete(receipts(await take(store)))
        assert await put_numbered(store, 1, 3, 4) == 0
        assert bodies(await take(store)) == [3, 4]


@law
async def test_of_the_same_batch_from_several_at_once_one_is_kept(world: World) -> None:
    async with with_queue(world) as store:
        duplicates = await asyncio.gather(*(put_numbered(store, 1, "a", "b") for _ in range(10)))
        assert sorted(duplicates) == [0] + 9 * [2]
        assert bodies(await take(store)) == ["a", "b"]


async def put_many_producers(store: Store, count: int) -> None:
    for start in range(0, count, 500):
        some = [number.to_bytes(16, "big") for number in range(start, min(start + 500, count))]
        await asyncio.gather(*(put_numbered(store, 1, 0, producer=each) for each in some))


@law
async def test_the_producers_that_came_last_are_remembered(world: World) -> None:
    async with with_queue(world, durability="memory") as store:
        await put_numbered(store, 1, 0, producer=ONE)
        await put_numbered(store, 1, 0, producer=OTHER)
        await put_many_producers(store, PRODUCERS_MAX - 2)
        await put_numbered(store, 2, 0, producer=ONE)
        await put_numbered(store, 1, 0, producer=b"3" * 16)
        assert await put_numbered(store, 2, 0, producer=ONE) == 1, "it has come again"
        assert await put_numbered(store, 1, 0, producer=OTHER) == 0, "all others came after it"


@law
async def test_the_order_of_producers_survives_a_start(world: World) -> None:
    async with with_queue(world, durability="os") as store:
        await put_numbered(store, 1, 0, producer=OTHER)
        await asyncio.sleep(0.002)  # marks are ordered by milliseconds
        await put_numbered(store, 1, 0, producer=ONE)
    async with opened(world) as store:
        await put_many_producers(store, PRODUCERS_MAX - 1)
        assert await put_numbered(store, 1, 0, producer=ONE) == 1
        assert await put_numbered(store, 1, 0, producer=OTHER) == 0


@law
async def test_a_queue_of_the_same_name_knows_no_producer_of_the_one_before(world: World) -> None:
    async with with_queue(world) as store:
        await put_numbered(store, 5, "a")
        await store.drop("q")
        await store.define(Definition("q", parse_settings({"physical_queues": 1})))
        assert await put_numbered(store, 1, "b") == 0


# Groups.


@law
async def test_while_one_of_a_group_is_leased_the_others_wait(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a1", group="a")
        await put(store, "a2", group="a")
        await put(store, "b1", group="b")
        await put(store, "c")
        [first] = await take(store, 1)
        others = await take(store)
        assert bodies(others) == ["b1", "c"]
        assert (await store.queue("q").levels())[0].waiting == 0
        await put(store, "a3", group="a")
        assert await take(store) == []
        await store.queue("q").delete([first.receipt])
        assert bodies(await take(store)) == ["a2", "a3"]


@law
async def test_one_lease_may_have_several_of_a_group(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, 1, 2, 3, group="a")
        granted = await take(store, 2)
        assert bodies(granted) == [1, 2]
        assert await take(store) == []
        await store.queue("q").delete(receipts(granted[1:]))
        assert await take(store) == [], "the first is leased still"
        await store.queue("q").release(receipts(granted[:1]), 0.0)
        assert bodies(await take(store)) == [1, 3]


@law
async def test_a_released_message_waits_for_its_group(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, 1, 2, group="a")
        [first, second] = await take(store)
        await store.queue("q").release([first.receipt], 0.0)
        assert await take(store) == []
        await store.queue("q").release([second.receipt], 0.0)
        assert bodies(await take(store)) == [1, 2]


@law
async def test_a_delayed_message_holds_up_its_group_only(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, 1, 2, group="a")
        await put(store, 3, group="b")
        await store.queue("q").release(receipts(await take(store, 1)), LONG_S)
        assert bodies(await take(store)) == [3]


@law
async def test_expiry_frees_a_group_in_order(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, 1, group="a")
        await put(store, 2, group="a")
        await take(store, 1, visibility_s=0)
        assert bodies(await take(store)) == [1, 2]


# Suspects and dead letters.


@law
async def test_a_message_that_failed_twice_is_given_alone(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, *range(3))
        for _ in range(2):
            await store.queue("q").release(receipts(await take(store)), 0.0)
        await put(store, 3)
        alone = [await take(store) for _ in range(3)]
        assert [bodies(each) for each in alone] == [[0], [1], [2]]
        assert bodies(await take(store)) == [3]


@law
async def test_a_message_with_one_delivery_left_is_given_alone(world: World) -> None:
    async with with_queue(world, max_deliveries=2) as store:
        await put(store, 1, 2)
        await store.queue("q").release(receipts(await take(store)), 0.0)
        assert [len(await take(store)) for _ in range(2)] == [1, 1]


async def fail(store: Store, times: int) -> None:
    """Delivers and releases the first message this many times."""
    for _ in range(times):
        await store.queue("q").release(receipts(await take(store, 1)), 0.0)


async def wait_for_dead_letters(store: Store, count: int) -> None:
    async def are_there() -> bool:
        return sum(level.messages for level in await store.queue("q.dead").levels()) == count

    await eventually(are_there)


@law
async def test_what_was_delivered_too_often_is_a_dead_letter_with_its_history(world: World) -> None:
    async with with_queue(world, max_deliveries=2) as store:
        await put(store, "poison", group="g")
        await put(store, "fine")
        await fail(store, 2)
        assert bodies(await take(store)) == ["fine"]
        await wait_for_dead_letters(store, 1)
        assert store.queue("q").counts().dead_lettered == 1
        [dead] = await take(store, queue="q.dead")
        assert (bodies([dead])[0], dead.delivery) == ("poison", 1)
        headers = decode_record(dead.record).headers
        assert (headers[QUEUE], headers[SEQUENCE], headers[DELIVERIES]) == ("q", "1", "2")
        assert "2 times" in headers[REASON]
        [(_sequence, sealed)] = (await store.queue("q.dead").read(0, 1, 99, 99)).split()
        assert unseal(bytes(sealed)) == bytes(dead.record)
        assert await store.queue("q.dead").delete([dead.receipt]) == 1


@law
async def test_a_dead_letter_frees_its_group(world: World) -> None:
    async with with_queue(world, max_deliveries=1) as store:
        await put(store, "poison", group="g")
        await put(store, "next", group="g")
        await fail(store, 1)
        assert bodies(await take(store)) == ["next"]


@law
async def test_never_a_dead_letter_where_deliveries_have_no_limit(world: World) -> None:
    async with with_queue(world, max_deliveries=0) as store:
        await put(store, "a")
        await fail(store, 20)
        assert [each.delivery for each in await take(store)] == [21]


@law
async def test_redriven_is_as_never_delivered(world: World) -> None:
    async with with_queue(world, max_deliveries=1) as store:
        await put(store, "a")
        await put(store, "b")
        await fail(store, 2)
        assert await take(store) == []
        await wait_for_dead_letters(store, 2)
        [held] = await take(store, 1, queue="q.dead")
        assert await store.queue("q").redrive(99) == 1, "what is leased stays"
        [again] = await take(store)
        assert (bodies([again])[0], again.delivery, decode_record(again.record).headers) == ("b", 1, {})
        await store.queue("q.dead").release([held.receipt], 0.0)
        assert await store.queue("q").redrive(1) == 1
        assert await store.queue("q").redrive(1) == 0
        assert bodies(await take(store)) == ["a"]


@law
async def test_a_redrive_does_not_overfill_the_queue(world: World) -> None:
    async with with_queue(world, max_deliveries=1, messages_max=1) as store:
        await put(store, "a")
        await fail(store, 1)
        assert await take(store) == []
        await wait_for_dead_letters(store, 1)
        await put(store, "b")
        with pytest.raises(Overloaded, match="L608"):
            await store.queue("q").redrive(99)
        await wait_for_dead_letters(store, 1)


# Ranges.


@law
async def test_a_range_is_read_again_and_again_leased_or_not(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, *range(1, 6))
        await take(store, 2)
        for _ in range(2):
            found = (await store.queue("q").read(0, 2, 5, 99)).split()
            assert [(sequence, body_of(bytes(sealed))) for sequence, sealed in found] == [(2, 2), (3, 3), (4, 4)]
        assert len((await store.queue("q").read(0, 0, 1 << 62, 2)).sequences) == 2
        assert await store.queue("q").read(0, 6, 1 << 62, 99) == ([], [], b"")
        assert await store.queue("q").read(0, 0, 0, 99) == ([], [], b"")


@law
async def test_what_lies_below_is_deleted_once(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, *range(1, 6))
        leased = await take(store, 1)
        assert [await store.queue("q").delete_below(0, 3) for _ in range(2)] == [2, 0]
        assert await store.queue("q").delete(receipts(leased)) == 0
        assert await store.queue("q").delete_below(0, 0) == 0
        assert bodies(await take(store, 1)) == [3]
        assert await store.queue("q").delete_below(0, 1 << 40) == 3
        await put(store, 6)
        assert [(each.sequence, bodies([each])[0]) for each in await take(store)] == [(6, 6)]


@law
async def test_what_lies_below_is_deleted_in_groups_too(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, 1, group="a")
        await put(store, 2, group="a")
        await put(store, 3, group="a")
        await take(store, 1)
        assert await take(store) == []
        assert await store.queue("q").delete_below(0, 3) == 2
        assert (await store.queue("q").levels())[0].waiting == 1
        assert bodies(await take(store)) == [3]


@law
async def test_many_are_deleted_and_redriven_in_several_steps(world: World) -> None:
    async with with_queue(world, max_deliveries=1) as store:
        await put(store, *range(2500))
        await store.queue("q").release(receipts(await take(store, 2500)), 0.0)
        assert await take(store) == []
        await wait_for_dead_letters(store, 2500)
        assert await store.queue("q").redrive(2400) == 2400
        assert await store.queue("q").redrive(9999) == 100
        assert await store.queue("q").delete_below(0, 1 << 40) == 2500


@law
async def test_a_corrupt_record_is_set_aside(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a", "b", "c")
    world.spoil("q", 2)
    async with opened(world) as store:
        granted, corrupt, _waiting = await store.queue("q").lease(0, 100, 1 << 30, LONG_S)
        assert (bodies(granted), corrupt) == (["a", "c"], [2])
        await store.queue("q").set_aside(0, 2)
        await store.queue("q").set_aside(0, 2)
        assert store.queue("q").counts().corrupt == 1
        assert (await store.queue("q").levels())[0].messages == 2
        stale = granted[0].receipt.replace("0.1.", "0.2.", 1)
        assert await store.queue("q").delete([*receipts(granted), stale]) == 2
    assert world.kept_aside("q") == [b"garbage"]


# Levels, definitions.


@law
async def test_levels_tell_how_full_it_is(world: World) -> None:
    async with with_queue(world, physical_queues=2) as store:
        assert await store.queue("q").levels() == [Level(0, 0, 0, 0, None, 1, 1)] * 2
        entries = [entry("a"), entry("b"), entry("c")]
        await store.queue("q").enqueue({1: entries})
        granted = await take(store, 2, physical=1)
        await store.queue("q").delete(receipts(granted[:1]))
        [empty, level] = await store.queue("q").levels()
        assert empty.messages == 0
        size_bytes = len(entries[1].sealed) + len(entries[2].sealed)
        assert level == Level(2, size_bytes, 1, 1, record_of(entries[1].sealed).enqueued_at, 2, 4)


@law
async def test_definitions_and_messages_are_there_after_a_start(world: World) -> None:
    async with with_queue(world, messages_max=77) as store:
        await put(store, "a", "b")
        await store.queue("q").delete(receipts(await take(store, 1)))
    store = world.make()
    definitions = {each.name: each.settings for each in await store.open()}
    try:
        assert definitions.keys() == {"q", "q.dead"}
        assert (definitions["q"].messages_max, definitions["q.dead"].max_deliveries) == (77, 0)
        [(sequence, sealed)] = (await store.queue("q").read(0, 0, 99, 99)).split()
        assert (sequence, body_of(bytes(sealed))) == (2, "b")
        await put(store, "c")
        assert (await store.queue("q").read(0, 0, 99, 99)).sequences == [2, 3]
    finally:
        await store.close()


@law
async def test_settings_that_change_hold_at_once(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, 1)
        same = await store.define(Definition("q", QueueSettings(physical_queues=1)))
        assert same.settings.durability is not None
        changed = parse_settings({"physical_queues": 1, "messages_max": 1})
        await store.define(Definition("q", changed))
        with pytest.raises(Overloaded):
            await put(store, 2)


@law
async def test_a_dropped_queue_is_gone_with_its_messages(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, "a")
        await store.drop("q")
        with pytest.raises(NoSuchQueue):
            await put(store, "a")
    async with with_queue(world) as store:
        assert await take(store) == []
        await put(store, "b")
        assert bodies(await take(store)) == ["b"]


# Wake-ups.


class Ready:
    """Records the calls of `on_ready`."""

    def __init__(self, store: Store, queue: str = "q") -> None:
        self._told = asyncio.Event()
        self.last = (-1, -1)
        store.queue(queue).watch(self._on_ready)
        store.queue(queue).listen(is_on=True)

    def _on_ready(self, physical: int, waiting: int) -> None:
        self.last = (physical, waiting)
        self._told.set()

    async def wait_for(self, physical: int, waiting: int) -> None:
        async with asyncio.timeout(4):  # sooner than any safety check
            while self.last != (physical, waiting):
                self._told.clear()
                await self._told.wait()
        self.last = (-1, -1)


@law
async def test_messages_that_come_wake(world: World) -> None:
    async with with_queue(world, physical_queues=2) as store:
        ready = Ready(store)
        await put(store, 1, 2, physical=1)
        await ready.wait_for(1, 2)
        await put(store, 3, physical=0)
        await ready.wait_for(0, 1)


@law
async def test_messages_that_are_free_again_wake(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, 1, 2)
        ready = Ready(store)
        granted = await take(store)
        await store.queue("q").release(receipts(granted[:1]), 0.0)
        await ready.wait_for(0, 1)
        await store.queue("q").give_back(receipts(granted[1:]))
        await ready.wait_for(0, 2)
        await store.queue("q").release(receipts(await take(store)), 0.05)
        await ready.wait_for(0, 2)
        await take(store, visibility_s=0.05)
        await ready.wait_for(0, 2)


@law
async def test_a_group_that_is_free_wakes(world: World) -> None:
    async with with_queue(world) as store:
        await put(store, 1, group="a")
        await put(store, 2, group="a")
        granted = await take(store, 1)
        assert await take(store) == []
        ready = Ready(store)
        await store.queue("q").delete(receipts(granted))
        await ready.wait_for(0, 1)


@law
async def test_dead_letters_wake(world: World) -> None:
    async with with_queue(world, max_deliveries=1) as store:
        ready = Ready(store, "q.dead")
        await put(store, 1)
        await fail(store, 1)
        await take(store)
        await ready.wait_for(0, 1)


# Lifetime, and when a queue was last read.


async def put_aged(store: Store, age_s: float, *bodies: Any, group: str = "") -> None:
    await store.queue("q").enqueue({0: [entry(body, group, age_s=age_s) for body in bodies]})


@law
async def test_a_message_that_is_too_old_is_not_delivered_but_removed_and_counted(world: World) -> None:
    async with with_queue(world, lifetime_s=60) as store:
        await put_aged(store, 100, "old", "older")
        await put_aged(store, 100, "in a group", group="x" * 40)
        await put_aged(store, 1, "young")
        assert bodies(await take(store)) == ["young"]

        async def is_removed() -> bool:
            return (await store.queue("q").levels())[0].messages == 1

        await eventually(is_removed)
        assert store.queue("q").counts().expired_messages == 3
        assert (await store.queue("q.dead").levels())[0].messages == 0


@law
async def test_old_messages_are_removed_in_steps_though_nobody_takes_any(world: World) -> None:
    async with with_queue(world, lifetime_s=60) as store:
        await put_aged(store, 100, *range(5))
        await put_aged(store, 0, "young")
        before_s = time.time() - 60
        assert await store.queue("q").expire(before_s, 3) == 3
        assert (await store.queue("q").levels())[0].messages == 3
        assert await store.queue("q").expire(before_s, 3) == 2
        assert await store.queue("q").expire(before_s, 3) == 0
        assert bodies(await take(store)) == ["young"]
        assert store.queue("q").counts().expired_messages == 5


@law
async def test_whoever_has_leased_a_message_keeps_it_though_it_gets_too_old(world: World) -> None:
    async with with_queue(world) as store:
        await put_aged(store, 100, "leased", "waits", "released")
        leased, waits, released = await take(store)
        await store.queue("q").release([released.receipt], 0.0)
        await store.queue("q").give_back([waits.receipt])
        await store.define(Definition("q", parse_settings({"physical_queues": 1, "lifetime_s": 60})))
        assert await store.queue("q").expire(time.time() - 60, 10) == 2
        assert await store.queue("q").delete([leased.receipt]) == 1
        assert await take(store) == []
        assert (await store.queue("q").levels())[0].messages == 0


@law
async def test_old_messages_become_dead_letters_where_that_is_chosen(world: World) -> None:
    async with with_queue(world, lifetime_s=60, after_lifetime="dead-letter") as store:
        await put_aged(store, 100, "swept")
        assert await store.queue("q").expire(time.time() - 60, 10) == 1
        await put_aged(store, 100, "leased")
        assert await take(store) == []

        async def are_dead() -> bool:
            return (await store.queue("q.dead").levels())[0].messages == 2

        await eventually(are_dead)
        dead = await take(store, queue="q.dead")
        assert bodies(dead) == ["swept", "leased"]
        for each in dead:
            assert decode_record(each.record).headers[REASON] == "older than the queue's lifetime_s"
        assert (store.queue("q").counts().expired_messages, store.queue("q").counts().dead_lettered) == (2, 2)


@law
async def test_deletes_and_the_removal_of_old_messages_at_once_count_each_message_once(world: World) -> None:
    async with with_queue(world) as store:
        await put_aged(store, 100, *range(50))
        leased = await take(store, 20)
        deleting = asyncio.create_task(store.queue("q").delete(receipts(leased)))
        await asyncio.sleep(0)
        removed = await store.queue("q").expire(time.time() - 60, 100)
        assert await deleting == 20
        assert removed in (30, 50 - 20)
        assert (await store.queue("q").levels())[0].messages == 0
        assert (await store.queue("q").levels())[0].bytes == 0


@law
async def test_a_range_that_is_deleted_while_old_messages_are_removed_is_counted_once(world: World) -> None:
    async with with_queue(world) as store:
        await put_aged(store, 100, *range(50))
        deleting = asyncio.create_task(store.queue("q").delete_below(0, 31))
        await asyncio.sleep(0)
        await store.queue("q").expire(time.time() - 60, 100)
        await deleting
        await put(store, "a")
        [level] = await store.queue("q").levels()
        assert (level.messages, level.waiting) == (1, 1)
        assert bodies(await take(store)) == ["a"]


@law
async def test_many_old_messages_do_not_keep_a_young_one_from_being_found(world: World) -> None:
    async with with_queue(world, lifetime_s=60) as store:
        for _ in range(3):
            await put_aged(store, 100, *range(1000))
        await put_aged(store, 0, "young")
        found: list[Any] = []

        async def is_found() -> bool:
            found.extend(bodies(await take(store)))
            return found == ["young"]

        await eventually(is_found)


@law
async def test_when_a_queue_was_read_is_known_after_a_restart_and_gone_with_the_queue(world: World) -> None:
    async with with_queue(world) as store:
        assert await store.queue("q").last_read() is None
        await store.queue("q").note_read(1234.5)
    async with opened(world) as store:
        assert await store.queue("q").last_read() == 1234.5
        await store.drop("q")
        with pytest.raises(NoSuchQueue):
            store.queue("q")
        await store.define(Definition("q", parse_settings({"physical_queues": 1})))
        assert await store.queue("q").last_read() is None
