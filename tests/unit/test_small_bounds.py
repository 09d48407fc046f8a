"""Tables that grow with client input stay within their bounds, and forget or refuse as docs/bounds.md describes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from starlette.requests import Request

from tidegate.client import subscriber as client_subscriber
from tidegate.client.subscriber import Delivery, Subscription, WantedFilter
from tidegate.cluster import channels
from tidegate.config import Config
from tidegate.errors import ForeignFrame, NotAllowed, Overloaded
from tidegate.filters import Filter
from tidegate.hosts.embedded_host import EmbeddedHost
from tidegate.layers import queue_point
from tidegate.layers.batch import BatchReader
from tidegate.layers.connection_point import Bounds, ConnectionPoint
from tidegate.layers.frames import Deliver, SubmitAck
from tidegate.layers.outbox import Policy
from tidegate.listeners import ssap
from tidegate.listeners.http import publish
from tidegate.listeners.http.publish import HttpPublisher
from tidegate.messages import Dequeue, NewMessage
from tidegate.queues import LogicalQueues
from tidegate.queues.stores import physical_queue
from tidegate.queues.stores.lmdb_store import LmdbStore


def test_subscriptions_are_bounded_by_number_in_a_session_and_in_all() -> None:
    point = ConnectionPoint(1, "access-point-1", Bounds(subscriptions_per_session_max=2, subscriptions_max=3))
    first, second = point.open_session(), point.open_session()
    wanted = Filter.parse("a")
    for session, number in ((first, 1), (first, 2), (second, 1)):
        point.subscribe(session, number, wanted, Policy.DROP_OLDEST)
    for session in (first, second):
        with pytest.raises(Overloaded, match="L602"):
            point.subscribe(session, 9, wanted, Policy.DROP_OLDEST)
    assert point.statistics().subscriptions == 3
    assert point.refusals.counts == {"L602": 2}


def test_sessions_are_bounded() -> None:
    point = ConnectionPoint(1, "access-point-1", Bounds(sessions_max=2))
    first, _second = point.open_session(), point.open_session()
    with pytest.raises(Overloaded, match="L601"):
        point.open_session()
    point.close_session(first)
    point.open_session()


def test_publishers_wait_when_all_of_them_have_too_much_under_way() -> None:
    point = ConnectionPoint(1, "access-point-1", Bounds(publisher_window_bytes=10_000, window_bytes=300))
    batch = BatchReader().read_array("p", 1, msgspec.msgpack.encode([{"a": "x" * 200}] * 2))
    point.submit("p", [batch], batch.last)
    assert point.is_congested("p")
    assert point.is_congested("another")
    point.on_submit_ack("access-point-1", SubmitAck("p", batch.last), 0.0)
    assert not point.is_congested("another")


def test_members_that_have_shown_the_token_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssap, "MEMBERS_MAX", 2)
    members = ssap.Members("secret")
    for name in ("a", "b"):
        members.join("address", name, "secret")
    members.check("address", "a")
    members.join("address", "c", "secret")
    members.check("address", "a")
    with pytest.raises(NotAllowed):
        members.check("address", "b")


def test_addresses_whose_rate_is_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "CLIENTS_REMEMBERED_MAX", 5)
    host = EmbeddedHost(Bounds(), time.monotonic, lambda _error: None)
    publisher = HttpPublisher(host, Config(rate_notifications_s=1.0), "test", list)

    async def ask() -> None:
        for number in range(20):
            request = Request({"type": "http", "client": (f"10.0.0.{number}", 1), "headers": []})
            publisher._check_rate(request, 1)

    asyncio.run(ask())
    assert len(publisher._rates) == 5


def test_a_client_remembers_the_publishers_that_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_subscriber, "PUBLISHERS_REMEMBERED_MAX", 2)
    subscription = Subscription(cast(Any, None), 1, WantedFilter(Filter.parse("*")), "drop-oldest")
    for name in ("a", "b", "c"):
        subscription.on_deliveries(name, [Delivery(1, 1, {})])
    for name in ("c", "a"):
        subscription.on_deliveries(name, [Delivery(1, 1, {})])
    assert subscription.statistics().doubled == 1, "only the latest are known to come again"


def test_messages_behind_a_held_group_are_remembered_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(physical_queue, "BEHIND_MAX", 3)

    async def scenario() -> None:
        store = LmdbStore(tmp_path)
        queues = LogicalQueues(store)
        await queues.open()
        await queues.define("q", {"physical_queues": 1})
        body = msgspec.Raw(msgspec.msgpack.encode({"a": 1}))
        await queues.enqueue("q", [NewMessage(body, "group") for _ in range(10)])
        assert len(await queues.dequeue(Dequeue("q", max=1))) == 1
        assert await queues.dequeue(Dequeue("q", max=10, wait_s=0)) == []
        assert store.queue("q").physical[0].leases.behind == 3
        await queues.close()

    asyncio.run(scenario())


def test_runs_of_publishers_that_a_binding_follows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_point, "RUNS_MAX", 2)
    binding = queue_point.Binding(1, "q", Filter.parse("a"))
    none = np.empty(0, np.int64)

    def since(publisher: str, first: int) -> int:
        batch = BatchReader().read_array(publisher, first, msgspec.msgpack.encode([{"a": 1}]))
        return queue_point.since_of(binding, Deliver("access-point-1", 1, 1, batch, "", 1, none, none), first)

    assert [since("a", 1), since("b", 1), since("a", 2)] == [1, 1, 1]
    assert since("c", 1) == 1
    assert (since("a", 3), len(binding.runs)) == (1, 2)
    assert since("b", 2) == 2, "the least recently seen begins anew"


def test_names_of_one_channel_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "NAMES_MAX", 2)
    incoming = channels._Incoming(cast(Any, None))
    incoming._learn_name(1, b"matcher-1")
    with pytest.raises(ForeignFrame, match="P340"):
        incoming._learn_name(2, b"x" * (channels.NAME_BYTES_MAX + 1))
    incoming._learn_name(2, b"matcher-2")
    with pytest.raises(ForeignFrame, match="P340"):
        incoming._learn_name(3, b"matcher-3")
