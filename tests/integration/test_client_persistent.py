"""Persistent queries of a client: the changes that it receives compose to the result, whatever is lost in transit."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from bad_network import DroppingProxy, NumberlessProxy
from broker_process import BrokerProcess
from ssap_world import SsapWorld

from tidegate import BadInput, Unavailable, connect, connect_sync
from tidegate.client import persistent_filter, persistent_query
from tidegate.client.control import Control, IntervalSettings, Strategy
from tidegate.client.knowledge import Knowledge
from tidegate.client.persistent_http import HttpTransport
from tidegate.client.persistent_query import PersistentQuery
from tidegate.client.persistent_result import Change
from tidegate.client.persistent_ssap import SsapTransport
from tidegate.client.persistent_transport import Checked
from tidegate.knowledge.request_pool import STABLE_WAIT_S, Lane, PoolRequest, PoolSettings

QUICK = Control(interval=IntervalSettings(first_s=0.1, interval_s_min=0.05, interval_s_max=0.2))
RARE = Control(interval=IntervalSettings(first_s=20.0, interval_s_max=30.0))
QUERY = "SELECT ?o { <s> <p> ?o }"
JSON = "application/sparql-results+json"
WAIT_S = 30


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(has_knowledge=True) as process:
        yield process


@pytest.fixture
def knowledge(broker: BrokerProcess) -> Knowledge:
    knowledge = Knowledge(broker.http)
    knowledge.update("CLEAR ALL")
    return knowledge


def rows_of(rows: list[Any]) -> Counter[bytes]:
    return Counter(msgspec.json.encode(row, order="deterministic") for row in rows)


class Follower:
    """Composes the changes that it receives."""

    def __init__(self, query: PersistentQuery) -> None:
        self._query = query
        self.rows: Counter[bytes] = Counter()
        self.changes: list[Change] = []

    async def follow(self) -> Change:
        async with asyncio.timeout(WAIT_S):
            change = await anext(self._query)
        self.changes.append(change)
        removed = rows_of(change.removed)
        assert removed <= self.rows, "only what was there goes"
        self.rows = self.rows - removed + rows_of(change.added)
        return change

    async def follow_to(self, rows: Counter[bytes]) -> None:
        while self.rows != rows:
            await self.follow()


def result(knowledge: Knowledge) -> Counter[bytes]:
    return rows_of(msgspec.json.decode(knowledge.query(QUERY, JSON).body)["results"]["bindings"])


async def update(knowledge: Knowledge, text: str) -> None:
    await asyncio.to_thread(knowledge.update, text)


async def until(is_so: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(0.02)


def test_changes_arrive_by_the_address_that_the_broker_tells(broker: BrokerProcess, knowledge: Knowledge) -> None:
    async def scenario() -> None:
        knowledge.update("INSERT DATA { <s> <p> 0 }")
        async with connect(broker.native) as connection, connection.persistent_query(QUERY, control=RARE) as query:
            follower = Follower(query)
            assert [row["o"]["value"] for row in (await follower.follow()).added] == ["0"]
            for number in range(1, 6):
                await update(knowledge, f"DELETE {{ <s> <p> ?o }} INSERT {{ <s> <p> {number} }} WHERE {{ <s> <p> ?o }}")
                change = await follower.follow()
                assert (change.sequence, change.lost) == (number, 0)
                assert [[row["o"]["value"] for row in rows] for rows in (change.added, change.removed)] == [
                    [str(number)],
                    [str(number - 1)],
                ]
            statistics = query.statistics()
            assert (statistics.changes, statistics.openings, statistics.control.losses) == (6, 1, 0)

    asyncio.run(scenario())


def test_a_lost_indication_is_found_by_the_next_one(broker: BrokerProcess, knowledge: Knowledge) -> None:
    async def scenario() -> None:
        async with (
            DroppingProxy(broker.http) as proxy,
            connect(broker.native) as connection,
            connection.persistent_query(QUERY, address=proxy.address, control=RARE) as query,
        ):
            follower = Follower(query)
            await follower.follow()
            proxy.is_dropped = lambda message: message.get("sequence") == 1 and "added" in message
            await update(knowledge, "INSERT DATA { <s> <p> 1 }")
            await until(lambda: proxy.dropped == 1)
            proxy.is_dropped = lambda _: False
            await update(knowledge, "INSERT DATA { <s> <p> 2 }")
            change = await follower.follow()
            assert (change.lost, len(change.added)) == (1, 2)
            assert follower.rows == result(knowledge)
            statistics = query.statistics()
            assert (statistics.checks, statistics.control.losses, statistics.openings) == (0, 1, 2)

    asyncio.run(scenario())


def test_a_loss_at_the_tail_is_found_by_a_check(broker: BrokerProcess, knowledge: Knowledge) -> None:
    async def scenario() -> None:
        async with (
            DroppingProxy(broker.http) as proxy,
            connect(broker.native) as connection,
            connection.persistent_query(QUERY, address=proxy.address, control=QUICK) as query,
        ):
            follower = Follower(query)
            await follower.follow()
            proxy.is_dropped = lambda message: "added" in message and proxy.dropped == 0
            await update(knowledge, "INSERT DATA { <s> <p> 1 }")
            change = await follower.follow()
            assert (change.lost, proxy.dropped, len(change.added)) == (1, 1, 1)
            statistics = query.statistics()
            assert statistics.checks > 0
            assert statistics.control.losses == 1

    asyncio.run(scenario())


def test_whatever_is_lost_the_changes_compose_to_the_result(broker: BrokerProcess, knowledge: Knowledge) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)

    async def scenario() -> None:
        async with (
            DroppingProxy(broker.http) as proxy,
            connect(broker.native) as connection,
            connection.persistent_query(QUERY, address=proxy.address, control=QUICK) as query,
        ):
            proxy.is_dropped = lambda message: "added" in message and chance.random() < 0.3
            follower = Follower(query)
            while proxy.dropped < 5:
                verb = chance.choice(["INSERT", "DELETE"])
                await update(knowledge, f"{verb} DATA {{ <s> <p> {chance.randrange(5)} }}")
                await asyncio.sleep(0.01)
                if chance.random() < 0.05:
                    proxy.cut_all()
            await update(knowledge, "INSERT DATA { <s> <p> 'last' }")
            await follower.follow_to(result(knowledge))
            assert query.statistics().control.losses > 0, f"seed {seed}"

    asyncio.run(scenario())


def test_a_restart_of_the_broker_is_survived(knowledge: Knowledge) -> None:
    async def scenario() -> None:
        with BrokerProcess(has_knowledge=True) as broker:
            knowledge = Knowledge(broker.http)
            async with connect(broker.native) as connection, connection.persistent_query(QUERY, control=QUICK) as query:
                follower = Follower(query)
                await update(knowledge, "INSERT DATA { <s> <p> 1 }")
                await follower.follow_to(result(knowledge))
                broker.kill()
                await until(lambda: not query.statistics().is_open)
                broker.start()
                await update(knowledge, "INSERT DATA { <s> <p> 2 }")
                await follower.follow_to(result(knowledge))
                statistics = query.statistics()
                assert statistics.openings >= 2
                assert statistics.is_open

    asyncio.run(scenario())


def test_who_never_checks_is_told_of_changes_all_the_same(broker: BrokerProcess, knowledge: Knowledge) -> None:
    async def scenario() -> None:
        never = Control(interval=IntervalSettings(strategy=Strategy.NONE))
        async with connect(broker.native) as connection, connection.persistent_query(QUERY, control=never) as query:
            follower = Follower(query)
            await follower.follow()
            await update(knowledge, "INSERT DATA { <s> <p> 1 }")
            assert len((await follower.follow()).added) == 1
            assert query.statistics().control.requests == 1, "the opening"

    asyncio.run(scenario())


def test_what_cannot_be_asked_is_told(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with connect(broker.native, connect_timeout_s=0.2) as connection:
            with pytest.raises(BadInput, match="K1"):
                await anext(connection.persistent_query("SELECT ?o {", address=broker.http))
            with pytest.raises(BadInput, match="C411"):
                await anext(connection.persistent_query(QUERY, address="http://"))
            with pytest.raises(Unavailable, match="U701"):
                await anext(connection.persistent_query(QUERY, address="http://127.0.0.1:9"))

    asyncio.run(scenario())


def test_whoever_leaves_the_loop_leaves_the_query(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with connect(broker.native) as connection:
            before = (await connection.status())["knowledge"]["queries"]["subscriptions"]
            async for _ in connection.persistent_query("SELECT * { <left> ?p ?o }"):
                break

            async with asyncio.timeout(WAIT_S):
                while (await connection.status())["knowledge"]["queries"]["subscriptions"] > before:
                    await asyncio.sleep(0.02)

    asyncio.run(scenario())


def test_changes_and_losses_over_ssap(broker: BrokerProcess, knowledge: Knowledge) -> None:
    async def scenario() -> None:
        address = f"ssap://127.0.0.1:{broker.port}"
        async with (
            connect(broker.native) as connection,
            connection.persistent_query(QUERY, address=address, control=QUICK) as query,
        ):
            follower = Follower(query)
            await follower.follow()
            for text in ("INSERT DATA { <s> <p> 1, 'a&<b>'@en, <u> }", "DELETE DATA { <s> <p> 1 }"):
                await update(knowledge, text)
                assert (await follower.follow()).lost == 0
                assert follower.rows == result(knowledge)
            await until(lambda: query.statistics().checks > 3)
            statistics = query.statistics()
            assert (statistics.control.losses, statistics.openings, statistics.control.failures) == (0, 1, 0)

    asyncio.run(scenario())


def test_a_check_without_a_number_compares_results(broker: BrokerProcess, knowledge: Knowledge) -> None:
    async def scenario() -> None:
        async with (
            NumberlessProxy(f"ssap://127.0.0.1:{broker.port}") as proxy,
            connect(broker.native) as connection,
            connection.persistent_query(QUERY, address=proxy.address, control=QUICK) as query,
        ):
            follower = Follower(query)
            await follower.follow()
            await until(lambda: query.statistics().checks > 1)
            assert query.statistics().control.losses == 0
            await update(knowledge, "INSERT DATA { <s> <p> 1 }")
            assert (await follower.follow()).lost == 1
            assert proxy.dropped == 1
            assert follower.rows == result(knowledge)

    asyncio.run(scenario())


def test_a_check_that_the_program_asks_for_comes_at_once(broker: BrokerProcess) -> None:
    never = replace(QUICK, interval=IntervalSettings(Strategy.NONE))

    async def scenario() -> None:
        async with (
            connect(broker.native) as connection,
            connection.persistent_query(QUERY, control=never) as query,
        ):
            await anext(query)
            await asyncio.sleep(0.2)
            assert query.statistics().checks == 0
            query.check_within(0.0)
            await until(lambda: query.statistics().checks == 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", [HttpTransport, SsapTransport])
def test_with_every_answer_the_broker_tells_which_delay_it_holds_for_stable(
    broker: BrokerProcess, transport: type[HttpTransport | SsapTransport]
) -> None:
    address = broker.http if transport is HttpTransport else f"ssap://127.0.0.1:{broker.port}"

    async def scenario() -> None:
        link = await transport(address, QUERY, "", None).open("", 0)
        link.ask(1)
        answer = await link.read()
        assert isinstance(answer, Checked)
        for hints in (link.opened.hints, answer.hints):
            assert hints.delay_s is not None
            assert hints.delay_s >= STABLE_WAIT_S
        link.close(is_final=True)

    asyncio.run(scenario())


def test_a_refused_check_backs_off_and_the_query_goes_on() -> None:
    query_text = "SELECT ?o { <s> <p> ?o FILTER(RAND() >= 0) }"  # its answers are not cached
    with SsapWorld(PoolSettings(requests_max=1)) as world:
        pool = world.knowledge.pool

        def begin_long_query() -> None:
            pool.on_request(PoolRequest(1_000_000, Lane.SPARQL, "another"), 0.0)
            pool.start(0.0)

        async def scenario() -> None:
            async with (
                connect() as connection,
                connection.persistent_query(
                    query_text, address=f"ssap://127.0.0.1:{world.port}", control=QUICK
                ) as query,
            ):
                assert (await anext(query)).added == []
                await until(lambda: query.statistics().checks > 0)
                assert query.statistics().control.failures == 0
                world.call(begin_long_query)
                await until(lambda: query.statistics().control.failures > 1)
                in_trouble = query.statistics()
                assert in_trouble.control.rbt_s > 0
                assert in_trouble.is_open, "a refusal is no reason to leave"
                world.call(lambda: list(pool.on_done(1_000_000, None, 0.0)))
                await until(lambda: query.statistics().checks > in_trouble.checks)
                assert query.statistics().openings == 1

        asyncio.run(scenario())


def test_a_filter_is_a_persistent_query_over_notifications(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with connect(broker.native) as connection, connection.persistent_query("NO2>200", control=QUICK) as query:
            await connection.publish([{"NO2": number} for number in range(199, 204)])
            async with asyncio.timeout(WAIT_S):
                told = [await anext(query) for _ in range(3)]
            assert [change.added for change in told] == [[{"NO2": number}] for number in (201, 202, 203)]
            assert [(change.sequence, change.lost, change.removed) for change in told] == [
                (n, 0, []) for n in (1, 2, 3)
            ]
            await until(lambda: query.statistics().checks > 2)
            assert query.statistics().control.losses == 0

    asyncio.run(scenario())


def test_a_program_that_takes_changes_slowly_gets_all_of_them_through_small_buffers(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent_query, "CHANGES_WAITING_MAX", 2)
    monkeypatch.setattr(persistent_filter, "WAITING_MAX", 2)

    async def scenario() -> None:
        async with connect(broker.native) as connection, connection.persistent_query("slow", control=RARE) as query:
            await connection.publish([{"slow": number} for number in range(50)])
            async with asyncio.timeout(WAIT_S):
                await until(lambda: query.statistics().changes >= 2)
                await asyncio.sleep(0.1)
                assert query.statistics().changes <= 4, "more was read than there is room for"
                told = [(await anext(query)).added for _ in range(50)]
            assert told == [[{"slow": number}] for number in range(50)]

    asyncio.run(scenario())


def test_checks_that_nothing_answers_do_not_hold_a_program_that_leaves(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent_query, "CHANGES_WAITING_MAX", 2)
    monkeypatch.setattr(persistent_filter, "WAITING_MAX", 2)

    async def scenario() -> None:
        async with connect(broker.native) as connection:
            query = connection.persistent_query("full", control=QUICK)
            query._request_timeout_s = 0.1
            async with query:
                await connection.publish([{"full": number} for number in range(50)])
                await until(lambda: query.statistics().control.failures > 2)

    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await scenario()

    asyncio.run(bounded())


def test_programs_without_an_event_loop(broker: BrokerProcess, knowledge: Knowledge) -> None:
    knowledge.update("INSERT DATA { <s> <p> 0 }")
    with connect_sync(broker.native) as connection, connection.persistent_query(QUERY, control=RARE) as query:
        changes = iter(query)
        assert len(next(changes).added) == 1
        knowledge.update("INSERT DATA { <s> <p> 1 }")
        assert [row["o"]["value"] for row in next(changes).added] == ["1"]
        assert query.statistics().changes == 2
        query.close()
        assert list(changes) == []
