"""Session events: what a Connection Point reports to its sessions. Listeners handle them; no event leaves the process.

A Connection Point addresses frames to slices by name, and events to sessions by number. `OutputsAndEvents` holds both,
in the order in which they take effect.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeAlias

import msgspec

from tidegate.errors import Overloaded, TidegateError
from tidegate.layers.frames import LayerFrame, Refused

# Suggested pause for a publisher before its next attempt, after a full queue has refused a notification.
RETRY_AFTER_S: Final = 2.0


class SessionEvent(msgspec.Struct, gc=False):
    """An event of one session."""


class PublishAcknowledged(SessionEvent, gc=False):
    """The session's publisher is acknowledged up to `sequence`."""

    publisher: str
    sequence: int


class PublishRefused(SessionEvent, gc=False):
    """Full queues did not store these notifications of the session's publisher. This event precedes the
    acknowledgement that covers them."""

    publisher: str
    refused: list[Refused]


class SubscriptionReady(SessionEvent, gc=False):
    """From now on, every acknowledged publish reaches this subscription."""

    client_id: int


class SubscriptionRebound(SessionEvent, gc=False):
    """From now on, every acknowledged publish is matched against the new filter."""

    client_id: int


class SubscriptionRefused(SessionEvent, gc=False):
    """The subscription does not exist; `error` gives the reason."""

    client_id: int
    error: TidegateError


class SubscriptionEnded(SessionEvent, gc=False):
    client_id: int


class DeliveriesWait(SessionEvent, gc=False):
    """Deliveries wait in the session's outboxes. Its listener takes them when it can write."""


class SessionEnded(SessionEvent, gc=False):
    """The Connection Point has closed the session; `error` gives the reason."""

    error: TidegateError


Output: TypeAlias = tuple[str, LayerFrame] | tuple[int, SessionEvent]
OutputsAndEvents: TypeAlias = list[Output]


class SessionHandler(Protocol):
    """A listener's end of a session."""

    def on_event(self, event: SessionEvent) -> None: ...


def refused_by_queue(queue: str) -> Overloaded:
    """Returns the error for a publisher whose notification a full queue did not store."""
    return Overloaded(
        "L611",
        f"queue {queue!r} is full and did not store the notification; other queues and subscribers have it",
        "let its consumers catch up, raise its messages_max or bytes_max, change its after_block, or drop the queue",
        retry_after_s=RETRY_AFTER_S,
    )
