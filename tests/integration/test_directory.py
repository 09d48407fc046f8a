"""The directory in a real ZooKeeper: what one process decides while the nodes of another appear and expire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from zookeeper_process import ZooKeeperProcess

from tidegate.cluster.directory import Directory, Leader
from tidegate.cluster.planning import Wanted

ONE, OTHER = Leader("coordinator-1", "127.0.0.1:1"), Leader("coordinator-2", "127.0.0.1:2")


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[ZooKeeperProcess]:
    with ZooKeeperProcess() as process:
        yield process


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[Directory]:
    directory = Directory(address, lambda: None, lambda: None)
    await directory.open()
    try:
        yield directory
    finally:
        await directory.close()


def before(call: Callable[..., Any], event: Callable[[], None]) -> Callable[..., Any]:
    """Returns the call, with an event in another process just before its first use."""
    pending = [event]

    def called(*arguments: Any, **options: Any) -> Any:
        if pending:
            pending.pop()()
        return call(*arguments, **options)

    return called


def test_one_coordinator_leads_until_its_session_ends(zookeeper: ZooKeeperProcess) -> None:
    async def scenario() -> None:
        address = f"{zookeeper.address}/one-leads"
        async with opened(address) as standby:
            async with opened(address) as leading:
                assert await leading.lead(ONE)
                assert not await standby.lead(OTHER)
                assert await leading.lead(ONE)  # as after a lost reply
            assert await standby.lead(OTHER)

    asyncio.run(scenario())


def test_a_leader_that_expires_while_a_standby_looks_is_followed(
    zookeeper: ZooKeeperProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        address = f"{zookeeper.address}/expires"
        async with opened(address) as leading, opened(address) as standby:
            assert await leading.lead(ONE)
            expire = lambda: leading._client.delete("/expires/leader")  # noqa: E731
            monkeypatch.setattr(standby._client, "get", before(standby._client.get, expire))
            assert await standby.lead(OTHER)

    asyncio.run(scenario())


def test_two_operators_may_make_the_first_request_together(
    zookeeper: ZooKeeperProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> Wanted:
        address = f"{zookeeper.address}/together"
        async with opened(address) as one, opened(address) as other:
            first = lambda: one._client.create("/together/wanted", msgspec.msgpack.encode(Wanted()))  # noqa: E731
            monkeypatch.setattr(other._client, "create", before(other._client.create, first))
            await other.want(Wanted(matchers=3))
            while other.wanted().matchers != 3:
                await other.wait_change()
            return other.wanted()

    assert asyncio.run(asyncio.wait_for(scenario(), 60)).matchers == 3
