"""Hosts of a broker: the Connection Point with its sessions, the queue point, and what is between them.

The embedded host has all layers in one process. When `carry` returns, a batch is in the outboxes of its subscribers
and its publisher is acknowledged, unless a subscriber blocks or a queue wants some of it: the queue feeder answers when
its store has it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final, Protocol

from tidegate.filters import Filter
from tidegate.layers.access_point import AccessPoint
from tidegate.layers.carrier import Carrier
from tidegate.layers.connection_point import Bounds, ConnectionPoint
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import LayerFrame, Outputs, Submit
from tidegate.layers.load import Delays, shown_delays
from tidegate.layers.matcher import Matcher
from tidegate.layers.queue_feeder import QueueFeeder
from tidegate.layers.queue_point import QueuePoint
from tidegate.layers.selector import Configuration
from tidegate.queues import LogicalQueues

FEEDER: Final = "queue-feeder"
DELAYS_LOOK_S: Final = 1.0


class SessionHandler(Protocol):
    """A listener's end of a session; `on_frame` gets what the Connection Point addresses to it."""

    def on_frame(self, frame: LayerFrame) -> None: ...


class BrokerHost(Carrier):
    """The edge of the layers: a Connection Point for clients, one for queues. Without an Access Point it waits for a
    coordinator to name one."""

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
        self._handlers: dict[int, SessionHandler] = {}

    def use_feeder(self, queues: LogicalQueues) -> QueueFeeder:
        """From now on what matches a queue's filter is put into it."""
        feeder = QueueFeeder(FEEDER, queues, self.carry, self._on_failure)
        self.add(feeder)
        return feeder

    def bind(self, queue: str, subscription_filter: Filter | None) -> None:
        self.carry(self.queue_point.bind(queue, subscription_filter), self.queue_point.name)

    def open_session(self, handler: SessionHandler) -> int:
        session = self.connection_point.open_session()
        self._handlers[session] = handler
        return session

    def close_session(self, session: int) -> None:
        self._handlers.pop(session, None)
        self.carry(self.connection_point.close_session(session))

    def tick(self) -> None:
        self.carry(self.connection_point.on_tick(self._clock()))

    def carry(self, outputs: Outputs, source: str = "") -> None:
        """Of the Connection Point when no source is named."""
        super().carry(outputs, source or self.connection_point.name)

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Configuration and epoch."""

    def statistics(self) -> dict[str, Any]:
        """The load of what is here, by layer."""
        return {
            "connection_point": self.connection_point.statistics(),
            "queue_point": self.queue_point.statistics(),
        }

    def _hand_over(self, source: str, address: str | int, frame: LayerFrame) -> None:
        handler = self._handlers.get(address)  # type: ignore[arg-type]
        if handler is not None:
            handler.on_frame(frame)


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
        self._shown_delays: dict[str, float] | None = None

    def carry(self, outputs: Outputs, source: str = "") -> None:
        """A batch is through the layers when this returns, unless it came in the middle of another."""
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
            self._shown_delays = shown_delays(passed)

    def status(self) -> dict[str, Any]:
        """With how long batches took through the layers in the last second."""
        return status_of(self.configuration) | {"delays_ms": self._shown_delays}

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {
            "access_point": self.access_point.statistics(),
            "matcher": self.matcher.statistics(),
            "exit_point": self.exit_point.statistics(),
        }


def status_of(configuration: Configuration) -> dict[str, Any]:
    return {
        "epoch": configuration.epoch,
        "configuration": {
            "access_points": configuration.access_points,
            "matchers": configuration.matchers,
            "exit_points": configuration.exit_points,
        },
    }
