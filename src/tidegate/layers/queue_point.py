"""Queue point: where notifications leave the layers into logical queues.

To the layers it is one more Connection Point: a queue that is bound to a filter is a subscription, and its
notifications come from the Exit Point as Deliver. Where a Connection Point puts them into an outbox, it has them
enqueued, and acknowledges when the store has them: so a publish that a queue wants is acknowledged when it is durable.

What may go wrong here: a queue is full or its store fails (the acknowledgement waits, and so the publishers of what it
wants slow down, unless its policy is to drop the oldest); a batch comes again after a crash (the queue knows its
notifications by publisher and sequence, and keeps them once).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import numpy as np

from tidegate.filters import Filter
from tidegate.layers.batch import Batch
from tidegate.layers.frames import Change, ChangeOk, ChangeRefused, Deliver, DeliverAck, Fill, Filled, Outputs
from tidegate.layers.index.packing import pack
from tidegate.layers.outbox import Ticket
from tidegate.layers.subscription_table import CONNECTION_POINT_SHIFT, connection_point_name
from tidegate.layers.uplink import Edge
from tidegate.messages import NewMessage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QueuePointStatistics:
    bindings: int
    notifications: int
    unacknowledged_batches: int


@dataclass(slots=True)
class _Binding:
    subscription: int
    queue: str
    filter: Filter
    version: int = 1


class QueuePoint(Edge):
    """Guarantees: a batch is acknowledged to the Exit Point when every queue that wants some of it has it."""

    def __init__(self, number: int, access_point: str, feeder: str) -> None:
        super().__init__(connection_point_name(number), access_point)
        self._number = number
        self._feeder = feeder
        self._bindings: dict[str, _Binding] = {}
        self._queue_of: dict[int, str] = {}
        self._next = 0
        self._tickets: dict[int, Ticket] = {}
        self._next_ticket = 0
        self._notifications = 0

    def bind(self, queue: str, subscription_filter: Filter | None) -> Outputs:
        """The queue gets what the filter matches from now on; with None, and in place of another filter, it no longer
        gets what it got before."""
        before = self._bindings.get(queue)
        if before is not None and before.filter == subscription_filter:
            return []
        outputs: Outputs = []
        if subscription_filter is not None:
            self._next += 1
            subscription = self._number << CONNECTION_POINT_SHIFT | self._next
            binding = self._bindings[queue] = _Binding(subscription, queue, subscription_filter)
            self._queue_of[subscription] = queue
            outputs += self._uplink.change(Change(subscription, binding.version, pack(subscription_filter)))
        else:
            self._bindings.pop(queue, None)
        if before is not None:
            del self._queue_of[before.subscription]
            outputs += self._uplink.change(Change(before.subscription, before.version + 1, None))
        return outputs

    @property
    def pending_changes(self) -> frozenset[tuple[int, int]]:
        """Of bindings that are not in force yet: what is published may miss a queue that wants it."""
        return self._uplink.pending_changes

    def on_deliver(self, source: str, frame: Deliver, now_s: float) -> Outputs:
        if self._is_replaced(frame.stream):
            return []
        ticket = Ticket(source, DeliverAck(frame.access_point, frame.stream, frame.sequence))
        places = np.repeat(np.arange(len(frame.batch)), np.diff(frame.offsets))
        wanted = {
            queue: places[frame.ids == subscription].tolist()
            for subscription in np.unique(frame.ids).tolist()
            if (queue := self._queue_of.get(subscription)) is not None
        }
        outputs: Outputs = []
        for queue, indexes in wanted.items():
            ticket.waits += 1
            self._notifications += len(indexes)
            self._next_ticket += 1
            self._tickets[self._next_ticket] = ticket
            outputs.append((self._feeder, Fill(queue, _messages(frame.batch, indexes), self._next_ticket)))
        return outputs + ticket.redeem()

    def on_filled(self, source: str, frame: Filled, now_s: float) -> Outputs:
        return self._tickets.pop(frame.ticket).redeem()

    def on_change_ok(self, source: str, frame: ChangeOk, now_s: float) -> Outputs:
        self._uplink.is_changed(frame.subscription, frame.version)
        return self._settle()

    def on_change_refused(self, source: str, frame: ChangeRefused, now_s: float) -> Outputs:
        log.error("queue %r is bound to no filter: %s", self._queue_of.get(frame.subscription), frame.error)
        self._uplink.is_changed(frame.subscription, frame.version)
        return self._settle()

    def statistics(self) -> QueuePointStatistics:
        return QueuePointStatistics(len(self._bindings), self._notifications, len(self._tickets))


def _messages(batch: Batch, indexes: list[int]) -> list[NewMessage]:
    """The notifications as messages: their bytes as they came, named by publisher and sequence."""
    starts, stops = batch.starts.tolist(), batch.stops.tolist()
    data, publisher, first = batch.data, batch.publisher, batch.first
    return [
        NewMessage(msgspec.Raw(data[starts[index] : stops[index]]), "", publisher, first + index) for index in indexes
    ]
