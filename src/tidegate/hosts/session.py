"""A session: the one way into the layers for a listener, and for parts of the broker that publish or subscribe.

Each call takes effect in the Connection Point, and carries the frames that follow from it. In one process a call may
therefore bring events to the handler before it returns: an acknowledgement, or the end of this very session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidegate.filters import Filter
from tidegate.hosts.embedded_host import BrokerHost
from tidegate.layers.batch import Batch
from tidegate.layers.frames import Refused
from tidegate.layers.outbox import Policy
from tidegate.layers.publishers import NO_SESSION
from tidegate.layers.session_events import SessionHandler


class Session:
    """A client's publisher and subscriptions; `handler` gets its events. Until it is open it has no deliveries, and
    closing it does nothing."""

    def __init__(self, host: BrokerHost, handler: SessionHandler) -> None:
        self.publisher = ""
        self._host = host
        self._point = host.connection_point
        self._handler = handler
        self._number = NO_SESSION

    def open(self) -> None:
        """Opens the session. Raises Overloaded if the broker has too many."""
        self._number = self._point.open_session()
        self._host.handlers[self._number] = self._handler

    def close(self) -> None:
        """Ends the session and its subscriptions; its handler gets no more events. Idempotent."""
        self._host.handlers.pop(self._number, None)
        self._host.carry(self._point.close_session(self._number))

    def attach_publisher(self, name: str, peer_host: str = "") -> None:
        """Makes this session publish as `name`, and ends the session that did so before."""
        outputs = self._point.attach_publisher(self._number, name, peer_host)
        self.publisher = name
        self._host.carry(outputs)

    def submit(self, batches: Sequence[Batch], through: int) -> None:
        """Sends the publisher's notifications into the layers. `through` is the last sequence that the batches cover,
        refused ones included."""
        self._host.carry(self._point.submit(self.publisher, batches, through))

    @property
    def acknowledged(self) -> int:
        """The last acknowledged sequence of the publisher; 0 without one."""
        return self._point.acknowledged(self.publisher)

    def refused(self, first: int, last: int) -> list[Refused]:
        """Returns which of the publisher's notifications full queues are known to have refused."""
        return self._point.refused(self.publisher, first, last)

    def subscribe(self, client_id: int, subscription_filter: Filter, policy: Policy) -> None:
        self._host.carry(self._point.subscribe(self._number, client_id, subscription_filter, policy))

    def rebind(self, client_id: int, subscription_filter: Filter) -> None:
        """Replaces the filter of a subscription."""
        self._host.carry(self._point.rebind(self._number, client_id, subscription_filter))

    def unsubscribe(self, client_id: int) -> None:
        self._host.carry(self._point.unsubscribe(self._number, client_id))

    def take(self, bytes_max: int, write: Callable[[list[bytes]], None]) -> bool:
        """Passes about `bytes_max` bytes of deliveries to `write`. Returns False if there were none; DeliveriesWait
        announces the next ones.

        The deliveries are written before the acknowledgements that waited for them are carried: these may bring further
        batches, which may end this session."""
        frames, outputs = self._point.take(self._number, bytes_max)
        if frames:
            write(frames)
        self._host.carry(outputs)
        return bool(frames)
