"""Messages that a publisher resends with the same numbers are stored once, and none is lost: in LMDB and in Redis.

The oracle is a plain set of (publisher, number). Feeders represent brokers that share a queue. Each feeds what it has
received since its run began. Feeders fall behind, die, come back anywhere, resend, and learn of another filter at any
time. Stores are closed and opened, clocks jump, and numbers can be far apart.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis_process import RedisProcess
from store_worlds import LmdbWorld, RedisWorld, World

from tidegate.errors import Overloaded
from tidegate.filters import Filter
from tidegate.messages import NewMessage
from tidegate.queues.covers import INTERVALS_MAX
from tidegate.queues.feed import Feed, FeedPart
from tidegate.queues.logical_queues import LogicalQueues
from tidegate.queues.records import decode_record
from tidegate.queues.stores.lmdb_store import LmdbStore

EXAMPLES = max(5, int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "100")) // 5)
PHYSICAL_QUEUES = 3
FILTERS = ["*", "v>3", "v<5"]
# More than the number of identities that a physical queue remembers.
MANY = 120_000


def notification(number: int) -> dict[str, int]:
    return {"v": number * 7919 % 10}


def message(publisher: str, number: int, group: str = "") -> NewMessage:
    return NewMessage(msgspec.Raw(msgspec.msgpack.encode(notification(number))), group, publisher, number)


def part(publisher: str, numbers: Any, since: int, text: str = "*") -> FeedPart:
    return FeedPart([message(publisher, number) for number in numbers], since, text)


async def drain(queues: LogicalQueues, queue: str = "q") -> Counter[tuple[str, int]]:
    """Takes everything from a queue, and returns how often it had each publisher's number."""
    found: Counter[tuple[str, int]] = Counter()
    for physical in range(queues.definition(queue).settings.physical_queues):
        start = 0
        while kept := await queues.read(queue, physical, start, 1 << 60, 10_000):
            for each in kept:
                record = decode_record(each.record)
                found[record.device, record.sequence] += 1
            start = kept[-1].sequence + 1
        await queues.delete_below(queue, physical, start)
    return found


async def stored(queues: LogicalQueues, queue: str = "q") -> int:
    return (await queues.statistics(queue)).messages


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


class Opened:
    """Logical queues over the store of a world, with a queue `q`."""

    def __init__(self, world: World, **wanted: Any) -> None:
        self._world = world
        self._wanted = {"filter": "*", "physical_queues": PHYSICAL_QUEUES, "durability": "os"} | wanted

    async def __aenter__(self) -> LogicalQueues:
        self._queues = LogicalQueues(self._world.make())
        await self._queues.open()
        await self._queues.define("q", self._wanted)
        return self._queues

    async def __aexit__(self, *_error: object) -> None:
        await self._queues.close()


def law(check: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[World], None]:
    def test(world: World) -> None:
        asyncio.run(check(world))

    test.__doc__ = check.__doc__
    return test


# Single laws.


@law
async def test_a_deep_window_that_is_fed_again_after_a_restart_is_stored_once(world: World) -> None:
    async def feed_all(queues: LogicalQueues, since: int) -> None:
        for first in range(1, MANY + 1, 10_000):
            await queues.feed("q", Feed([part("p", range(first, first + 10_000), since)]))

    async with Opened(world, physical_queues=1) as queues:
        await feed_all(queues, 1)
        assert await stored(queues) == MANY
    world.jump("q", 86_400.0)
    async with Opened(world, physical_queues=1) as queues:
        await feed_all(queues, 1)
        assert await stored(queues) == MANY
        assert (await queues.statistics("q")).publishers == 1


@law
async def test_puts_of_a_device_that_counts_by_one_are_stored_once_however_many(world: World) -> None:
    """This also holds for groups, whose name determines their physical queue."""
    count = 30_000

    async def put_all(queues: LogicalQueues, group: str) -> None:
        for first in range(1, count + 1, 10_000):
            await queues.enqueue("q", [message("d" + group, n, group) for n in range(first, first + 10_000)])

    limits = {"filter": None, "deduplication_messages_max": 1000, "deduplication_s": 0.05}
    async with Opened(world, **limits) as queues:
        await put_all(queues, "")
        await put_all(queues, "g")
        assert await stored(queues) == 2 * count
    await asyncio.sleep(0.1)
    async with Opened(world, **limits) as queues:
        await put_all(queues, "g")
        await put_all(queues, "")
        assert await stored(queues) == 2 * count


@law
async def test_a_feeder_that_is_ahead_claims_nothing_from_before_its_beginning(world: World) -> None:
    """A feeder that joins late may be the first to put. What the others have from before is then not a duplicate."""
    async with Opened(world) as queues:
        await queues.feed("q", Feed([part("p", range(2_000_000, 2_000_500), 2_000_000)]))
        await queues.feed("q", Feed([part("p", range(1_999_500, 2_000_600), 1_999_500)]))
        await queues.feed("q", Feed([part("p", range(2_000_500, 2_000_700), 2_000_000)]))
        assert await drain(queues) == Counter(dict.fromkeys((("p", n) for n in range(1_999_500, 2_000_700)), 1))


@law
async def test_a_claim_covers_what_its_filter_has_left_out_for_that_filter_only(world: World) -> None:
    few, all_ = "v>3", Filter.parse("v>3").matches
    async with Opened(world, filter=few) as queues:
        chosen = [n for n in range(1, 1001) if all_(notification(n))]
        await queues.feed("q", Feed([part("p", chosen, 1, few)]))
        await queues.feed("q", Feed([part("p", range(1, 1001), 1, "*")]))
        await queues.feed("q", Feed([part("p", chosen, 1, few)]))
        assert await drain(queues) == Counter(dict.fromkeys((("p", n) for n in range(1, 1001)), 1))


@law
async def test_whoever_asks_what_is_there_is_told_by_the_covers(world: World) -> None:
    async with Opened(world) as queues:
        await queues.feed("q", Feed([part("p", range(10, 200), 10)]))
        assert await queues.has("q", Feed([part("p", range(100, 200), 100)]))
        assert not await queues.has("q", Feed([part("p", range(100, 201), 100)]))
        assert not await queues.has("q", Feed([part("p", range(9, 20), 9)]))
        assert not await queues.has("q", Feed([part("other", [10], 10)]))


@law
async def test_what_a_full_queue_refuses_is_not_covered(world: World) -> None:
    async with Opened(world, messages_max=9, physical_queues=1, policy="block") as queues:
        with pytest.raises(Overloaded):
            await queues.feed("q", Feed([part("p", range(1, 20), 1)]))
        await queues.feed("q", Feed([part("p", range(1, 8), 1)]))
        assert len(await drain(queues)) == 7


@law
async def test_the_largest_numbers_are_exact(world: World) -> None:
    last = (1 << 63) - 1
    async with Opened(world, physical_queues=1) as queues:
        await queues.feed("q", Feed([part("p", [last - 2], last - 2)]))
        await queues.feed("q", Feed([part("p", [last], last)]))
        await queues.feed("q", Feed([part("p", [last - 2, last - 1, last], last - 2)]))
        assert await drain(queues) == Counter({("p", last - 2): 1, ("p", last - 1): 1, ("p", last): 1})


@law
async def test_of_too_many_intervals_the_longest_stay(world: World) -> None:
    async with Opened(world, physical_queues=1) as queues:
        await queues.feed("q", Feed([part("p", range(1, 100), 1)]))
        for at in range(1000, 1000 + 10 * INTERVALS_MAX, 10):
            await queues.feed("q", Feed([part("p", [at], at)]))
        await queues.feed("q", Feed([part("p", range(1, 100), 1)]))
        found = await drain(queues)
        assert all(found["p", n] == 1 for n in range(1, 100)), "nothing of the long one is forgotten"


def test_of_too_many_publishers_the_least_recently_seen_is_forgotten_and_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishers_max = 100
    for store in ("cover_table", "redis_queue"):
        monkeypatch.setattr(f"tidegate.queues.stores.{store}.PUBLISHERS_MAX", publishers_max)

    async def run() -> None:
        async with Opened(world, physical_queues=1) as queues:
            await queues.feed("q", Feed([part("first", [1], 1)]))
            await queues.feed("q", Feed([part("second", [1], 1)]))
            await queues.feed("q", Feed(part(f"p{n}", [1], 1) for n in range(publishers_max - 1)))
            assert (await queues.statistics("q")).forgotten_publishers == 1
        async with Opened(world, physical_queues=1) as queues:
            await queues.feed("q", Feed([part("second", [1], 1), part("first", [1], 1)]))
            found = await drain(queues)
            assert (found["first", 1], found["second", 1]) == (2, 1)
            assert (await queues.statistics("q")).publishers == publishers_max

    asyncio.run(run())


def test_all_queues_share_a_budget_for_publishers_and_those_with_most_forget(tmp_path: Path) -> None:
    async def feed(queues: LogicalQueues, name: str, publishers: range) -> None:
        await queues.feed(name, Feed(part(f"p{n}", [1], 1) for n in publishers))

    async def forgotten(queues: LogicalQueues, name: str) -> int:
        return (await queues.statistics(name)).forgotten_publishers

    async def run() -> None:
        queues = LogicalQueues(LmdbStore(tmp_path, covers_bytes_max=100_000))
        await queues.open()
        for name in ("large", "small"):
            await queues.define(name, {"filter": "*", "physical_queues": 1, "durability": "os"})
        await feed(queues, "small", range(10))
        for first in range(0, 1000, 100):
            await feed(queues, "large", range(first, first + 100))
        assert 50_000 < queues.publisher_bytes <= 100_000
        assert await forgotten(queues, "large") > 500
        assert await forgotten(queues, "small") == 0
        await feed(queues, "small", range(10))
        assert await stored(queues, "small") == 10
        await queues.drop("large")
        assert 0 < queues.publisher_bytes < 10_000
        await queues.close()

    asyncio.run(run())


@law
async def test_a_clock_that_jumps_forgets_no_identity(world: World) -> None:
    """Messages of a device whose numbers are far apart are remembered one by one."""
    wanted = {"filter": None, "physical_queues": 1, "deduplication_s": 300.0}
    sparse = [message("d", n) for n in range(1, 1_000_000, 9999)]
    async with Opened(world, **wanted) as queues:
        await queues.enqueue("q", sparse)
    for seconds in (600.0, -1200.0, 86_400.0):
        world.jump("q", seconds)
        async with Opened(world, **wanted) as queues:
            assert (await queues.enqueue("q", sparse)).duplicates == len(sparse)


@law
async def test_a_dropped_queue_takes_its_covers_with_it(world: World) -> None:
    async with Opened(world) as queues:
        await queues.feed("q", Feed([part("p", range(1, 100), 1)]))
        await queues.drop("q")
        await queues.define("q", {"filter": "*", "physical_queues": PHYSICAL_QUEUES})
        await queues.feed("q", Feed([part("p", range(1, 100), 1)]))
        assert await stored(queues) == 99


# All of it together, against the model.


@dataclass
class Feeder:
    """A broker as the queue sees it: the last number that it fed for each publisher, and where its runs began."""

    text: str = "*"
    fed: dict[str, int] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)


publishers = st.sampled_from(["a", "b"])
feeders = st.integers(0, 2)
counts = st.sampled_from([1, 2, 7, 40])


class CoverMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = self.make_world()
        self.published = {"a": 3_000_000, "b": 0}
        self.holes: dict[str, list[range]] = {"a": [], "b": []}
        self.feeders = [Feeder() for _ in range(3)]
        self.put: set[tuple[str, int]] = set()
        self.found: Counter[tuple[str, int]] = Counter()
        self.opened = Opened(self.world)
        self.queues = self.run(self.opened.__aenter__())

    def make_world(self) -> World:
        raise NotImplementedError

    def teardown(self) -> None:
        self.run(self.opened.__aexit__())
        self.loop.close()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    @rule(publisher=publishers, count=counts)
    def publish(self, publisher: str, count: int) -> None:
        self.published[publisher] += count

    @rule(publisher=publishers, hole=st.sampled_from([1, 1000, 5_000_000]))
    def skip(self, publisher: str, hole: int) -> None:
        """Skips refused and unused numbers, which no feeder ever receives."""
        first = self.published[publisher] + 1
        self.holes[publisher].append(range(first, first + hole))
        self.published[publisher] += hole

    @rule(which=feeders, publisher=publishers, count=counts)
    def feed(self, which: int, publisher: str, count: int) -> None:
        """Lets a feeder continue from its position. A feeder that is new to the publisher begins near its end."""
        feeder = self.feeders[which]
        start = feeder.fed.get(publisher, max(0, self.published[publisher] - 20)) + 1
        numbers = self._numbers(publisher, start, count)
        if not numbers:
            return
        feeder.fed[publisher] = numbers[-1]
        matches = Filter.parse(feeder.text).matches
        chosen = [n for n in numbers if matches(notification(n))]
        if not chosen:
            return
        since = feeder.since.setdefault(publisher, chosen[0])
        self.run(self.queues.feed("q", Feed([part(publisher, chosen, since, feeder.text)])))
        self.put |= {(publisher, n) for n in chosen}

    def _numbers(self, publisher: str, start: int, count: int) -> list[int]:
        """Returns the next `count` numbers that were actually published, from `start` on."""
        numbers: list[int] = []
        number = start
        while len(numbers) < count and number <= self.published[publisher]:
            hole = next((hole for hole in self.holes[publisher] if number in hole), None)
            if hole is None:
                numbers.append(number)
            number = number + 1 if hole is None else hole.stop
        return numbers

    @rule(which=feeders, publisher=publishers, back=st.integers(0, 100))
    def send_again(self, which: int, publisher: str, back: int) -> None:
        """Resends from an earlier number on, in a new run: after a new stream, another broker, or a restart."""
        feeder = self.feeders[which]
        feeder.since.pop(publisher, None)
        feeder.fed[publisher] = max(0, min(feeder.fed.get(publisher, 1 << 60), self.published[publisher]) - back)

    @rule(which=feeders)
    def join(self, which: int) -> None:
        self.feeders[which] = Feeder(self.feeders[which].text)

    @rule(which=feeders, text=st.sampled_from(FILTERS))
    def rebind(self, which: int, text: str) -> None:
        self.feeders[which].text = text
        self.feeders[which].since.clear()

    @rule(numbers=st.lists(st.integers(1, 60), min_size=1, max_size=12), group=st.sampled_from(["", "", "g"]))
    def put_directly(self, numbers: list[int], group: str) -> None:
        device = "device" + group
        self.run(self.queues.enqueue("q", [message(device, n, group) for n in numbers]))
        self.put |= {(device, n) for n in numbers}

    @rule(first=st.integers(1, 30), count=st.integers(1, 20))
    def put_in_turn(self, first: int, count: int) -> None:
        numbers = range(4_000_000 + first, 4_000_000 + first + count)
        self.run(self.queues.enqueue("q", [message("counter", n) for n in numbers]))
        self.put |= {("counter", n) for n in numbers}

    @rule()
    def reopen(self) -> None:
        self.run(self.opened.__aexit__())
        self.queues = self.run(self.opened.__aenter__())

    @rule(seconds=st.sampled_from([600.0, -600.0, 1e6]))
    def jump(self, seconds: float) -> None:
        self.world.jump("q", seconds)

    @invariant()
    def everything_that_was_put_was_stored_once(self) -> None:
        self.found += self.run(drain(self.queues))
        assert self.found == Counter(dict.fromkeys(self.put, 1))


def check(machine: type[CoverMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None, print_blob=True)
    )


def test_what_is_sent_again_into_lmdb_is_stored_once() -> None:
    class LmdbMachine(CoverMachine):
        def make_world(self) -> World:
            self.directory = tempfile.mkdtemp(prefix="tidegate-covers-")
            return LmdbWorld(Path(self.directory))

        def teardown(self) -> None:
            super().teardown()
            shutil.rmtree(self.directory)

    check(LmdbMachine)


def test_what_is_sent_again_into_redis_is_stored_once(redis: RedisProcess) -> None:
    class RedisMachine(CoverMachine):
        def make_world(self) -> World:
            with redis.client() as client:
                client.flushall()
            return RedisWorld(redis)

    check(RedisMachine)
