"""A session is the whole way into the layers: its calls carry their frames, and its events arrive in a safe order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_embedded_host import Client, make_host

from tidegate.errors import Overloaded
from tidegate.filters import Filter
from tidegate.hosts.session import Session
from tidegate.layers.batch import Batch, BatchReader
from tidegate.layers.connection_point import Bounds
from tidegate.layers.outbox import Policy
from tidegate.layers.session_events import PublishAcknowledged, SessionEnded

READER = BatchReader()


def batch(first: int, *notifications: dict[str, Any]) -> Batch:
    return READER.read_array("p", first, msgspec.msgpack.encode(notifications))


def test_a_session_that_is_not_open_has_nothing_to_take_and_nothing_to_close() -> None:
    host, failures = make_host(Bounds(sessions_max=1))
    client = Client(host)
    refused = Session(host, client)
    with pytest.raises(Overloaded, match="L601"):
        refused.open()
    assert not refused.take(1000, lambda _frames: pytest.fail("there is nothing to write"))
    refused.close()
    assert host.connection_point.statistics().sessions == 1
    client.session.close()
    assert host.connection_point.statistics().sessions == 0
    refused.open()
    assert failures == []


def test_deliveries_are_written_before_the_acknowledgements_that_waited_for_them() -> None:
    host, failures = make_host(Bounds(outbox_notifications_max=1))
    publisher, subscriber = Client(host), Client(host)
    publisher.session.attach_publisher("p")
    subscriber.session.subscribe(1, Filter.parse("a"), Policy.BLOCK)
    publisher.session.submit([batch(1, {"a": 1}, {"a": 2})], 2)
    assert publisher.events == []
    written: list[bytes] = []

    def write(frames: list[bytes]) -> None:
        assert publisher.events == []
        written.extend(frames)

    assert subscriber.session.take(1 << 20, write)
    assert len(written) == 1
    assert publisher.events == [PublishAcknowledged("p", 2)]
    assert publisher.session.acknowledged == 2
    assert not subscriber.session.take(1 << 20, write)
    assert failures == []


def test_taking_over_a_publisher_ends_its_former_session_and_shows_what_that_one_released() -> None:
    """The former session blocks its own publisher. Its end acknowledges the batch, to the session that took over."""
    host, failures = make_host(Bounds(outbox_notifications_max=1))
    former, latter = Client(host), Client(host)
    former.session.attach_publisher("p")
    former.session.subscribe(1, Filter.parse("a"), Policy.BLOCK)
    former.session.submit([batch(1, {"a": 1}, {"a": 2})], 2)
    assert former.session.acknowledged == 0
    latter.session.attach_publisher("p")
    assert latter.session.acknowledged == 2
    assert latter.events == [PublishAcknowledged("p", 2)]
    assert isinstance(former.events[-1], SessionEnded)
    former.session.close()
    assert host.connection_point.statistics().sessions == 1
    assert failures == []


def test_a_closed_session_gets_no_more_events() -> None:
    host, failures = make_host()
    client = Client(host)
    client.session.subscribe(1, Filter.parse("a"), Policy.DROP_OLDEST)
    before = list(client.events)
    client.session.close()
    client.session.close()
    assert client.events == before, "the end of its subscription is not reported to it"
    assert host.matcher.statistics().subscriptions == 0
    assert failures == []
