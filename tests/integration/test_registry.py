"""The registry in LMDB and in Redis: it keeps the same as the simulated one, for several processes, whatever dies."""

from __future__ import annotations

import asyncio
import os
import random
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from elastic_world import SimulatedRegistry
from redis_process import RedisProcess
from registry_process import FLOOD_FILTER, RegistryProcess

from tidegate.cluster.registry import Registry, RegistryPoint, open_registry
from tidegate.cluster.registry.lmdb_registry import IDS_AT_ONCE, LmdbRegistry
from tidegate.cluster.registry.registry import PART_ENTRIES_MAX
from tidegate.errors import ConfigError, FencedWriter, Unavailable
from tidegate.layers.control import Buried, Entry, Fence, ReadShare, Reply, Share, Step, Transaction
from tidegate.layers.frames import Change, ChangeOk, Outputs
from tidegate.layers.selector import Configuration
from tidegate.layers.subscription_table import CONNECTION_POINT_SHIFT

REGISTRY = "registry"
PATIENCE_S = 30.0
WRITERS = ("access-point-1", "access-point-2", "access-point-3")

Kept: TypeAlias = dict[int, tuple[int, bytes]]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with RedisProcess(fsync="always") as process:
        yield process


@pytest.fixture(params=["lmdb", "redis"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Returns the address of an empty registry."""
    if request.param == "lmdb":
        return f"lmdb:{tmp_path}"
    redis: RedisProcess = request.getfixturevalue("redis")
    with redis.client() as client:
        client.flushall()
    return redis.url


@asynccontextmanager
async def opened(registry: Registry | str) -> AsyncIterator[Registry]:
    if isinstance(registry, str):
        registry = open_registry(registry)
    await registry.open()
    try:
        yield registry
    finally:
        await registry.close()


def recovery(base: tuple[str, ...], new: tuple[str, ...], dead: set[str], epoch: int = 2) -> Transaction:
    before = Configuration(1, ("access-point-1",), base, ("exit-point-1",))
    after = Configuration(epoch, ("access-point-1",), new, ("exit-point-1",), epoch)
    return Transaction(after, before, (before, after), frozenset(dead), is_recovery=True)


ALL_IS_LOST = recovery(("matcher-1",), ("matcher-2",), {"matcher-1"})


async def read(registry: Registry, transaction: Transaction = ALL_IS_LOST, matcher: str = "matcher-2") -> Kept:
    parts = [part async for part in registry.read_share(transaction, matcher)]
    assert all(0 < len(part) <= PART_ENTRIES_MAX for part in parts)
    return {entry.subscription: (entry.version, entry.filter) for part in parts for entry in part}


def at_point(connection_point: int, place: int) -> int:
    return connection_point << CONNECTION_POINT_SHIFT | place


def add(*ids: int, version: int = 1) -> list[Change]:
    return [Change(id_, version, b"filter") for id_ in ids]


# Stored subscriptions.


@pytest.mark.parametrize("seed", range(6))
def test_it_keeps_what_the_simulated_registry_keeps(address: str, seed: int) -> None:
    """This also holds if the registry is closed and reopened in between."""

    async def check() -> None:
        chance, model = random.Random(seed), SimulatedRegistry()
        ids = [at_point(point, place) for point in (1, 2, 0x7FFF) for place in (0, 1, 2, 1 << 32)]
        for _ in range(4):
            async with opened(address) as registry:
                for _ in range(40):
                    await step(registry, model, chance, ids)
                    assert await read(registry) == model.kept
                    assert await registry.subscriptions() == len(model.kept)

    asyncio.run(check())


async def step(registry: Registry, model: SimulatedRegistry, chance: random.Random, ids: list[int]) -> None:
    drawn = chance.random()
    if drawn < 0.01:
        dead = frozenset([chance.choice(WRITERS)])
        await registry.fence(dead)
        model.handle("coordinator", Fence(1, 1, dead), 0.0)
    elif drawn < 0.06:
        point = chance.choice([1, 2, 0x7FFF])
        await registry.forget(point)
        model.kept = {id_: kept for id_, kept in model.kept.items() if id_ >> CONNECTION_POINT_SHIFT != point}
    else:
        writer, changes = chance.choice(WRITERS), [random_change(chance, ids) for _ in range(chance.randint(0, 8))]
        changes.sort(key=lambda change: change.version)  # as a writer sends them
        answers = [model.handle(writer, change, 0.0) for change in changes]
        try:
            await registry.change(writer, changes)
        except FencedWriter:
            assert not any(answers)
        else:
            assert all(answers)


def random_change(chance: random.Random, ids: list[int]) -> Change:
    packed = chance.choice([None, b"", b"\0", chance.randbytes(chance.randint(1, 5000))])
    return Change(chance.choice(ids), chance.randint(1, 300), packed)


def test_a_fenced_writer_changes_nothing_and_the_others_go_on(address: str) -> None:
    async def check() -> None:
        async with opened(address) as registry:
            await registry.change("one", add(1, 2))
            await registry.fence(frozenset(["one", "another"]))
            with pytest.raises(FencedWriter, match=r"U720.*'one'.*another name"):
                await registry.change("one", [*add(3), Change(1, 2, None)])
            await registry.change("two", [Change(2, 2, None)])
        async with opened(address) as registry:
            with pytest.raises(FencedWriter):
                await registry.change("another", add(4))
            assert (await read(registry)).keys() == {1}

    asyncio.run(check())


# A long write, which a short one would overtake if their order were not kept.
LONG = [Change(id_, 1, b"x" * 1000) for id_ in range(1000, 4000)]


def test_changes_that_are_begun_at_once_are_made_in_their_order(address: str) -> None:
    async def check() -> None:
        async with opened(address) as registry:
            for number in range(5):
                begun = registry.change("writer", [*LONG, *add(number)])
                await asyncio.gather(begun, registry.change("writer", [Change(number, 2, None)]))
                assert (await read(registry)).keys() == {change.subscription for change in LONG}

    asyncio.run(check())


def test_a_change_whose_caller_has_gone_does_not_come_after_the_next(address: str) -> None:
    async def check() -> None:
        async with opened(address) as registry:
            for number in range(10):
                begun = asyncio.create_task(registry.change("writer", [*LONG, *add(number)]))
                await asyncio.sleep(0.001 * number)
                begun.cancel()
                await registry.change("writer", [Change(number, 2, None)])
        async with opened(address) as registry:
            assert not set(range(10)) & (await read(registry)).keys()

    asyncio.run(check())


# Shares.


@pytest.mark.parametrize("seed", range(3))
def test_the_shares_of_the_successors_are_complete_and_disjoint(address: str, seed: int) -> None:
    chance = random.Random(seed)
    ids = [at_point(chance.randint(1, 3), place) for place in range(2 * IDS_AT_ONCE + chance.randint(0, 500))]

    async def check() -> None:
        async with opened(address) as registry:
            for start in range(0, len(ids), 5000):
                await registry.change("writer", add(*ids[start : start + 5000]))
            for _ in range(3):
                base = tuple(f"matcher-{number}" for number in range(chance.randint(1, 5)))
                dead = set(chance.sample(base, chance.randint(1, len(base))))
                new = (*(name for name in base if name not in dead), "matcher-8", "matcher-9")
                transaction = recovery(base, new, dead | {"access-point-9"})
                shares = {matcher: await read(registry, transaction, matcher) for matcher in new}
                found = [(id_, matcher) for matcher, share in shares.items() for id_ in share]
                expected = {id_: transaction.new.owner(id_) for id_ in ids if transaction.base.owner(id_) in dead}
                assert len(found) == len(expected)
                assert dict(found) == expected

    asyncio.run(check())


def test_all_subscriptions_of_a_connection_point_are_forgotten_however_many(address: str) -> None:
    async def check() -> None:
        async with opened(address) as registry:
            for point in (1, 2, 3):
                await registry.change("writer", add(*(at_point(point, place) for place in range(IDS_AT_ONCE + 1))))
            await registry.forget(2)
            assert await registry.subscriptions() == 2 * (IDS_AT_ONCE + 1)
            assert {id_ >> CONNECTION_POINT_SHIFT for id_ in await read(registry)} == {1, 3}

    asyncio.run(check())


# Several processes.


def test_processes_that_write_at_once_leave_the_highest_versions(address: str) -> None:
    async def check() -> None:
        with RegistryProcess(address) as one, RegistryProcess(address) as other:
            async with opened(address) as registry:
                await registry.change("mine", add(*range(100)))
                for version in range(2, 40, 2):
                    one.begin_change("one", [(id_, version, f"{version}") for id_ in range(50)])
                    other.begin_change("other", [(id_, 41 - version, f"{41 - version}") for id_ in range(50)])
                    await registry.change("mine", [Change(50 + version, 2, None)])
                answers = [await asyncio.to_thread(each.answer) for each in (one, other) for _ in range(2, 40, 2)]
                assert set(answers) == {"ok"}
                removed = {50 + version for version in range(2, 40, 2)}
                expected = dict.fromkeys(range(50), (39, b"39"))
                expected |= dict.fromkeys(set(range(50, 100)) - removed, (1, b"filter"))
                assert await read(registry) == expected

    asyncio.run(check())


def test_a_fence_holds_against_a_writer_that_does_not_know_of_it(address: str) -> None:
    """A read after the fence finds everything that was acknowledged to that writer, and nothing is added later."""

    async def check() -> None:
        with RegistryProcess(address) as process:
            async with opened(address) as registry:
                process.begin_flood("zombie", first=1)
                told = [await asyncio.to_thread(process.answer) for _ in range(20)]
                await registry.fence(frozenset(["zombie"]))
                after_fence = await read(registry)
                while (answer := await asyncio.to_thread(process.answer)) != "U720":
                    told.append(answer)
                assert await read(registry) == after_fence
                assert {int(id_) for id_ in told} == after_fence.keys()
                assert await asyncio.to_thread(process.change, "successor", [(1, 2, None)]) == "ok"
                assert (await read(registry)).keys() == after_fence.keys() - {1}

    asyncio.run(check())


def test_what_a_killed_process_was_told_is_there(address: str) -> None:
    async def check() -> None:
        for round_ in range(3):
            with RegistryProcess(address) as process:
                process.begin_flood(f"writer-{round_}", first=1000 * round_)
                told = [await asyncio.to_thread(process.answer) for _ in range(30)]
                await asyncio.to_thread(process.kill)
                told += [line async for line in rest(process)]
            async with opened(address) as registry:
                kept = await read(registry)
                assert {int(id_) for id_ in told} <= kept.keys()
                assert set(kept.values()) == {(1, FLOOD_FILTER.encode())}
                await registry.change("next", [Change(1000 * round_, 2, None)])

    asyncio.run(check())


async def rest(process: RegistryProcess) -> AsyncIterator[str]:
    while line := await asyncio.to_thread(process.answer):
        yield line


# One store only.


def test_a_map_that_is_full_grows_also_for_the_others(tmp_path: Path) -> None:
    big = b"x" * 100_000

    async def check() -> None:
        with RegistryProcess(f"lmdb:{tmp_path}") as process:
            async with opened(LmdbRegistry(tmp_path, map_bytes=1 << 17)) as registry:
                await registry.change("mine", [Change(id_, 1, big) for id_ in range(10)])
                for id_ in range(10, 100, 10):
                    more = [(each, 1, "y" * 100_000) for each in range(id_, id_ + 10)]
                    assert await asyncio.to_thread(process.change, "other", more) == "ok"
                assert len(await read(registry)) == 100
                await registry.change("mine", add(100))
                assert await asyncio.to_thread(process.change, "other", [(100, 2, None)]) == "ok"
                assert await registry.subscriptions() == 100

    asyncio.run(check())


def test_a_redis_that_dies_keeps_what_it_has_acknowledged() -> None:
    async def check(redis: RedisProcess) -> None:
        async with opened(redis.url) as registry:
            for id_ in range(20):
                await registry.change("writer", add(id_))
            await registry.fence(frozenset(["dead"]))
            await asyncio.to_thread(redis.kill)
            for work in (registry.change("writer", add(20)), registry.fence(frozenset("x")), registry.subscriptions()):
                with pytest.raises(Unavailable, match="U721"):
                    await work
            await asyncio.to_thread(redis.start)
            assert (await read(registry)).keys() == set(range(20))
            with pytest.raises(FencedWriter):
                await registry.change("dead", add(21))
            await registry.change("writer", add(22))

    with RedisProcess(fsync="always") as redis:
        asyncio.run(check(redis))


def test_a_write_that_arrives_late_is_refused(redis: RedisProcess) -> None:
    """Such a write was delayed in the network, while its writer resent it and continued."""

    async def check() -> None:
        async with opened(redis.url) as earlier, opened(redis.url) as later:
            await later.change("writer", add(1))
            await later.change("writer", [Change(1, 2, None)])
            with pytest.raises(Unavailable, match=r"U721.*'writer'"):
                await earlier.change("writer", add(1))
            assert await later.subscriptions() == 0
            await earlier.change("another writer", add(1))

    with redis.client() as client:
        client.flushall()
    asyncio.run(check())


def test_a_redis_that_may_lose_subscriptions_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def check(redis: RedisProcess) -> None:
        async with opened(redis.url):
            pass

    with RedisProcess() as redis:
        asyncio.run(check(redis))
    assert "appendfsync always" in caplog.text


# Addresses.


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "C440.*''.*lmdb:DIRECTORY"),
        ("lmdb:", "C440.*'lmdb:'.*lmdb:DIRECTORY"),
        ("lmdb", "C440.*'lmdb'.*lmdb:DIRECTORY"),
        ("http://me:secret@host", "C440.*'http'.*redis://"),
        ("redis://me:secret@host:port", r"C442.*'redis://me:\*\*\*@host:port'.*password in a file"),
    ],
)
def test_what_is_no_address_is_refused_with_a_cure(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        open_registry(address)
    assert "secret" not in str(refused.value)


def test_a_directory_that_cannot_be_opened_is_refused_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def check() -> None:
        with pytest.raises(ConfigError, match=r"C441.*file.*use a local directory"):
            await open_registry(f"lmdb:{tmp_path / 'file'}").open()

    asyncio.run(check())


def test_a_redis_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="U721"):
        asyncio.run(open_registry("redis://127.0.0.1:1/0").open())


# The registry point.


class Answers:
    """Records the answers of a registry point, in order. An internal error fails the test."""

    def __init__(self) -> None:
        self.outputs: Outputs = []
        self.failures: list[Exception] = []

    def carry(self, outputs: Outputs, source: str) -> None:
        assert source == REGISTRY
        self.outputs += outputs

    def to(self, address: str) -> list[Any]:
        return [frame for to, frame in self.outputs if to == address]

    async def wait(self, address: str, count: int) -> list[Any]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.to(address)) < count:
                assert not self.failures
                await asyncio.sleep(0.005)
        return self.to(address)


@asynccontextmanager
async def pointed(address: str) -> AsyncIterator[tuple[RegistryPoint, Answers, Registry]]:
    answers = Answers()
    async with opened(address) as registry:
        point = RegistryPoint(REGISTRY, registry, answers.carry, answers.failures.append)
        try:
            yield point, answers, registry
        finally:
            await point.close(asyncio.get_running_loop().time() + PATIENCE_S)
            assert answers.failures == []


Check: TypeAlias = Callable[[RegistryPoint, Answers, Registry], Awaitable[None]]


def law(check: Check) -> Callable[[str], None]:
    def test(address: str) -> None:
        async def run() -> None:
            async with pointed(address) as world:
                await check(*world)

        asyncio.run(run())

    test.__doc__ = check.__doc__
    return test


@law
async def test_a_burial_removes_what_came_before_it_and_nothing_else(
    point: RegistryPoint, answers: Answers, registry: Registry
) -> None:
    """Other writers continue to change their subscriptions."""
    living, dead = 7 << CONNECTION_POINT_SHIFT, 8 << CONNECTION_POINT_SHIFT
    for number in range(500):
        for connection_point in (living, dead):
            point.handle(WRITERS[0], Change(connection_point | number, 1, b"filter"), 0.0)
    point.handle(WRITERS[0], Buried("connection-point-8"), 0.0)
    for number in range(500, 1000):
        point.handle(WRITERS[1], Change(living | number, 1, b"filter"), 0.0)
    await answers.wait(WRITERS[0], 1000)
    await answers.wait(WRITERS[1], 500)
    async with asyncio.timeout(PATIENCE_S):
        while await registry.subscriptions() != 1000:
            await asyncio.sleep(0.005)


@law
async def test_changes_are_answered_in_their_order_and_gather(
    point: RegistryPoint, answers: Answers, registry: Registry
) -> None:
    chance = random.Random(1)
    sent: dict[str, list[tuple[int, int]]] = {writer: [] for writer in WRITERS}
    for version in range(1, 2001):
        for number, writer in enumerate(WRITERS):
            id_ = at_point(1 + number, chance.randint(0, 20))
            sent[writer].append((id_, version))
            assert point.handle(writer, Change(id_, version, chance.choice([None, b"filter"])), 0.0) == []
        if version % 400 == 0:
            await asyncio.sleep(0.001)
    for writer in WRITERS:
        found = await answers.wait(writer, 2000)
        assert [(frame.subscription, frame.version) for frame in found] == sent[writer]
    statistics = point.statistics()
    assert statistics.changes == 6000
    assert statistics.waiting_changes == 0
    assert statistics.writes < 100


@law
async def test_what_is_answered_can_be_read_at_once(point: RegistryPoint, answers: Answers, registry: Registry) -> None:
    for id_ in range(50):
        point.handle("writer", Change(id_, 1, b"filter"), 0.0)
        await answers.wait("writer", id_ + 1)
        assert await registry.subscriptions() == id_ + 1


@law
async def test_a_fence_is_answered_when_the_dead_can_write_no_more(
    point: RegistryPoint, answers: Answers, registry: Registry
) -> None:
    point.handle("living", Change(1, 1, b"filter"), 0.0)
    assert point.handle("coordinator", Fence(1, 7, frozenset(["dead"])), 0.0) == []
    assert await answers.wait("coordinator", 1) == [Reply(Step.FENCED, 7, {})]
    with pytest.raises(FencedWriter):
        await registry.change("dead", add(2))
    point.handle("dead", Change(3, 1, b"filter"), 0.0)
    point.handle("living", Change(4, 1, b"filter"), 0.0)
    assert await answers.wait("living", 2) == [ChangeOk(1, 1), ChangeOk(4, 1)]
    assert answers.to("dead") == []
    assert (await read(registry)).keys() == {1, 4}


@law
async def test_a_writer_that_was_fenced_elsewhere_gets_no_answer(
    point: RegistryPoint, answers: Answers, registry: Registry
) -> None:
    await registry.fence(frozenset(["dead"]))
    for id_ in range(3000):
        point.handle("dead", Change(id_, 1, b"filter"), 0.0)
    point.handle("living", Change(1, 1, b"filter"), 0.0)
    await answers.wait("living", 1)
    point.handle("dead", Change(5, 1, b"filter"), 0.0)
    assert point.statistics().waiting_changes == 0
    assert answers.to("dead") == []
    assert (await read(registry)).keys() == {1}


@law
async def test_a_share_comes_in_parts_up_to_the_last(
    point: RegistryPoint, answers: Answers, registry: Registry
) -> None:
    transaction = recovery(("m1", "m2"), ("m2", "m3"), {"m1"})
    ids = range(2 * IDS_AT_ONCE)
    await registry.change("writer", add(*ids))
    for matcher in ("m2", "m3"):
        assert point.handle(matcher, ReadShare(transaction), 0.0) == []
    for matcher in ("m2", "m3"):
        mine = [id_ for id_ in ids if transaction.base.owner(id_) == "m1" and transaction.new.owner(id_) == matcher]
        shares = await answers.wait(matcher, 1 + -(-len(mine) // PART_ENTRIES_MAX))
        assert [share.is_last for share in shares] == [False] * (len(shares) - 1) + [True]
        assert {share.transaction for share in shares} == {transaction}
        found: list[Entry] = [entry for share in shares for entry in share.entries]
        assert sorted(entry.subscription for entry in found) == mine


@law
async def test_a_share_with_nothing_in_it_is_told_too_and_a_later_one_takes_the_place_of_an_older(
    point: RegistryPoint, answers: Answers, registry: Registry
) -> None:
    older, later = (recovery(("m1",), ("m2",), {"m1"}, epoch) for epoch in (2, 3))
    point.handle("m2", ReadShare(older), 0.0)
    point.handle("m2", ReadShare(later), 0.0)
    assert await answers.wait("m2", 1) == [Share(later, [], is_last=True)]


def test_a_registry_that_was_cut_off_is_refused_with_a_cure(tmp_path: Path) -> None:
    async def check() -> None:
        registry = LmdbRegistry(tmp_path)
        await registry.open()
        await registry.change("writer", [Change(number, 1, bytes(1000)) for number in range(1, 200)])
        await registry.close()
        data = tmp_path / "data.mdb"
        os.truncate(data, data.stat().st_size // 2)
        with pytest.raises(ConfigError, match=f"C448.*{tmp_path}.*remove the directory"):
            await LmdbRegistry(tmp_path).open()

    asyncio.run(check())


@contextmanager
def full_disk(file_bytes_max: int) -> Iterator[None]:
    """Limits the size of all files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes_max, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_change_that_a_full_disk_does_not_take_is_answered_when_there_is_room(tmp_path: Path) -> None:
    size_bytes = 4_000_000

    async def check() -> None:
        async with pointed(f"lmdb:{tmp_path}") as (point, answers, registry):
            with full_disk(size_bytes):
                with pytest.raises(Unavailable, match=f"U721.*{tmp_path}"):
                    await registry.change("other", [Change(1, 1, bytes(2 * size_bytes))])
                point.handle("writer", Change(2, 1, bytes(2 * size_bytes)), 0.0)
                point.handle("writer", Change(3, 1, b"filter"), 0.0)
                await asyncio.sleep(0.2)
                assert answers.outputs == []
                assert await read(registry) == {}
            assert await answers.wait("writer", 2) == [ChangeOk(2, 1), ChangeOk(3, 1)]
            assert (await read(registry)).keys() == {2, 3}

    asyncio.run(check())


def test_nobody_is_answered_while_the_store_is_away_and_all_are_when_it_is_back() -> None:
    async def check(redis: RedisProcess) -> None:
        async with pointed(redis.url) as (point, answers, registry):
            point.handle("writer", Change(1, 1, b"filter"), 0.0)
            await answers.wait("writer", 1)
            await asyncio.to_thread(redis.kill)
            point.handle("writer", Change(1, 2, None), 0.0)
            point.handle("writer", Change(2, 1, b"filter"), 0.0)
            point.handle("matcher-2", ReadShare(ALL_IS_LOST), 0.0)
            point.handle("coordinator", Fence(1, 2, frozenset(["dead"])), 0.0)
            await asyncio.sleep(0.3)
            assert answers.outputs == [("writer", ChangeOk(1, 1))]
            await asyncio.to_thread(redis.start)
            assert await answers.wait("coordinator", 1) == [Reply(Step.FENCED, 2, {})]
            assert await answers.wait("writer", 3) == [ChangeOk(1, 1), ChangeOk(1, 2), ChangeOk(2, 1)]
            async with asyncio.timeout(PATIENCE_S):
                while not (shares := answers.to("matcher-2")) or not shares[-1].is_last:
                    await asyncio.sleep(0.005)
            assert (await read(registry)).keys() == {2}

    with RedisProcess(fsync="always") as redis:
        asyncio.run(check(redis))
