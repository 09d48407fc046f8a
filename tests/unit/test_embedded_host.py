"""The embedded host carries frames immediately, and reports errors inside a layer."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.errors import ForeignFrame
from tidegate.filters import Filter
from tidegate.hosts.embedded_host import BrokerHost, EmbeddedHost
from tidegate.hosts.session import Session
from tidegate.layers.batch import BatchReader
from tidegate.layers.connection_point import Bounds
from tidegate.layers.frames import Ack
from tidegate.layers.outbox import Policy
from tidegate.layers.session_events import (
    DeliveriesWait,
    PublishAcknowledged,
    SessionEvent,
    SubscriptionReady,
    SubscriptionRefused,
)


class Client:
    """A client with an open session, and the events that it got."""

    def __init__(self, host: BrokerHost) -> None:
        self.events: list[SessionEvent] = []
        self.session = Session(host, self)
        self.session.open()

    def on_event(self, event: SessionEvent) -> None:
        self.events.append(event)


def make_host(bounds: Bounds | None = None) -> tuple[EmbeddedHost, list[Exception]]:
    failures: list[Exception] = []
    return EmbeddedHost(bounds or Bounds(), lambda: 0.0, failures.append), failures


def test_when_submit_returns_a_batch_is_in_the_outbox_and_acknowledged() -> None:
    host, failures = make_host()
    client = Client(host)
    client.session.attach_publisher("p")
    client.session.subscribe(1, Filter.parse("a==1"), Policy.DROP_OLDEST)
    batch = BatchReader().read_array("p", 1, msgspec.msgpack.encode([{"a": 1}, {"a": 2}]))
    client.session.submit([batch], 2)
    assert [type(event) for event in client.events] == [SubscriptionReady, DeliveriesWait, PublishAcknowledged]
    assert client.events[-1] == PublishAcknowledged("p", 2)
    frames: list[bytes] = []
    assert client.session.take(1000, frames.extend)
    assert len(frames) == 1
    client.session.close()
    assert host.matcher.statistics().subscriptions == 0
    assert failures == []


def test_a_mistake_inside_a_layer_is_told_and_raised() -> None:
    host, failures = make_host()
    with pytest.raises(ForeignFrame):
        host.carry([("access-point-1", Ack(stream=1, sequence=99))])
    assert len(failures) == 1


def test_a_subscription_that_the_matcher_cannot_take_is_refused_and_leaves_nothing_behind() -> None:
    host, failures = make_host(Bounds(names_per_session_max=1 << 17))
    point, client = host.connection_point, Client(host)
    client_id = 0
    while not any(isinstance(event, SubscriptionRefused) for event in client.events):
        client_id += 1
        wanted = Filter.parse(";".join(f"n{client_id}_{k}" for k in range(32)))
        client.session.subscribe(client_id, wanted, Policy.BLOCK)
    refused = client.events[-1]
    assert isinstance(refused, SubscriptionRefused)
    assert (refused.client_id, refused.error.code) == (client_id, "L607")
    assert point.statistics().subscriptions == host.matcher.statistics().subscriptions == client_id - 1
    client.session.unsubscribe(1)
    client.session.subscribe(client_id, wanted, Policy.BLOCK)
    assert client.events[-1] == SubscriptionReady(client_id)
    client.session.close()
    assert point.statistics().subscriptions == host.matcher.statistics().subscriptions == 0
    assert failures == []


def test_how_long_batches_take_through_the_layers_is_shown_for_the_last_second() -> None:
    """The clock advances by a millisecond whenever it is read."""
    reads = iter(range(1, 1_000_000))
    failures: list[Exception] = []
    host = EmbeddedHost(Bounds(), lambda: next(reads) / 1000, failures.append)
    session = Client(host).session
    session.attach_publisher("p")
    host.tick()
    assert host.status()["delays_ms"] is None
    batch = BatchReader().read_array("p", 1, msgspec.msgpack.encode([{"a": 1}]))
    session.submit([batch], 1)
    while next(reads) < 1500:
        pass
    host.tick()
    shown = host.status()["delays_ms"]
    # The clock is read three times: at the beginning, in the carrier, and at the end. Delays are counted in buckets
    # that differ by a quarter.
    assert 2 <= shown["p50"] == shown["p99"] <= 2 * 1.25
    while next(reads) < 3000:
        pass
    host.tick()
    assert host.status()["delays_ms"] is None
