"""Hosts of a broker: the Connection Point for its sessions, the queue point, and the layers between them.

The embedded host has all layers in one process. When `carry` returns, a batch is in the outboxes of its subscribers
and its publisher is acknowledged, with two exceptions: a subscriber may block, and a queue may match some of the batch.
In the second case the queue feeder answers once the store has the messages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from tidegate.filters import Filter
from tidegate.hosts.carrier import Carrier
from tidegate.hosts.load import Delays, delay_summary
from tidegate.hosts.queue_feeder import QueueFeeder
from tidegate.layers.access_point import AccessPoint
from tidegate.layers.connection_point import Bounds, ConnectionPoint
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import LayerFrame, Submit
from tidegate.layers.layer import Layer
from tidegate.layers.matcher import Matcher
from tidegate.layers.queue_point import QueuePoint
from tidegate.layers.selector import Configuration
from tidegate.layers.session_events import Output
from tidegate.queues import LogicalQueues

FEEDER: Final = "queue-feeder"
DELAYS_LOOK_S: Final = 1.0


class BrokerHost(Carrier):
    """The edge of the layers: a Connection Point for clients, and one for queues. `numbers` are their numbers. If
    `access_point` is empty, it waits for a coordinator to name one. Clients know the broker by `name`, and reach it at
    `address` once it listens."""

    address = ""

    def __init__(
        self,
        numbers: tuple[int, int],
        access_point: str,
        bounds: Bounds,
        clock: Callable[[], float],
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__(clock, on_failure)
        self.connection_point = ConnectionPoint(numbers[0], access_point, bounds)
        self.queue_point = QueuePoint(numbers[1], access_point, FEEDER)
        self.add(self.connection_point)
        self.add(self.queue_point)
        self.name = self.connection_point.name
        self.refusals = self.connection_point.refusals

    def use_feeder(self, queues: LogicalQueues) -> QueueFeeder:
        """Adds a queue feeder: from now on, notifications that match a queue's filter are stored in the queue."""
        feeder = QueueFeeder(FEEDER, queues, self.carry, self._on_failure)
        self.add(feeder)
        return feeder

    def bind(self, queue: str, subscription_filter: Filter | None) -> None:
        self.carry(self.queue_point.bind(queue, subscription_filter), self.queue_point.name)

    def is_congested(self, publisher: str) -> bool:
        """Reports whether a listener must wait before it submits more notifications of this publisher."""
        return self.connection_point.is_congested(publisher)

    def count_refused(self, notifications: int) -> None:
        """Counts invalid notifications that a listener has refused."""
        self.connection_point.count_refused(notifications)

    def tick(self) -> None:
        self.carry(self.connection_point.on_tick(self._clock()))

    def carry(self, outputs: Sequence[Output], source: str = "") -> None:
        """Carries frames and events from `source`, by default the Connection Point."""
        super().carry(outputs, source or self.connection_point.name)

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Returns the configuration and its epoch."""

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of the slices in this process, by layer."""
        return {
            "connection_point": self.connection_point.statistics(),
            "queue_point": self.queue_point.statistics(),
        }


class EmbeddedHost(BrokerHost):
    """One slice of each layer, epoch 1."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float], on_failure: Callable[[Exception], None]) -> None:
        super().__init__((1, 2), "access-point-1", bounds, clock, on_failure)
        self.configuration = Configuration(
            epoch=1, access_points=("access-point-1",), matchers=("matcher-1",), exit_points=("exit-point-1",)
        )
        self.access_point = AccessPoint("access-point-1", self.configuration)
        self.matcher = Matcher("matcher-1", self.configuration)
        self.exit_point = ExitPoint("exit-point-1", self.configuration)
        for part in (self.access_point, self.matcher, self.exit_point):
            self.add(part)
        self._delays = Delays()
        self._delays_before = self._delays.counts
        self._next_look_s = 0.0
        self._delay_summary: dict[str, float] | None = None

    def carry(self, outputs: Sequence[Output], source: str = "") -> None:
        """Carries frames, and measures how long batches take: they are through the layers when this returns. A nested
        call only queues its frames, so it is not measured."""
        if self._is_carrying or not any(type(frame) is Submit for _address, frame in outputs):
            super().carry(outputs, source)
            return
        began_s = self._clock()
        super().carry(outputs, source)
        self._delays.add(self._clock() - began_s)

    def tick(self) -> None:
        super().tick()
        if self._clock() >= self._next_look_s:
            self._next_look_s = self._clock() + DELAYS_LOOK_S
            before, self._delays_before = self._delays_before, self._delays.counts
            passed = [count - earlier for count, earlier in zip(self._delays_before, before, strict=True)]
            self._delay_summary = delay_summary(passed)

    def status(self) -> dict[str, Any]:
        """Returns the configuration and its epoch, and how long batches took through the layers in the last second."""
        return status_of(self.configuration) | {"delays_ms": self._delay_summary}

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {
            "access_point": self.access_point.statistics(),
            "matcher": self.matcher.statistics(),
            "exit_point": self.exit_point.statistics(),
        }

    def _hand_over(self, source: str, address: str, frame: LayerFrame) -> None:
        """Drops frames for slices that no longer exist: there is no other process."""


def status_of(configuration: Configuration) -> dict[str, Any]:
    return {
        "epoch": configuration.epoch,
        "configuration": {layer.field: configuration.of(layer) for layer in Layer},
    }
