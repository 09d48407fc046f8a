"""An outbox: deliveries that wait until their subscriber's connection can take them. Bounded, with a decided overflow.

A session has one outbox for each policy that its subscriptions use. Every subscription is in exactly one, so its
notifications stay in order. What happens at the bound:

- `drop-oldest`: the oldest frames go, counted by subscription, and the subscriber is told before its next delivery;
- `disconnect`: the session ends with an error;
- `block`: nothing is dropped; the publishers whose notifications it holds are not acknowledged, and so slow down,
  until there is room or a time limit ends the session. What is over the bound meanwhile is bounded by their windows.

A frame is the unit: an outbox always keeps its newest frame, even one that alone exceeds the bound.
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
            raise ProtocolError("P311", f"there is no policy {text!r}", f"choose one of {', '.join(cls)}") from None


@dataclass(slots=True)
class Ticket:
    """An acknowledgement that is held back until every blocking outbox that has some of its batch has room again."""

    exit_point: str
    ack: DeliverAck
    waits: int = 1

    def redeem(self) -> Outputs:
        self.waits -= 1
        assert self.waits >= 0
        return [(self.exit_point, self.ack)] if self.waits == 0 else []


class Outbox:
    def __init__(self, session: int, policy: Policy, notifications_max: int, bytes_max: int) -> None:
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
        return self.notifications > self._notifications_max or self.bytes > self._bytes_max

    def put(self, frame: bytes, notifications: int) -> None:
        self._frames.append((frame, notifications))
        self.notifications += notifications
        self.bytes += len(frame)

    def drop_oldest(self) -> int:
        """Makes room; the number of deliveries that are lost to it."""
        before = self.dropped
        while self.is_full and len(self._frames) > 1:
            frame, notifications = self._popleft()
            self.dropped += notifications
            self._remember_gap(frame)
        return self.dropped - before

    def hold(self, ticket: Ticket, now_s: float) -> None:
        """The ticket waits for room here."""
        ticket.waits += 1
        self._tickets.append(ticket)
        if self.full_since_s is None:
            self.full_since_s = now_s

    def take(self) -> bytes | None:
        """The next frame for the connection: what was dropped is told before what came after it."""
        if self._gap:
            gap, self._gap = self._gap, {}
            return encode_frame(Kind.GAP, Gap(gap))
        return self._popleft()[0] if self._frames else None

    def redeem_tickets(self) -> Outputs:
        """What is acknowledged now that there is room, or that the session has ended."""
        tickets, self._tickets = self._tickets, []
        self.full_since_s = None
        return [output for ticket in tickets for output in ticket.redeem()]

    def _popleft(self) -> tuple[bytes, int]:
        frame, notifications = self._frames.popleft()
        self.notifications -= notifications
        self.bytes -= len(frame)
        return frame, notifications

    def _remember_gap(self, frame: bytes) -> None:
        _publisher, deliveries = decode_deliver(memoryview(frame)[HEADER_BYTES:])
        for delivered in deliveries:
            subscriptions = delivered.subscriptions
            for client_id in [subscriptions] if isinstance(subscriptions, int) else subscriptions:
                self._gap[client_id] = self._gap.get(client_id, 0) + 1
