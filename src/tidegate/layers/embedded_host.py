"""The embedded host: all layers in one process, frames carried by direct calls.

A frame is handled as soon as the ones before it are, so every channel is FIFO. `carry` runs until nothing is left to
do: when it returns, a batch is in the outboxes of its subscribers and its publisher is acknowledged, unless a
subscriber blocks or a queue wants some of it: the queue feeder answers when its store has it. An error inside a slice
is a mistake of ours: what it promises no longer holds, so the host tells `on_failure`, which must end the broker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from tidegate.filters import Filter
from tidegate.layers.access_point import AccessPoint
from tidegate.layers.connection_point import Bounds, ConnectionPoint
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import LayerFrame, Outputs
from tidegate.layers.matcher import Matcher
from tidegate.layers.queue_feeder import QueueFeeder
from tidegate.layers.queue_point import QueuePoint
from tidegate.layers.selector import Configuration
from tidegate.queues import LogicalQueues

FEEDER: Final = "queue-feeder"


class SessionHandler(Protocol):
    """A listener's end of a session; `on_frame` gets what the Connection Point addresses to it."""

    def on_frame(self, frame: LayerFrame) -> None: ...


class EmbeddedHost:
    """One slice of each layer, epoch 1. `clock` gives the time in seconds; the slices themselves read none."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float], on_failure: Callable[[Exception], None]) -> None:
        self.configuration = Configuration(
            epoch=1, access_points=("access-point-1",), matchers=("matcher-1",), exit_points=("exit-point-1",)
        )
        self.connection_point = ConnectionPoint(1, "access-point-1", bounds)
        self.access_point = AccessPoint("access-point-1", self.configuration)
        self.matcher = Matcher("matcher-1", self.configuration)
        self.exit_point = ExitPoint("exit-point-1", self.configuration)
        self.queue_point = QueuePoint(2, "access-point-1", FEEDER)
        self._slices: dict[str, Any] = {
            part.name: part
            for part in (self.connection_point, self.access_point, self.matcher, self.exit_point, self.queue_point)
        }
        self._handlers: dict[int, SessionHandler] = {}
        self._queue: deque[tuple[str, str | int, LayerFrame]] = deque()
        self._is_carrying = False
        self._clock = clock
        self._on_failure = on_failure

    def use_feeder(self, queues: LogicalQueues) -> QueueFeeder:
        """From now on what matches a queue's filter is put into it."""
        feeder = QueueFeeder(FEEDER, queues, self.carry, self._on_failure)
        self._slices[FEEDER] = feeder
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
        """Carries frames of a slice, by default the Connection Point, and all that follow from them, to where they are
        addressed.

        A handler may call back in here; its frames queue up behind those that are under way."""
        queue = self._queue
        source = source or self.connection_point.name
        queue.extend((source, address, frame) for address, frame in outputs)
        if self._is_carrying:
            return
        self._is_carrying = True
        now_s = self._clock()
        try:
            while queue:
                source, address, frame = queue.popleft()
                if isinstance(address, int):
                    self._tell(address, frame)
                else:
                    for following in self._slices[address].handle(source, frame, now_s):
                        queue.append((address, *following))
        except Exception as error:
            self._on_failure(error)
            raise
        finally:
            self._is_carrying = False

    def _tell(self, session: int, frame: LayerFrame) -> None:
        handler = self._handlers.get(session)
        if handler is not None:
            handler.on_frame(frame)
