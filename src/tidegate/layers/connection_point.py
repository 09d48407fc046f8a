"""Connection Point: where a notification enters from its publisher, and where it waits for its subscribers.

Listeners call it through sessions (`hosts.session`), one for each connection. It returns frames for slices, by their
names, and events for sessions, by their numbers. It keeps three things: the publishers (what is accepted and what is
in flight), the subscriptions of each session, and the outboxes (what a connection has not taken yet).

What may go wrong here: a publisher sends a batch again (it is delivered once); a subscriber is slow (its outbox fills
and its policy applies); a session ends with deliveries in flight (its subscriptions end, and the acknowledgements that
it held back are given, so that no publisher waits for it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tidegate.errors import NotAllowed, Overloaded, ProtocolError, Refusals, TidegateError, Unavailable
from tidegate.filters import Filter
from tidegate.index.packing import pack
from tidegate.layers.batch import Batch
from tidegate.layers.delivery_writer import DeliveryWriter
from tidegate.layers.filter_budget import FilterAccount, FilterBudget, Shape
from tidegate.layers.frames import (
    Change,
    ChangeOk,
    ChangeRefused,
    Deliver,
    DeliverAck,
    Outputs,
    Refused,
    Submit,
    SubmitAck,
)
from tidegate.layers.outbox import Outbox, OutboxTotal, Policy, Ticket
from tidegate.layers.publishers import NO_SESSION, HighWaterMarks, Publishers
from tidegate.layers.session_events import (
    DeliveriesWait,
    OutputsAndEvents,
    PublishAcknowledged,
    PublishRefused,
    SessionEnded,
    SubscriptionEnded,
    SubscriptionReady,
    SubscriptionRebound,
    SubscriptionRefused,
    refused_by_queue,
)
from tidegate.layers.subscription_table import SubscriptionTable, connection_point_name
from tidegate.layers.uplink import Edge
from tidegate.security.publisher_key import is_keyed

# Bound on the changes of one subscription's filter that its Matcher has not confirmed.
REBINDS_PENDING_MAX: Final = 1000


class TakenOver(NotAllowed):
    """Another connection has taken over the publisher."""

    status = 409


class NameInUse(Unavailable):
    """A client at another address uses the publisher's name, which has no key."""

    status = 409


@dataclass(frozen=True)
class Bounds:
    """The bounds of a Connection Point's buffers; docs/operating.md describes what happens at each."""

    outbox_notifications_max: int = 100_000
    outbox_bytes_max: int = 64 * 1024 * 1024
    outboxes_bytes_max: int = 1024**3
    block_s: float = 5.0
    publishers_max: int = 1_000_000
    publishers_bytes_max: int = 512 * 1024 * 1024
    publisher_window_bytes: int = 4 * 1024 * 1024
    window_bytes: int = 256 * 1024 * 1024
    sessions_max: int = 10_000
    subscriptions_max: int = 2_000_000
    subscriptions_per_session_max: int = 1_000_000
    filter_bytes_max: int = 2 * 1024**3
    filter_bytes_per_session_max: int = 1024**3
    names_per_session_max: int = 4096


@dataclass(frozen=True)
class ConnectionPointStatistics:
    sessions: int
    subscriptions: int
    publishers: int
    accepted: int
    duplicates: int
    refused: int
    refused_by_queues: int
    delivered: int
    dropped: int
    disconnected: int
    outbox_notifications: int
    outbox_bytes: int
    bytes_under_way: int
    blocked_outboxes: int
    filter_bytes: int
    publisher_bytes: int
    publishers_forgotten: int


@dataclass(slots=True)
class _Subscription:
    """`version` counts the changes of a subscription: 1 creates it, later ones replace its filter, the last removes it.
    Its filter is charged to `account` until the Matchers have removed it."""

    id: int
    session: int
    client_id: int
    account: FilterAccount
    shape: Shape
    filter_bytes: int
    version: int = 1
    confirmed: int = 0
    has_ended: bool = False
    was_refused: bool = False


@dataclass(slots=True)
class _Session:
    """`is_notified` is true from DeliveriesWait until the listener has taken all deliveries. `host` is the network
    address of its publishers."""

    outboxes: dict[Policy, int] = field(default_factory=dict)
    subscriptions: dict[int, _Subscription] = field(default_factory=dict)
    publishers: set[str] = field(default_factory=set)
    account: FilterAccount = field(default_factory=FilterAccount)
    is_notified: bool = False
    host: str = ""


@dataclass(slots=True)
class _Counters:
    accepted: int = 0
    duplicates: int = 0
    refused: int = 0
    refused_by_queues: int = 0
    delivered: int = 0
    dropped: int = 0
    disconnected: int = 0


class ConnectionPoint(Edge):
    """Guarantees: a duplicate batch enters the layers once; a subscriber gets a notification once, in the publisher's
    order; a slow subscriber costs the others nothing, unless it asked for `block`."""

    def __init__(self, number: int, access_point: str, bounds: Bounds) -> None:
        super().__init__(connection_point_name(number), access_point)
        self.bounds = bounds
        self.refusals = Refusals()
        self._publishers = Publishers(bounds.publishers_max, bounds.publishers_bytes_max)
        self._marks = HighWaterMarks(bounds.publishers_max, bounds.publishers_bytes_max)
        self._budget = FilterBudget(
            bounds.filter_bytes_max, bounds.filter_bytes_per_session_max, bounds.names_per_session_max
        )
        self._table = SubscriptionTable(number)
        self._writer = DeliveryWriter(self._table)
        self._sessions: dict[int, _Session] = {}
        self._subscriptions: dict[int, _Subscription] = {}
        self._outboxes: list[Outbox | None] = []
        self._free_outboxes: list[int] = []
        self._total = OutboxTotal(bounds.outboxes_bytes_max)
        self._blocked: set[int] = set()
        self._bytes_under_way = 0
        self._next_session = NO_SESSION + 1
        self._count = _Counters()

    # Calls from sessions.

    def open_session(self) -> int:
        if len(self._sessions) >= self.bounds.sessions_max:
            raise self.refusals.note(
                Overloaded(
                    "L601",
                    f"{self.bounds.sessions_max} connections are open, which is the maximum",
                    "retry later, or raise connections_max",
                    retry_after_s=5.0,
                )
            )
        session = self._next_session
        self._next_session += 1
        self._sessions[session] = _Session()
        return session

    def close_session(self, session: int) -> Outputs:
        """Ends a session whose connection is gone: ends its subscriptions, and acknowledges the batches that waited for
        its outboxes. Idempotent."""
        state = self._sessions.pop(session, None)
        if state is None:
            return []
        outputs: Outputs = []
        for name in state.publishers:
            publisher = self._publishers.known(name)
            if publisher is not None and publisher.session == session:
                publisher.detach()
        for subscription in state.subscriptions.values():
            outputs += self._end(subscription)
        for number in state.outboxes.values():
            outputs += self._free_outbox(number)
        return outputs

    def attach_publisher(self, session: int, name: str, host: str = "") -> OutputsAndEvents:
        """Attaches a publisher to a session at `host`.

        The session that had the publisher before ends: it is the half-open connection of a client that has
        reconnected. The key in a publisher's name proves that both are the same client. Without a key, only a client at
        the same address may end the other session."""
        try:
            publisher = self._publishers.get(name)
        except Overloaded as error:
            raise self.refusals.note(error) from None
        outputs: OutputsAndEvents = []
        self._sessions[session].host = host
        if publisher.session not in (NO_SESSION, session):
            if not is_keyed(name) and self._sessions[publisher.session].host != host:
                raise NameInUse(
                    "U716",
                    f"a client at another address already publishes as {name!r}",
                    "choose another name, use a key, or retry when the other connection has ended",
                )
            taken_over = TakenOver(
                "A504", f"publisher {name!r} has connected again elsewhere", "use one connection per publisher"
            )
            outputs = self._disconnect(publisher.session, taken_over)
        publisher.session = session
        self._sessions[session].publishers.add(name)
        return outputs

    def submit(self, name: str, batches: Sequence[Batch], through: int) -> OutputsAndEvents:
        """Sends a publisher's new notifications into the layers. `batches` are in publisher order; `through` is the
        last sequence that they cover, refused ones included.

        A publisher that repeats acknowledged notifications gets the acknowledgement again: it may have lost the first
        one, and may ignore what WELCOME reports. Duplicates of notifications still in flight are acknowledged when the
        originals are."""
        publisher = self._publishers.get(name)
        outputs: OutputsAndEvents = []
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
            # The last notifications were refused: they need no way through the layers, but they do need an
            # acknowledgement, after the batches before them.
            publisher.accept(through, 0)
            publisher.finish(through)
        if not is_new and publisher.session != NO_SESSION:
            if again := publisher.refused(min(batch.first for batch in batches), through) if batches else []:
                outputs.append((publisher.session, PublishRefused(name, again)))
            if through <= publisher.acknowledged:
                outputs.append((publisher.session, PublishAcknowledged(name, publisher.acknowledged)))
        return outputs

    def count_refused(self, notifications: int) -> None:
        self._count.refused += notifications

    def is_congested(self, name: str) -> bool:
        """Reports whether so many bytes are in flight that the publisher's listener must wait before it submits more.
        The windows of the publisher and of the whole Connection Point both count."""
        publisher = self._publishers.known(name)
        under_way = publisher.bytes_under_way if publisher is not None else 0
        return under_way >= self.bounds.publisher_window_bytes or self._bytes_under_way >= self.bounds.window_bytes

    def refused(self, name: str, first: int, last: int) -> list[Refused]:
        """Returns which notifications of a publisher, from `first` to `last`, full queues are known to have refused."""
        publisher = self._publishers.known(name)
        return publisher.refused(first, last) if publisher is not None else []

    def acknowledged(self, name: str) -> int:
        publisher = self._publishers.known(name)
        return publisher.acknowledged if publisher is not None else 0

    def subscribe(self, session: int, client_id: int, subscription_filter: Filter, policy: Policy) -> Outputs:
        state = self._sessions[session]
        self._check_subscribe(state, client_id)
        packed = pack(subscription_filter)
        shape, size_bytes = self._charge(state.account, subscription_filter, packed)
        if policy not in state.outboxes:
            state.outboxes[policy] = self._make_outbox(session, policy)
        subscription = _Subscription(
            self._table.add(state.outboxes[policy], client_id), session, client_id, state.account, shape, size_bytes
        )
        state.subscriptions[client_id] = subscription
        self._subscriptions[subscription.id] = subscription
        return self._uplink.change(Change(subscription.id, subscription.version, packed))

    def unsubscribe(self, session: int, client_id: int) -> Outputs:
        subscription = self._sessions[session].subscriptions.pop(client_id, None)
        if subscription is None:
            raise _no_subscription(client_id)
        return self._end(subscription)

    def rebind(self, session: int, client_id: int, subscription_filter: Filter) -> Outputs:
        """Replaces the filter of a subscription. Its Matcher exchanges the filters between two batches, so every batch
        is matched against exactly one of them."""
        subscription = self._sessions[session].subscriptions.get(client_id)
        if subscription is None:
            raise _no_subscription(client_id)
        if subscription.version - subscription.confirmed > REBINDS_PENDING_MAX:
            raise self.refusals.note(
                Overloaded(
                    "L623",
                    f"{REBINDS_PENDING_MAX} filter changes of subscription {client_id} are not confirmed yet",
                    "wait for the confirmations before you change the filter again",
                )
            )
        packed = pack(subscription_filter)
        shape, size_bytes = self._charge(subscription.account, subscription_filter, packed)
        self._budget.give_back(subscription.account, subscription.shape, subscription.filter_bytes)
        subscription.shape, subscription.filter_bytes = shape, size_bytes
        subscription.version += 1
        return self._uplink.change(Change(subscription.id, subscription.version, packed))

    def take(self, session: int, bytes_max: int) -> tuple[list[bytes], Outputs]:
        """Takes about `bytes_max` bytes of frames for a connection that can write. After an empty list, DeliveriesWait
        announces the next frames."""
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
            state.is_notified = False
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
            refused_by_queues=self._count.refused_by_queues,
            delivered=self._count.delivered,
            dropped=self._count.dropped,
            disconnected=self._count.disconnected,
            outbox_notifications=sum(outbox.notifications for outbox in outboxes),
            outbox_bytes=self._total.bytes,
            bytes_under_way=self._bytes_under_way,
            blocked_outboxes=len(self._blocked),
            filter_bytes=self._budget.bytes,
            publisher_bytes=self._publishers.bytes + self._marks.bytes,
            publishers_forgotten=self._publishers.forgotten,
        )

    # Frames from the layers.

    def on_submit_ack(self, source: str, frame: SubmitAck, now_s: float) -> OutputsAndEvents:
        if not self._uplink.acknowledge_submit(frame.publisher, frame.last):
            return []
        publisher = self._publishers.known(frame.publisher)
        assert publisher is not None, frame.publisher
        before = publisher.acknowledged
        self._bytes_under_way -= publisher.finish(frame.last)
        outputs: OutputsAndEvents = [*self._settle()]
        if frame.refused:
            publisher.refuse(frame.refused)
            for each in frame.refused:
                self.refusals.note(refused_by_queue(each.queue))
            self._count.refused_by_queues += sum(each.last - each.first + 1 for each in frame.refused)
            if publisher.session != NO_SESSION:
                outputs.append((publisher.session, PublishRefused(publisher.name, frame.refused)))
        if publisher.acknowledged != before and publisher.session != NO_SESSION:
            outputs.append((publisher.session, PublishAcknowledged(publisher.name, publisher.acknowledged)))
        return outputs

    def on_deliver(self, source: str, frame: Deliver, now_s: float) -> OutputsAndEvents:
        if self._is_replaced(frame.stream):
            return []
        ticket = Ticket(source, DeliverAck(frame.access_point, frame.stream, frame.sequence))
        batch, offsets = frame.batch, frame.offsets
        outputs: OutputsAndEvents = []
        last = self._marks.last(batch.publisher)
        if batch.last > last:
            if batch.first <= last:
                # A publisher that sends again through another broker may cut its batches differently: skip the part
                # that was delivered before.
                batch, offsets = batch.part(last + 1 - batch.first), offsets[last + 1 - batch.first :]
            self._marks.advance(batch.publisher, batch.last)
            for number, data, notifications in self._writer.frames(batch, offsets, frame.ids, len(self._outboxes)):
                outputs += self._put(number, data, notifications, ticket, now_s)
        return outputs + ticket.redeem()

    def on_change_ok(self, source: str, frame: ChangeOk, now_s: float) -> OutputsAndEvents:
        if not self._uplink.acknowledge_change(frame.subscription, frame.version):
            return []
        outputs: OutputsAndEvents = [*self._settle()]
        subscription = self._subscriptions[frame.subscription]
        subscription.confirmed = max(subscription.confirmed, frame.version)
        session, client_id = subscription.session, subscription.client_id
        if not subscription.has_ended:
            ready = SubscriptionReady(client_id) if frame.version == 1 else SubscriptionRebound(client_id)
            return [*outputs, (session, ready)]
        if frame.version != subscription.version:
            return outputs
        del self._subscriptions[subscription.id]
        self._table.free(subscription.id)
        self._budget.give_back(subscription.account, subscription.shape, subscription.filter_bytes)
        if subscription.was_refused or session not in self._sessions:
            return outputs
        return [*outputs, (session, SubscriptionEnded(client_id))]

    def on_change_refused(self, source: str, frame: ChangeRefused, now_s: float) -> OutputsAndEvents:
        """Ends a refused subscription as any other: the registry and some Matchers may already hold it."""
        if not self._uplink.acknowledge_change(frame.subscription, frame.version):
            return []
        outputs: OutputsAndEvents = [*self._settle()]
        subscription = self._subscriptions[frame.subscription]
        if subscription.has_ended:  # its removal is in flight, and frees it
            return outputs
        subscription.was_refused = True
        self.refusals.note(frame.error)
        del self._sessions[subscription.session].subscriptions[subscription.client_id]
        outputs += self._end(subscription)
        return [*outputs, (subscription.session, SubscriptionRefused(subscription.client_id, frame.error))]

    def on_tick(self, now_s: float) -> OutputsAndEvents:
        """Ends the sessions that have blocked their publishers for longer than `block_s`."""
        outputs: OutputsAndEvents = []
        for number in list(self._blocked):
            outbox = self._outboxes[number]
            if outbox is not None and outbox.full_since_s is not None:
                blocked_s = now_s - outbox.full_since_s
                if blocked_s >= self.bounds.block_s:
                    outputs += self._disconnect(outbox.session, _too_slow(outbox, f" for {blocked_s:.1f} s"))
        return outputs

    # Inside.

    def _check_subscribe(self, state: _Session, client_id: int) -> None:
        if not 0 <= client_id < 1 << 32:
            raise ProtocolError("P306", f"subscription id {client_id} is not from 0 to 4294967295", "count from 1")
        if client_id in state.subscriptions:
            raise ProtocolError(
                "P306", f"subscription id {client_id} is already in use", "choose another, or unsubscribe first"
            )
        per_session, in_all = self.bounds.subscriptions_per_session_max, self.bounds.subscriptions_max
        if len(state.subscriptions) >= per_session or len(self._subscriptions) >= in_all:
            raise self.refusals.note(
                Overloaded(
                    "L602",
                    f"this connection has {len(state.subscriptions)} subscriptions, and the broker "
                    f"{len(self._subscriptions)}",
                    f"the maximum is {per_session} and {in_all}: use broader filters, or raise "
                    "subscriptions_per_connection_max or subscriptions_max",
                    retry_after_s=5.0,
                )
            )

    def _charge(self, account: FilterAccount, subscription_filter: Filter, packed: bytes) -> tuple[Shape, int]:
        try:
            return self._budget.charge(account, subscription_filter, packed)
        except Overloaded as error:
            raise self.refusals.note(error) from None

    def _end(self, subscription: _Subscription) -> Outputs:
        self._table.hide(subscription.id)
        subscription.has_ended = True
        subscription.version += 1
        return self._uplink.change(Change(subscription.id, subscription.version, None))

    def _put(self, number: int, frame: bytes, notifications: int, ticket: Ticket, now_s: float) -> OutputsAndEvents:
        outbox = self._outboxes[number]
        if outbox is None:  # its session was ended by an earlier frame of the same batch
            return []
        outbox.put(frame, notifications)
        self._count.delivered += notifications
        if outbox.is_full:
            if outbox.policy is Policy.DROP_OLDEST:
                self._count.dropped += outbox.drop_oldest()
            elif outbox.policy is Policy.DISCONNECT:
                return self._disconnect(outbox.session, _too_slow(outbox))
            else:
                outbox.hold(ticket, now_s)
                self._blocked.add(number)
        state = self._sessions[outbox.session]
        if state.is_notified:
            return []
        state.is_notified = True
        return [(outbox.session, DeliveriesWait())]

    def _disconnect(self, session: int, error: TidegateError) -> OutputsAndEvents:
        self._count.disconnected += 1
        if isinstance(error, Overloaded):
            self.refusals.note(error)
        return [*self.close_session(session), (session, SessionEnded(error))]

    def _make_outbox(self, session: int, policy: Policy) -> int:
        bounds = self.bounds
        outbox = Outbox(session, policy, bounds.outbox_notifications_max, bounds.outbox_bytes_max, self._total)
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
        outbox.close()
        return outbox.redeem_tickets()


def _no_subscription(client_id: int) -> ProtocolError:
    return ProtocolError("P307", f"this connection has no subscription {client_id}", "use the id of an existing one")


def _too_slow(outbox: Outbox, how_long: str = "") -> Overloaded:
    return Overloaded(
        "L603",
        f"this subscriber's outbox is full{how_long}: {outbox.notifications} notifications, {outbox.bytes} bytes wait",
        f"read faster, narrow the filter, or choose the policy {Policy.DROP_OLDEST}",
    )
