"""The embedded host carries everything at once, and a mistake inside a layer does not go unnoticed."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.filters import Filter
from tidegate.layers.batch import BatchReader
from tidegate.layers.connection_point import Bounds
from tidegate.layers.embedded_host import EmbeddedHost
from tidegate.layers.frames import (
    Ack,
    DeliveriesWait,
    LayerFrame,
    PublishAcknowledged,
    SubscriptionReady,
    SubscriptionRefused,
)
from tidegate.layers.outbox import Policy


class Session:
    def __init__(self) -> None:
        self.frames: list[LayerFrame] = []

    def on_frame(self, frame: LayerFrame) -> None:
        self.frames.append(frame)


def make_host() -> tuple[EmbeddedHost, list[Exception]]:
    failures: list[Exception] = []
    return EmbeddedHost(Bounds(), lambda: 0.0, failures.append), failures


def test_when_carry_returns_a_batch_is_in_the_outbox_and_acknowledged() -> None:
    host, failures = make_host()
    point, session = host.connection_point, Session()
    number = host.open_session(session)
    point.attach_publisher(number, "p")
    host.carry(point.subscribe(number, 1, Filter.parse("a==1"), Policy.DROP_OLDEST))
    batch = BatchReader().read_array("p", 1, msgspec.msgpack.encode([{"a": 1}, {"a": 2}]))
    host.carry(point.submit("p", [batch], 2))
    assert [type(frame) for frame in session.frames] == [SubscriptionReady, DeliveriesWait, PublishAcknowledged]
    assert session.frames[-1] == PublishAcknowledged("p", 2)
    frames, _outputs = point.take(number, 1000)
    assert len(frames) == 1
    host.close_session(number)
    assert host.matcher.statistics().subscriptions == 0
    assert failures == []


def test_a_mistake_inside_a_layer_is_told_and_raised() -> None:
    host, failures = make_host()
    with pytest.raises(KeyError):
        host.carry([("access-point-1", Ack(stream=1, sequence=99))])
    assert len(failures) == 1


def test_a_subscription_that_the_matcher_cannot_take_is_refused_and_leaves_nothing_behind() -> None:
    host, failures = make_host()
    point, session = host.connection_point, Session()
    number = host.open_session(session)
    client_id = 0
    while not any(isinstance(frame, SubscriptionRefused) for frame in session.frames):
        client_id += 1
        wanted = Filter.parse(";".join(f"n{client_id}_{k}" for k in range(32)))
        host.carry(point.subscribe(number, client_id, wanted, Policy.BLOCK))
    refused = session.frames[-1]
    assert isinstance(refused, SubscriptionRefused)
    assert (refused.client_id, refused.error.code) == (client_id, "L607")
    assert point.statistics().subscriptions == host.matcher.statistics().subscriptions == client_id - 1
    host.carry(point.unsubscribe(number, 1))
    host.carry(point.subscribe(number, client_id, wanted, Policy.BLOCK))
    assert session.frames[-1] == SubscriptionReady(client_id)
    host.close_session(number)
    assert point.statistics().subscriptions == host.matcher.statistics().subscriptions == 0
    assert failures == []


def test_how_long_batches_take_through_the_layers_is_shown_for_the_last_second() -> None:
    """By a clock that goes on by a millisecond whenever it is read."""
    reads = iter(range(1, 1_000_000))
    failures: list[Exception] = []
    host = EmbeddedHost(Bounds(), lambda: next(reads) / 1000, failures.append)
    point = host.connection_point
    number = host.open_session(Session())
    point.attach_publisher(number, "p")
    host.tick()
    assert host.status()["delays_ms"] is None
    batch = BatchReader().read_array("p", 1, msgspec.msgpack.encode([{"a": 1}]))
    host.carry(point.submit("p", [batch], 1))
    while next(reads) < 1500:
        pass
    host.tick()
    shown = host.status()["delays_ms"]
    # Three reads: at the beginning, in the carrier, at the end. Delays are counted in steps of a quarter.
    assert 2 <= shown["p50"] == shown["p99"] <= 2 * 1.25
    while next(reads) < 3000:
        pass
    host.tick()
    assert host.status()["delays_ms"] is None
