"""An outbox: deliveries that wait until their subscriber's connection can take them. Bounded, with a decided overflow.

A session has one outbox for each policy that its subscriptions use. Every subscription is in exactly one, so its
notifications stay in order. What happens at the bound:

- `drop-oldest`: the oldest frames are dropped and counted by subscription; a Gap frame before the next delivery
  reports the counts to the subscriber;
- `disconnect`: the session ends with an error;
- `block`: nothing is dropped. The publishers of the waiting notifications are not acknowledged, and so slow down, until
  there is room or a time limit ends the session. Their windows bound how far the outbox exceeds its bound meanwhile.

A frame is the unit: an outbox always keeps its newest frame, even one that alone exceeds the bound.

All outboxes together have a bound as well, since there may be thousands of slow subscribers. While it is exceeded, an
outbox is full when it holds more than its equal share. The others may still fill up to their shares, so all outboxes
together never hold more than twice the bound. A subscriber that reads pays nothing for those that do not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from tidegate.errors import ProtocolError
from tidegate.frames import HEADER_BYTES, Gap, Kind, decode_deliver, encode_frame
from tidegate.layers.frames import DeliverAck, Outputs


class Policy(StrEnum):
    """What happens when a subscriber is slow and its outbox is full."""

    DROP_OLDEST = "drop-oldest"
    DISCONNECT = "disconnect"
    BLOCK = "block"

    @classmethod
    def parse(cls, text: str) -> Policy:
        try:
            return cls(text)
        except ValueError:
            raise ProtocolError("P311", f"unknown policy {text!r}", f"choose one of {', '.join(cls)}") from None


@dataclass(slots=True)
class Ticket:
    """An acknowledgement that is held back until every blocking outbox with some of its batch has room again. `waits`
    begins at 1 for the handler itself, so that the ticket is not redeemed before all outboxes have the batch."""

    exit_point: str
    ack: DeliverAck
    waits: int = 1

    def redeem(self) -> Outputs:
        self.waits -= 1
        assert self.waits >= 0
        return [(self.exit_point, self.ack)] if self.waits == 0 else []


@dataclass(slots=True)
class OutboxTotal:
    """Counts the bytes in all outboxes of a Connection Point."""

    bytes_max: int
    bytes: int = 0
    outboxes: int = 0

    @property
    def share_bytes(self) -> int:
        return self.bytes_max // max(1, self.outboxes)


class Outbox:
    def __init__(
        self, session: int, policy: Policy, notifications_max: int, bytes_max: int, total: OutboxTotal
    ) -> None:
        self._total = total
        total.outboxes += 1
        self.session = session
        self.policy = policy
        self.notifications = 0
        self.bytes = 0
        self.dropped = 0
        self.full_since_s: float | None = None
        self._notifications_max = notifications_max
        self._bytes_max = bytes_max
        self._frames: deque[tuple[bytes, int]] = deque()
        self._gap: dict[int, int] = {}
        self._tickets: list[Ticket] = []

    @property
    def is_full(self) -> bool:
        if self.notifications > self._notifications_max or self.bytes > self._bytes_max:
            return True
        total = self._total
        return total.bytes > total.bytes_max and self.bytes > total.share_bytes

    def close(self) -> None:
        """Takes the outbox out of the total. Its session has ended, and the waiting frames are discarded."""
        self._total.bytes -= self.bytes
        self._total.outboxes -= 1

    def put(self, frame: bytes, notifications: int) -> None:
        self._frames.append((frame, notifications))
        self.notifications += notifications
        self.bytes += len(frame)
        self._total.bytes += len(frame)

    def drop_oldest(self) -> int:
        """Drops the oldest frames until there is room, and returns the number of deliveries lost."""
        before = self.dropped
        while self.is_full and len(self._frames) > 1:
            frame, notifications = self._popleft()
            self.dropped += notifications
            self._remember_gap(frame)
        return self.dropped - before

    def hold(self, ticket: Ticket, now_s: float) -> None:
        """Makes a ticket wait until this outbox has room."""
        ticket.waits += 1
        self._tickets.append(ticket)
        if self.full_since_s is None:
            self.full_since_s = now_s

    def take(self) -> bytes | None:
        """Takes the next frame for the connection. A Gap frame reports dropped deliveries before the ones that came
        after them."""
        if self._gap:
            gap, self._gap = self._gap, {}
            return encode_frame(Kind.GAP, Gap(gap))
        return self._popleft()[0] if self._frames else None

    def redeem_tickets(self) -> Outputs:
        """Redeems all tickets, because there is room or the session has ended. Returns the acknowledgements that no
        other outbox holds back."""
        tickets, self._tickets = self._tickets, []
        self.full_since_s = None
        return [output for ticket in tickets for output in ticket.redeem()]

    def _popleft(self) -> tuple[bytes, int]:
        frame, notifications = self._frames.popleft()
        self.notifications -= notifications
        self.bytes -= len(frame)
        self._total.bytes -= len(frame)
        return frame, notifications

    def _remember_gap(self, frame: bytes) -> None:
        _publisher, deliveries = decode_deliver(memoryview(frame)[HEADER_BYTES:])
        for delivered in deliveries:
            subscriptions = delivered.subscriptions
            for client_id in [subscriptions] if isinstance(subscriptions, int) else subscriptions:
                self._gap[client_id] = self._gap.get(client_id, 0) + 1
