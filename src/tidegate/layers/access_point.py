"""Access Point: the notification has just entered; it goes to all Matchers, and its body to one Exit Point.

It holds no subscriptions. It numbers what it sends to each Exit Point, and keeps every batch until that Exit Point
says that all Connection Points have it: only then is the publish acknowledged, because acknowledging earlier would
lose what a crashing slice still had under way.

A change of a subscription goes to the Matcher that its selector names, and is acknowledged when that one has it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.layers.frames import Ack, Body, Change, ChangeOk, ChangeRefused, Outputs, Publish, Submit, SubmitAck
from tidegate.layers.selector import Configuration


@dataclass(frozen=True)
class AccessPointStatistics:
    """`unacknowledged_*` is what the Access Point would send again after the crash of a slice."""

    batches: int
    notifications: int
    unacknowledged_batches: int
    pending_changes: int


class AccessPoint:
    """Guarantees: a batch is acknowledged to its Connection Point after, and only after, all subscribers' Connection
    Points have it. Its buffer is bounded by the windows of the publishers, which the Connection Points enforce."""

    def __init__(self, name: str, configuration: Configuration) -> None:
        self.name = name
        self._configuration = configuration
        self._sequences = dict.fromkeys(configuration.exit_points, 0)
        self._unacknowledged: dict[tuple[str, int], tuple[str, str, int]] = {}
        self._pending_changes: dict[tuple[int, int], str] = {}
        self._batches = 0
        self._notifications = 0

    def on_submit(self, source: str, frame: Submit, now_s: float) -> Outputs:
        configuration, batch = self._configuration, frame.batch
        exit_point = configuration.exit_point(batch.publisher)
        sequence = self._sequences[exit_point] = self._sequences[exit_point] + 1
        self._unacknowledged[exit_point, sequence] = (source, batch.publisher, batch.last)
        self._batches += 1
        self._notifications += len(batch)
        stamp = (self.name, configuration.stream, configuration.epoch, sequence, batch)
        outputs: Outputs = [(exit_point, Body(*stamp))]
        outputs += [(matcher, Publish(*stamp)) for matcher in configuration.matchers]
        return outputs

    def on_ack(self, source: str, frame: Ack, now_s: float) -> Outputs:
        if frame.stream != self._configuration.stream:
            return []
        connection_point, publisher, last = self._unacknowledged.pop((source, frame.sequence))
        return [(connection_point, SubmitAck(publisher, last))]

    def on_change(self, source: str, frame: Change, now_s: float) -> Outputs:
        self._pending_changes[frame.subscription, frame.version] = source
        return [(self._configuration.owner(frame.subscription), frame)]

    def on_change_ok(self, source: str, frame: ChangeOk | ChangeRefused, now_s: float) -> Outputs:
        connection_point = self._pending_changes.pop((frame.subscription, frame.version))
        return [(connection_point, frame)]

    on_change_refused = on_change_ok

    def statistics(self) -> AccessPointStatistics:
        return AccessPointStatistics(
            self._batches, self._notifications, len(self._unacknowledged), len(self._pending_changes)
        )
