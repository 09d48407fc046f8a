"""The simulated host: runs several of each of the product's own slices, with clients that publish, resend, reconnect,
subscribe, read slowly and leave. A seeded scheduler delivers the frames of channels in any order that FIFO allows.

`World(seed).run()` checks the promised laws during the run and at rest. A failing seed replays exactly.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidegate.filters import Filter
from tidegate.frames import HEADER, HEADER_BYTES, Gap, Kind, decode_body, decode_deliver
from tidegate.layers.access_point import AccessPoint
from tidegate.layers.batch import Batch, BatchReader
from tidegate.layers.connection_point import Bounds, ConnectionPoint
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import LayerFrame
from tidegate.layers.matcher import Matcher
from tidegate.layers.outbox import Policy
from tidegate.layers.selector import Configuration
from tidegate.layers.session_events import (
    Output,
    PublishAcknowledged,
    SessionEnded,
    SessionEvent,
    SubscriptionReady,
    SubscriptionRebound,
)

FILTERS = [Filter.parse(text) for text in ("*", "a==1", "a==2,3", "a>1", "a<3;b", "!b", "b^=x", "a!=2", "b=='xy'")]
READER = BatchReader()


@dataclass
class SimulatedPublisher:
    """A publisher that numbers its notifications, and may resend those that are not acknowledged."""

    name: str
    point: ConnectionPoint
    session: int
    sent: int = 0
    acknowledged: int = 0
    notifications: dict[int, dict[str, Any]] = field(default_factory=dict)
    first_sent_at: dict[int, int] = field(default_factory=dict)


@dataclass
class Version:
    """A filter of a subscription, with the steps when it was requested and when it was known to be in force."""

    filter: Filter
    asked_at: int
    rebound_at: int | None = None


@dataclass
class SimulatedSubscription:
    """What one subscription must receive, may receive, and has received, with the steps of these events."""

    versions: list[Version]
    ready_at: int | None = None
    ended_at: int | None = None
    received: list[tuple[str, int]] = field(default_factory=list)
    missed: int = 0

    def filters(self, sent_at: int) -> list[Filter]:
        """Returns the filters that may apply to a notification sent then: the newest known to be in force, and all
        later ones."""
        known = [place for place, each in enumerate(self.versions) if (each.rebound_at or sent_at) < sent_at]
        return [each.filter for each in self.versions[max(known, default=0) :]]


@dataclass
class SimulatedSubscriber:
    point: ConnectionPoint
    session: int
    policy: Policy
    subscriptions: dict[int, SimulatedSubscription] = field(default_factory=dict)
    was_disconnected: bool = False


class World:
    def __init__(
        self, seed: int, *, bounds: Bounds | None = None, policies: tuple[Policy, ...] = tuple(Policy)
    ) -> None:
        self.rng = random.Random(seed)
        self.step = 0
        self.now_s = 0.0
        self.policies = policies
        count = {
            layer: self.rng.randint(1, 3) for layer in ("access-point", "matcher", "exit-point", "connection-point")
        }
        names = {layer: tuple(f"{layer}-{i + 1}" for i in range(number)) for layer, number in count.items()}
        self.configuration = Configuration(1, names["access-point"], names["matcher"], names["exit-point"])
        self.points = [
            ConnectionPoint(i + 1, self.rng.choice(names["access-point"]), bounds or Bounds())
            for i in range(count["connection-point"])
        ]
        self.access_points = [AccessPoint(name, self.configuration) for name in names["access-point"]]
        self.exit_points = [ExitPoint(name, self.configuration) for name in names["exit-point"]]
        self.matchers = [Matcher(name, self.configuration) for name in names["matcher"]]
        slices: list[Any] = [*self.points, *self.access_points, *self.exit_points, *self.matchers]
        self.slices = {part.name: part for part in slices}
        self.channels: dict[tuple[str, str], deque[LayerFrame]] = {}
        self.publishers: list[SimulatedPublisher] = []
        self.subscribers: list[SimulatedSubscriber] = []
        self.next_client_id = 1

    def run(self, steps: int = 300) -> None:
        for number in range(self.rng.randint(1, 4)):
            self.add_publisher(f"publisher-{number}")
        actions = [self.carry_one] * 12 + [self.publish] * 3 + [self.send_again, self.subscribe, self.subscribe]
        actions += [self.read, self.read, self.unsubscribe, self.rebind, self.reconnect_publisher]
        for _ in range(steps):
            self.step += 1
            self.rng.choice(actions)()
            if self.rng.random() < 0.02:
                self.leave()
        self.come_to_rest()
        self.check_laws()

    # The network.

    def send(self, source: str, outputs: Sequence[Output]) -> None:
        address: Any
        frame: Any
        for address, frame in outputs:
            if isinstance(address, int):
                self.tell(source, address, frame)
            else:
                self.channels.setdefault((source, address), deque()).append(frame)

    def carry_one(self) -> None:
        waiting = [channel for channel, frames in self.channels.items() if frames]
        if waiting:
            source, address = self.rng.choice(waiting)
            frame = self.channels[source, address].popleft()
            self.send(address, self.slices[address].handle(source, frame, self.now_s))

    def come_to_rest(self) -> None:
        """Carries all frames and lets all clients read, until nothing is left to do."""
        has_more = True
        while has_more or any(self.channels.values()):
            self.step += 1
            self.carry_one()
            takes = [self.take(subscriber) for subscriber in self.subscribers]
            has_more = any(takes)

    def tell(self, point: str, session: int, event: SessionEvent) -> None:
        match event:
            case PublishAcknowledged():
                publisher = next(p for p in self.publishers if p.name == event.publisher)
                if publisher.session == session:
                    assert event.sequence <= publisher.sent, "more is acknowledged than was sent"
                    publisher.acknowledged = max(publisher.acknowledged, event.sequence)
            case SubscriptionReady():
                subscriber = self.subscriber(point, session)
                subscriber.subscriptions[event.client_id].ready_at = self.step
            case SubscriptionRebound():
                versions = self.subscriber(point, session).subscriptions[event.client_id].versions
                next(each for each in versions[1:] if each.rebound_at is None).rebound_at = self.step
            case SessionEnded():
                for each in self.subscribers:
                    if (each.point.name, each.session) == (point, session):
                        each.was_disconnected = True

    # The clients.

    def add_publisher(self, name: str) -> None:
        point = self.rng.choice(self.points)
        session = point.open_session()
        self.publishers.append(SimulatedPublisher(name, point, session))
        self.send(point.name, point.attach_publisher(session, name))

    def publish(self) -> None:
        publisher = self.rng.choice(self.publishers)
        first = publisher.sent + 1
        for sequence in range(first, first + self.rng.randint(1, 4)):
            notification: dict[str, Any] = {"a": self.rng.randint(0, 4)}
            if self.rng.random() < 0.5:
                notification["b"] = self.rng.choice(["x", "xy", "y", 1, True])
            publisher.notifications[sequence] = notification
            publisher.first_sent_at[sequence] = self.step
            publisher.sent = sequence
        self.submit(publisher, first, publisher.sent)

    def send_again(self) -> None:
        """Sends a range that overlaps acknowledged, pending and new notifications."""
        publisher = self.rng.choice(self.publishers)
        if publisher.sent:
            first = self.rng.randint(max(1, publisher.acknowledged - 2), publisher.sent)
            self.submit(publisher, first, self.rng.randint(first, publisher.sent))

    def reconnect_publisher(self) -> None:
        publisher = self.rng.choice(self.publishers)
        if self.rng.random() < 0.5:
            self.send(publisher.point.name, publisher.point.close_session(publisher.session))
        assert self.reconnect(publisher) >= publisher.acknowledged

    def reconnect(self, publisher: SimulatedPublisher) -> int:
        """Connects a publisher to another Connection Point. Returns the last number acknowledged there."""
        publisher.session = publisher.point.open_session()
        outputs = publisher.point.attach_publisher(publisher.session, publisher.name)
        acknowledged = publisher.point.acknowledged(publisher.name)
        self.send(publisher.point.name, outputs)
        publisher.acknowledged = max(acknowledged, publisher.acknowledged)
        if publisher.acknowledged < publisher.sent:
            self.submit(publisher, publisher.acknowledged + 1, publisher.sent)
        return acknowledged

    def submit(self, publisher: SimulatedPublisher, first: int, last: int) -> None:
        many = [publisher.notifications[sequence] for sequence in range(first, last + 1)]
        batch: Batch = READER.read_array(publisher.name, first, msgspec.msgpack.encode(many))
        self.send(publisher.point.name, publisher.point.submit(publisher.name, [batch], last))

    def subscribe(self) -> None:
        if not self.subscribers or self.rng.random() < 0.4:
            point = self.rng.choice(self.points)
            policy = self.rng.choice(self.policies)
            self.subscribers.append(SimulatedSubscriber(point, point.open_session(), policy))
        subscriber = self.rng.choice(self.subscribers)
        if not subscriber.was_disconnected:
            client_id, self.next_client_id = self.next_client_id, self.next_client_id + 1
            wanted = self.rng.choice(FILTERS)
            subscriber.subscriptions[client_id] = SimulatedSubscription([Version(wanted, self.step)])
            point = subscriber.point
            self.send(point.name, point.subscribe(subscriber.session, client_id, wanted, subscriber.policy))

    def unsubscribe(self) -> None:
        for subscriber, client_id, subscription in self.one_live():
            subscription.ended_at = self.step
            self.send(subscriber.point.name, subscriber.point.unsubscribe(subscriber.session, client_id))

    def rebind(self) -> None:
        for subscriber, client_id, subscription in self.one_live():
            wanted = self.rng.choice(FILTERS)
            subscription.versions.append(Version(wanted, self.step))
            self.send(subscriber.point.name, subscriber.point.rebind(subscriber.session, client_id, wanted))

    def one_live(self) -> Iterator[tuple[SimulatedSubscriber, int, SimulatedSubscription]]:
        """Yields a random subscription that has not ended, if there is one."""
        subscriber = self.rng.choice(self.subscribers) if self.subscribers else None
        if subscriber is None or subscriber.was_disconnected:
            return
        live = [number for number, each in subscriber.subscriptions.items() if each.ended_at is None]
        if live:
            client_id = self.rng.choice(live)
            yield subscriber, client_id, subscriber.subscriptions[client_id]

    def leave(self) -> None:
        subscriber = self.rng.choice(self.subscribers) if self.subscribers else None
        if subscriber is not None and not subscriber.was_disconnected:
            subscriber.was_disconnected = True
            self.send(subscriber.point.name, subscriber.point.close_session(subscriber.session))

    def read(self) -> None:
        if self.subscribers:
            self.take(self.rng.choice(self.subscribers))

    def take(self, subscriber: SimulatedSubscriber) -> bool:
        if subscriber.was_disconnected:
            return False
        frames, outputs = subscriber.point.take(subscriber.session, self.rng.choice([1, 200, 10_000]))
        self.send(subscriber.point.name, outputs)
        for frame in frames:
            self.receive(subscriber, frame)
        return bool(frames)

    def receive(self, subscriber: SimulatedSubscriber, frame: bytes) -> None:
        body = frame[HEADER_BYTES:]
        if HEADER.unpack_from(frame)[1] == Kind.GAP:
            gap: Gap = decode_body(body, Gap)
            for client_id, missed in gap.dropped.items():
                subscriber.subscriptions[client_id].missed += missed
            return
        publisher, deliveries = decode_deliver(body)
        for each in deliveries:
            ids = [each.subscriptions] if isinstance(each.subscriptions, int) else each.subscriptions
            for client_id in ids:
                subscription = subscriber.subscriptions[client_id]
                filters = subscription.filters(self.sent_at(publisher, each.sequence))
                assert any(wanted.matches(each.notification) for wanted in filters)
                subscription.received.append((publisher, each.sequence))

    def sent_at(self, publisher: str, sequence: int) -> int:
        return next(each.first_sent_at[sequence] for each in self.publishers if each.name == publisher)

    def subscriber(self, point: str, session: int) -> SimulatedSubscriber:
        return next(s for s in self.subscribers if (s.point.name, s.session) == (point, session))

    # The laws.

    def check_laws(self) -> None:
        for publisher in self.publishers:
            assert publisher.acknowledged == publisher.sent, f"{publisher.name} waits for ever"
        for subscriber in self.subscribers:
            for subscription in subscriber.subscriptions.values():
                self.check_order(subscription)
                if not subscriber.was_disconnected:
                    self.check_delivered(subscriber, subscription)
        self.check_rest()

    def check_order(self, subscription: SimulatedSubscription) -> None:
        """Checks that each notification came once, in the publisher's order."""
        last: dict[str, int] = {}
        for publisher, sequence in subscription.received:
            assert sequence > last.get(publisher, 0), (publisher, sequence, subscription)
            last[publisher] = sequence

    def check_delivered(self, subscriber: SimulatedSubscriber, subscription: SimulatedSubscription) -> None:
        """Checks that everything published between its acknowledgement and its end arrived, and nothing from before its
        request."""
        assert subscription.ready_at is not None or subscription.ended_at is not None
        must = {
            (publisher.name, sequence)
            for publisher in self.publishers
            for sequence, sent_at in publisher.first_sent_at.items()
            if all(wanted.matches(publisher.notifications[sequence]) for wanted in subscription.filters(sent_at))
            and subscription.ready_at is not None
            and subscription.ready_at < sent_at
            and subscription.ended_at is None
        }
        got = set(subscription.received)
        if subscriber.policy is Policy.DROP_OLDEST:
            assert len(must - got) <= subscription.missed, (must - got, subscription)
        else:
            assert must <= got, (must - got, subscription)
            assert subscription.missed == 0

    def check_rest(self) -> None:
        """Checks that at rest all buffers are empty, and that every subscription is in exactly one Matcher."""
        for access_point in self.access_points:
            statistics = access_point.statistics()
            assert (statistics.unacknowledged_batches, statistics.pending_changes) == (0, 0)
        for exit_point in self.exit_points:
            rest = exit_point.statistics()
            assert (rest.incomplete_batches, rest.unacknowledged_batches) == (0, 0)
        for point in self.points:
            left = point.statistics()
            assert (left.bytes_under_way, left.outbox_notifications, left.outbox_bytes) == (0, 0, 0)
            assert left.blocked_outboxes == 0
        live = sum(
            subscription.ended_at is None
            for subscriber in self.subscribers
            if not subscriber.was_disconnected
            for subscription in subscriber.subscriptions.values()
        )
        assert sum(point.statistics().subscriptions for point in self.points) == live
        assert sum(matcher.statistics().subscriptions for matcher in self.matchers) == live
