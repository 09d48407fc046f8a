"""Connection Point: where a notification enters from its publisher, and where it waits for its subscribers.

Listeners open a session for each connection and call it; it answers with frames for the layers (addressed to a slice)
and for sessions (addressed to a number). It keeps three things: the publishers (what is accepted, what is under way),
the subscriptions (which session wants what), and the outboxes (what a connection has not taken yet).

What may go wrong here: a publisher sends a batch again (it is delivered once), a subscriber is slow (its outbox fills
and its policy applies), a session ends with everything under way (its subscriptions end, its acknowledgements are
given so that nobody waits for it).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tidegate.errors import NotAllowed, Overloaded, ProtocolError, TidegateError
from tidegate.filters import Filter
from tidegate.layers.batch import Batch
from tidegate.layers.delivery_writer import DeliveryWriter
from tidegate.layers.frames import (
    Change,
    ChangeOk,
    ChangeRefused,
    Deliver,
    DeliverAck,
    DeliveriesWait,
    Outputs,
    PublishAcknowledged,
    SessionEnded,
    Submit,
    SubmitAck,
    SubscriptionEnded,
    SubscriptionReady,
    SubscriptionRebound,
    SubscriptionRefused,
)
from tidegate.layers.index.packing import pack
from tidegate.layers.outbox import Outbox, Policy, Ticket
from tidegate.layers.publishers import NOBODY, HighWaterMarks, Publishers
from tidegate.layers.subscription_table import SubscriptionTable, connection_point_name
from tidegate.layers.uplink import Edge


class TakenOver(NotAllowed):
    """Another connection speaks for the publisher now."""

    status = 409


@dataclass(frozen=True)
class Bounds:
    """Every buffer of a Connection Point has a bound; docs/operating.md says what happens at each."""

    outbox_notifications_max: int = 100_000
    outbox_bytes_max: int = 64 * 1024 * 1024
    block_s: float = 5.0
    publishers_max: int = 1_000_000
    publisher_window_bytes: int = 4 * 1024 * 1024
    window_bytes: int = 256 * 1024 * 1024
    sessions_max: int = 10_000
    subscriptions_max: int = 2_000_000
    subscriptions_per_session_max: int = 1_000_000


@dataclass(frozen=True)
class ConnectionPointStatistics:
    sessions: int
    subscriptions: int
    publishers: int
    accepted: int
    duplicates: int
    refused: int
    delivered: int
    dropped: int
    disconnected: int
    outbox_notifications: int
    outbox_bytes: int
    bytes_under_way: int
    blocked_outboxes: int


@dataclass(slots=True)
class _Subscription:
    """`version` counts its changes: it begins with 1, gets other filters, and ends with the last."""

    id: int
    session: int
    client_id: int
    version: int = 1
    has_ended: bool = False
    was_refused: bool = False


@dataclass(slots=True)
class _Session:
    """`was_told` is true from DeliveriesWait until the listener has taken all."""

    outboxes: dict[Policy, int] = field(default_factory=dict)
    subscriptions: dict[int, _Subscription] = field(default_factory=dict)
    publishers: set[str] = field(default_factory=set)
    was_told: bool = False


@dataclass(slots=True)
class _Counters:
    accepted: int = 0
    duplicates: int = 0
    refused: int = 0
    delivered: int = 0
    dropped: int = 0
    disconnected: int = 0


class ConnectionPoint(Edge):
    """Guarantees: a batch that comes twice goes into the layers once; a subscriber gets a notification once, in the
    publisher's order; a slow subscriber costs the others nothing, unless it asked for `block`."""

    def __init__(self, number: int, access_point: str, bounds: Bounds) -> None:
        super().__init__(connection_point_name(number), access_point)
        self.bounds = bounds
        self._publishers = Publishers(bounds.publishers_max)
        self._marks = HighWaterMarks(bounds.publishers_max)
        self._table = SubscriptionTable(number)
        self._writer = DeliveryWriter(self._table)
        self._sessions: dict[int, _Session] = {}
        self._subscriptions: dict[int, _Subscription] = {}
        self._outboxes: list[Outbox | None] = []
        self._free_outboxes: list[int] = []
        self._blocked: set[int] = set()
        self._bytes_under_way = 0
        self._next_session = NOBODY + 1
        self._count = _Counters()

    # Calls of the listeners.

    def open_session(self) -> int:
        if len(self._sessions) >= self.bounds.sessions_max:
            raise Overloaded(
                "L601",
                f"{self.bounds.sessions_max} connections are open",
                "come back later, or raise connections_max",
                retry_after_s=5.0,
            )
        session = self._next_session
        self._next_session += 1
        self._sessions[session] = _Session()
        return session

    def close_session(self, session: int) -> Outputs:
        """The connection is gone: its subscriptions end, and what waited for it is acknowledged. Idempotent."""
        state = self._sessions.pop(session, None)
        if state is None:
            return []
        outputs: Outputs = []
        for name in state.publishers:
            publisher = self._publishers.known(name)
            if publisher is not None and publisher.session == session:
                publisher.session = NOBODY
        for subscription in state.subscriptions.values():
            outputs += self._end(subscription)
        for number in state.outboxes.values():
            outputs += self._free_outbox(number)
        return outputs

    def attach_publisher(self, session: int, name: str) -> tuple[int, Outputs]:
        """This session speaks for a publisher: how far it is acknowledged. A session that spoke for it ends: it is
        the half-open connection of a client that has come back."""
        publisher = self._publishers.get(name)
        outputs: Outputs = []
        if publisher.session not in (NOBODY, session):
            taken_over = TakenOver("A504", f"publisher {name!r} has connected again", "use one connection a publisher")
            outputs = self._disconnect(publisher.session, taken_over)
        publisher.session = session
        self._sessions[session].publishers.add(name)
        return publisher.acknowledged, outputs

    def detach_publisher(self, session: int, name: str) -> None:
        """The session speaks for it no more: it gets no acknowledgements, and may be forgotten when idle."""
        publisher = self._publishers.known(name)
        if publisher is not None and publisher.session == session:
            publisher.session = NOBODY
        self._sessions[session].publishers.discard(name)

    def submit(self, name: str, batches: Iterable[Batch], through: int) -> Outputs:
        """A publisher's batches, in its order; `through` is the last sequence they cover, refused ones included."""
        publisher = self._publishers.get(name)
        outputs: Outputs = []
        is_new = False
        for given in batches:
            fresh = given.after(publisher.accepted)
            self._count.duplicates += len(given) - len(fresh)
            if len(fresh):
                size_bytes = fresh.size_bytes
                publisher.accept(fresh.last, size_bytes)
                self._bytes_under_way += size_bytes
                self._count.accepted += len(fresh)
                outputs += self._uplink.submit(Submit(fresh))
                is_new = True
        if through > publisher.accepted:
            publisher.accept(through, 0)
            publisher.finish(through)
        if not is_new and publisher.session != NOBODY:
            outputs.append((publisher.session, PublishAcknowledged(name, publisher.acknowledged)))
        return outputs

    def count_refused(self, notifications: int) -> None:
        self._count.refused += notifications

    def is_congested(self, name: str) -> bool:
        """True when a publisher has so much under way that its listener must wait before it submits more."""
        publisher = self._publishers.known(name)
        under_way = publisher.bytes_under_way if publisher is not None else 0
        return under_way >= self.bounds.publisher_window_bytes or self._bytes_under_way >= self.bounds.window_bytes

    def acknowledged(self, name: str) -> int:
        publisher = self._publishers.known(name)
        return publisher.acknowledged if publisher is not None else 0

    def subscribe(self, session: int, client_id: int, subscription_filter: Filter, policy: Policy) -> Outputs:
        state = self._sessions[session]
        self._check_subscribe(state, client_id)
        if policy not in state.outboxes:
            state.outboxes[policy] = self._make_outbox(session, policy)
        subscription = _Subscription(self._table.add(state.outboxes[policy], client_id), session, client_id)
        state.subscriptions[client_id] = subscription
        self._subscriptions[subscription.id] = subscription
        return self._uplink.change(Change(subscription.id, subscription.version, pack(subscription_filter)))

    def unsubscribe(self, session: int, client_id: int) -> Outputs:
        subscription = self._sessions[session].subscriptions.pop(client_id, None)
        if subscription is None:
            raise _no_subscription(client_id)
        return self._end(subscription)

    def rebind(self, session: int, client_id: int, subscription_filter: Filter) -> Outputs:
        """Gives a subscription another filter: between two batches, its Matcher takes one for the other."""
        subscription = self._sessions[session].subscriptions.get(client_id)
        if subscription is None:
            raise _no_subscription(client_id)
        subscription.version += 1
        return self._uplink.change(Change(subscription.id, subscription.version, pack(subscription_filter)))

    def take(self, session: int, bytes_max: int) -> tuple[list[bytes], Outputs]:
        """Frames for a connection that can write, about `bytes_max` of them; when the list is empty, DeliveriesWait
        will tell of the next ones."""
        state = self._sessions.get(session)
        if state is None:
            return [], []
        frames: list[bytes] = []
        outputs: Outputs = []
        size = 0
        for number in state.outboxes.values():
            outbox = self._outboxes[number]
            assert outbox is not None
            while size < bytes_max and (frame := outbox.take()) is not None:
                frames.append(frame)
                size += len(frame)
            if outbox.full_since_s is not None and not outbox.is_full:
                self._blocked.discard(number)
                outputs += outbox.redeem_tickets()
        if not frames:
            state.was_told = False
        return frames, outputs

    def statistics(self) -> ConnectionPointStatistics:
        outboxes = [outbox for outbox in self._outboxes if outbox is not None]
        return ConnectionPointStatistics(
            sessions=len(self._sessions),
            subscriptions=len(self._subscriptions),
            publishers=len(self._publishers),
            accepted=self._count.accepted,
            duplicates=self._count.duplicates,
            refused=self._count.refused,
            delivered=self._count.delivered,
            dropped=self._count.dropped,
            disconnected=self._count.disconnected,
            outbox_notifications=sum(outbox.notifications for outbox in outboxes),
            outbox_bytes=sum(outbox.bytes for outbox in outboxes),
            bytes_under_way=self._bytes_under_way,
            blocked_outboxes=len(self._blocked),
        )

    # Frames from the layers.

    def on_submit_ack(self, source: str, frame: SubmitAck, now_s: float) -> Outputs:
        if not self._uplink.is_acknowledged(frame.publisher, frame.last):
            return []
        publisher = self._publishers.known(frame.publisher)
        assert publisher is not None, frame.publisher
        before = publisher.acknowledged
        self._bytes_under_way -= publisher.finish(frame.last)
        outputs = self._settle()
        if publisher.acknowledged != before and publisher.session != NOBODY:
            outputs.append((publisher.session, PublishAcknowledged(publisher.name, publisher.acknowledged)))
        return outputs

    def on_deliver(self, source: str, frame: Deliver, now_s: float) -> Outputs:
        if self._is_replaced(frame.stream):
            return []
        ticket = Ticket(source, DeliverAck(frame.access_point, frame.stream, frame.sequence))
        batch, offsets = frame.batch, frame.offsets
        outputs: Outputs = []
        last = self._marks.last(batch.publisher)
        if batch.last > last:
            if batch.first <= last:
                batch, offsets = batch.part(last + 1 - batch.first), offsets[last + 1 - batch.first :]
            self._marks.advance(batch.publisher, batch.last)
            for number, data, notifications in self._writer.frames(batch, offsets, frame.ids, len(self._outboxes)):
                outputs += self._put(number, data, notifications, ticket, now_s)
        return outputs + ticket.redeem()

    def on_change_ok(self, source: str, frame: ChangeOk, now_s: float) -> Outputs:
        if not self._uplink.is_changed(frame.subscription, frame.version):
            return []
        outputs = self._settle()
        subscription = self._subscriptions[frame.subscription]
        session, client_id = subscription.session, subscription.client_id
        if not subscription.has_ended:
            ready = SubscriptionReady(client_id) if frame.version == 1 else SubscriptionRebound(client_id)
            return [*outputs, (session, ready)]
        if frame.version != subscription.version:
            return outputs
        del self._subscriptions[subscription.id]
        self._table.free(subscription.id)
        if subscription.was_refused or session not in self._sessions:
            return outputs
        return [*outputs, (session, SubscriptionEnded(client_id))]

    def on_change_refused(self, source: str, frame: ChangeRefused, now_s: float) -> Outputs:
        """Some Matchers may have it, and the registry: it ends like any other."""
        if not self._uplink.is_changed(frame.subscription, frame.version):
            return []
        outputs = self._settle()
        subscription = self._subscriptions[frame.subscription]
        if subscription.has_ended:  # that is under way, and frees it
            return outputs
        subscription.was_refused = True
        del self._sessions[subscription.session].subscriptions[subscription.client_id]
        outputs += self._end(subscription)
        return [*outputs, (subscription.session, SubscriptionRefused(subscription.client_id, frame.error))]

    def on_tick(self, now_s: float) -> Outputs:
        """Ends the sessions that have blocked their publishers for too long."""
        outputs: Outputs = []
        for number in list(self._blocked):
            outbox = self._outboxes[number]
            if outbox is not None and outbox.full_since_s is not None:
                blocked_s = now_s - outbox.full_since_s
                if blocked_s >= self.bounds.block_s:
                    outputs += self._disconnect(outbox.session, _too_slow(outbox, f"for {blocked_s:.1f} s"))
        return outputs

    # Inside.

    def _check_subscribe(self, state: _Session, client_id: int) -> None:
        if not 0 <= client_id < 1 << 32:
            raise ProtocolError("P306", f"subscription id {client_id} is no 32-bit number", "count from 1")
        if client_id in state.subscriptions:
            raise ProtocolError(
                "P306", f"subscription id {client_id} is in use", "choose another, or unsubscribe first"
            )
        per_session, in_all = self.bounds.subscriptions_per_session_max, self.bounds.subscriptions_max
        if len(state.subscriptions) >= per_session or len(self._subscriptions) >= in_all:
            raise Overloaded(
                "L602",
                f"{len(state.subscriptions)} subscriptions on this connection, {len(self._subscriptions)} in all",
                f"at most {per_session} and {in_all}: use broader filters, or raise subscriptions_max",
                retry_after_s=5.0,
            )

    def _end(self, subscription: _Subscription) -> Outputs:
        self._table.hide(subscription.id)
        subscription.has_ended = True
        subscription.version += 1
        return self._uplink.change(Change(subscription.id, subscription.version, None))

    def _put(self, number: int, frame: bytes, notifications: int, ticket: Ticket, now_s: float) -> Outputs:
        outbox = self._outboxes[number]
        if outbox is None:  # its session was ended by an earlier frame of the same batch
            return []
        outbox.put(frame, notifications)
        self._count.delivered += notifications
        if outbox.is_full:
            if outbox.policy is Policy.DROP_OLDEST:
                self._count.dropped += outbox.drop_oldest()
            elif outbox.policy is Policy.DISCONNECT:
                return self._disconnect(outbox.session, _too_slow(outbox, "now"))
            else:
                outbox.hold(ticket, now_s)
                self._blocked.add(number)
        state = self._sessions[outbox.session]
        if state.was_told:
            return []
        state.was_told = True
        return [(outbox.session, DeliveriesWait())]

    def _disconnect(self, session: int, error: TidegateError) -> Outputs:
        self._count.disconnected += 1
        return [*self.close_session(session), (session, SessionEnded(error))]

    def _make_outbox(self, session: int, policy: Policy) -> int:
        outbox = Outbox(session, policy, self.bounds.outbox_notifications_max, self.bounds.outbox_bytes_max)
        if self._free_outboxes:
            number = self._free_outboxes.pop()
            self._outboxes[number] = outbox
        else:
            number = len(self._outboxes)
            self._outboxes.append(outbox)
        return number

    def _free_outbox(self, number: int) -> Outputs:
        outbox = self._outboxes[number]
        assert outbox is not None
        self._outboxes[number] = None
        self._free_outboxes.append(number)
        self._blocked.discard(number)
        return outbox.redeem_tickets()


def _no_subscription(client_id: int) -> ProtocolError:
    return ProtocolError("P307", f"there is no subscription {client_id}", "name one that is subscribed")


def _too_slow(outbox: Outbox, how_long: str) -> Overloaded:
    return Overloaded(
        "L603",
        f"the outbox is full {how_long}: {outbox.notifications} notifications, {outbox.bytes} bytes wait",
        f"read faster, narrow the filter, or choose the policy {Policy.DROP_OLDEST}",
    )
