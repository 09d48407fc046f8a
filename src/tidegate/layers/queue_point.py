"""Queue point: where notifications leave the layers into logical queues.

To the layers, the queue point is another Connection Point: a queue that is bound to a filter is a subscription, and its
notifications come from the Exit Point as Deliver. A Connection Point puts them into an outbox; the queue point passes
them to the queue feeder, and acknowledges them when the store has them. A publish that a queue matches is therefore
durable when it is acknowledged.

With every batch, the queue point tells the feeder from which sequence on it has received every match of the publisher
(`since_of`). The queue then needs only two numbers per publisher to recognise duplicates, which come after a crash or
through another broker.

What may go wrong here: a queue is full (the acknowledgement waits for up to the queue's `block_s`, and then reports
what the queue refused); its store fails (the acknowledgement waits until it works again); a publisher moves to another
broker while the former one has some of its notifications in flight (these are two runs, distinguished by entrance).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from tidegate.filters import Filter
from tidegate.index.packing import pack
from tidegate.layers.batch import Batch
from tidegate.layers.frames import Change, ChangeOk, ChangeRefused, Deliver, DeliverAck, Fill, Filled, Outputs
from tidegate.layers.outbox import Ticket
from tidegate.layers.subscription_table import CONNECTION_POINT_SHIFT, connection_point_name
from tidegate.layers.uplink import Edge
from tidegate.messages import NewMessage

log = logging.getLogger(__name__)

# Bound per binding. A forgotten run begins again with the next batch, which leaves a gap in what the feeder claims.
RUNS_MAX: Final = 100_000

# Publisher, entrance, stream and epoch.
RunKey = tuple[str, str, int, int]


@dataclass(frozen=True)
class QueuePointStatistics:
    bindings: int
    notifications: int
    unacknowledged_batches: int


@dataclass(slots=True)
class Binding:
    subscription: int
    queue: str
    filter: Filter
    version: int = 1
    # The first sequence of each run; the least recently seen run comes first.
    runs: OrderedDict[RunKey, int] = field(default_factory=OrderedDict)


class QueuePoint(Edge):
    """Guarantees: a batch is acknowledged to the Exit Point when every queue that matches some of it has stored or
    refused its part. The acknowledgement lists what was refused."""

    def __init__(self, number: int, access_point: str, feeder: str) -> None:
        super().__init__(connection_point_name(number), access_point)
        self._number = number
        self._feeder = feeder
        self._bindings: dict[str, Binding] = {}
        self._binding_of: dict[int, Binding] = {}
        self._next = 0
        self._tickets: dict[int, tuple[Ticket, Binding, RunKey]] = {}
        self._next_ticket = 0
        self._notifications = 0

    def bind(self, queue: str, subscription_filter: Filter | None) -> Outputs:
        """Binds a queue to a filter: from now on, the queue gets the notifications that match. An earlier binding of
        the queue ends; with None, the queue gets no more notifications."""
        before = self._bindings.get(queue)
        if before is not None and before.filter == subscription_filter:
            return []
        outputs: Outputs = []
        if subscription_filter is not None:
            self._next += 1
            subscription = self._number << CONNECTION_POINT_SHIFT | self._next
            binding = self._bindings[queue] = Binding(subscription, queue, subscription_filter)
            self._binding_of[subscription] = binding
            outputs += self._uplink.change(Change(subscription, binding.version, pack(subscription_filter)))
        else:
            self._bindings.pop(queue, None)
        if before is not None:
            del self._binding_of[before.subscription]
            outputs += self._uplink.change(Change(before.subscription, before.version + 1, None))
        return outputs

    @property
    def pending_changes(self) -> frozenset[tuple[int, int]]:
        """The changes of bindings that are not in force yet. Until they are, a publish may miss a queue that its
        notifications match."""
        return self._uplink.pending_changes

    def on_deliver(self, source: str, frame: Deliver, now_s: float) -> Outputs:
        if self._is_replaced(frame.stream):
            return []
        ticket = Ticket(source, DeliverAck(frame.access_point, frame.stream, frame.sequence))
        places = np.repeat(np.arange(len(frame.batch)), np.diff(frame.offsets))
        outputs: Outputs = []
        for subscription in np.unique(frame.ids).tolist():
            binding = self._binding_of.get(subscription)
            if binding is None:
                continue
            indexes = places[frame.ids == subscription].tolist()
            ticket.waits += 1
            self._notifications += len(indexes)
            self._next_ticket += 1
            messages = _messages(frame.batch, indexes)
            since = since_of(binding, frame, messages[0].sequence)
            self._tickets[self._next_ticket] = (ticket, binding, run_of(frame))
            fill = Fill(binding.queue, messages, self._next_ticket, since, binding.filter.text)
            outputs.append((self._feeder, fill))
        return outputs + ticket.redeem()

    def on_filled(self, source: str, frame: Filled, now_s: float) -> Outputs:
        ticket, binding, run = self._tickets.pop(frame.ticket)
        if frame.refused:
            ticket.ack.refused += frame.refused
            # A later batch of this run would claim the refused notifications as stored: begin a new run.
            binding.runs.pop(run, None)
        return ticket.redeem()

    def on_change_ok(self, source: str, frame: ChangeOk, now_s: float) -> Outputs:
        self._uplink.acknowledge_change(frame.subscription, frame.version)
        return self._settle()

    def on_change_refused(self, source: str, frame: ChangeRefused, now_s: float) -> Outputs:
        binding = self._binding_of.get(frame.subscription)
        log.error("cannot bind queue %r to its filter: %s", binding.queue if binding is not None else "", frame.error)
        self._uplink.acknowledge_change(frame.subscription, frame.version)
        return self._settle()

    def statistics(self) -> QueuePointStatistics:
        return QueuePointStatistics(len(self._bindings), self._notifications, len(self._tickets))


def run_of(frame: Deliver) -> RunKey:
    return frame.batch.publisher, frame.entrance, frame.stream, frame.epoch


def since_of(binding: Binding, frame: Deliver, first: int) -> int:
    """Returns the sequence from which on every notification of the publisher that the binding matches has come here.

    Within a stream, notifications that enter at one Connection Point arrive in the publisher's order. Within an epoch
    one Matcher has the binding, and after its first match it misses nothing; the Matcher of the next epoch may get the
    binding later. A run therefore has one entrance, one stream and one epoch. Through two entrances, old and new copies
    of the same notifications may arrive interleaved, and each series is complete only by itself. If a Connection Point
    forgot a publisher, the publisher may go back to a sequence before its run; then a new run begins."""
    run = run_of(frame)
    since = min(binding.runs.get(run, first), first)
    binding.runs[run] = since
    binding.runs.move_to_end(run)
    if len(binding.runs) > RUNS_MAX:
        binding.runs.popitem(last=False)
    return since


def _messages(batch: Batch, indexes: list[int]) -> list[NewMessage]:
    """Returns notifications as messages: their original bytes, identified by publisher and sequence."""
    starts, stops = batch.starts.tolist(), batch.stops.tolist()
    data, publisher, first = batch.data, batch.publisher, batch.first
    return [
        NewMessage(msgspec.Raw(data[starts[index] : stops[index]]), "", publisher, first + index) for index in indexes
    ]
