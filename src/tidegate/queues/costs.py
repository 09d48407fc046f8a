"""The cost of dequeuing, by the paper's equations (4) and (5), with unit costs that are measured here.

    Rc = E ce0 + Dh cdh0 + (sum of Ni) cdh + Dm cdm0 + M cM

Per second, E messages are enqueued, Dh hits return Ni messages each, Dm requests miss, and M physical queues are
counted (only PMS counts them). The paper writes E cdh0 for Dh cdh0, as if each hit returned one message. The cost of a
hit is a straight line over its number of messages. The line is fitted continuously, and old samples lose weight.

Costs are the time that the event loop spends. The time in which an operation waits for a disk or a network does not
count, nor does the work of a disk's or a server's own thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar, cast

T = TypeVar("T")

# The weight of older samples after each new one: in effect the last thousand samples count.
_FADE: Final = 0.999


class Timed(Generic[T]):
    """An operation, to be awaited once. `seconds` counts the time that the event loop spends on it, without the time it
    waits."""

    def __init__(self, operation: Coroutine[Any, Any, T]) -> None:
        self.seconds = 0.0
        self._operation = operation

    def __await__(self) -> Generator[Any, Any, T]:
        # Drives the coroutine by hand, as `await` would, so that only the steps between two waits are timed.
        resume: Callable[[Any], Any] = self._operation.send
        given: Any = None
        while True:
            began_s = time.perf_counter()
            try:
                waits_for = resume(given)
            except StopIteration as end:
                return cast(T, end.value)
            finally:
                self.seconds += time.perf_counter() - began_s
            try:
                resume, given = self._operation.send, (yield waits_for)
            except BaseException as error:
                resume, given = self._operation.throw, error


@dataclass(slots=True)
class _Mean:
    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.weight = _FADE * self.weight + 1.0
        self.total = _FADE * self.total + value

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class UnitCosts:
    """Costs in seconds: `enqueue` of a message (ce0), `hit` (cdh0), `hit_message` (cdh), `miss` (cdm0), `monitor`
    (cM)."""

    enqueue_s: float
    hit_s: float
    hit_message_s: float
    miss_s: float
    monitor_s: float

    def predict(self, enqueued: float, hits: float, messages: float, misses: float, monitored: float) -> float:
        """Returns the share of a core that the store's work takes, from rates per second."""
        return (
            enqueued * self.enqueue_s
            + hits * self.hit_s
            + messages * self.hit_message_s
            + misses * self.miss_s
            + monitored * self.monitor_s
        )


@dataclass(slots=True)
class Costs:
    _enqueue: _Mean = field(default_factory=_Mean)
    _miss: _Mean = field(default_factory=_Mean)
    _monitor: _Mean = field(default_factory=_Mean)
    _count: _Mean = field(default_factory=_Mean)
    _time: _Mean = field(default_factory=_Mean)
    _count_squared: _Mean = field(default_factory=_Mean)
    _count_time: _Mean = field(default_factory=_Mean)

    def enqueued(self, messages: int, took_s: float) -> None:
        self._enqueue.add(took_s / messages)

    def missed(self, took_s: float) -> None:
        self._miss.add(took_s)

    def monitored(self, queues: int, took_s: float) -> None:
        self._monitor.add(took_s / queues)

    def hit(self, messages: int, took_s: float) -> None:
        self._count.add(messages)
        self._time.add(took_s)
        self._count_squared.add(messages * messages)
        self._count_time.add(messages * took_s)

    def units(self) -> UnitCosts:
        mean_count, mean_s = self._count.value, self._time.value
        variance = self._count_squared.value - mean_count**2
        slope_s = (self._count_time.value - mean_count * mean_s) / variance if variance > 1e-9 else 0.0
        # Noise may tilt the line so far that one of the two costs becomes negative; the slope is limited to prevent
        # that.
        slope_s = min(max(0.0, slope_s), mean_s / mean_count if mean_count else 0.0)
        return UnitCosts(
            self._enqueue.value, mean_s - slope_s * mean_count, slope_s, self._miss.value, self._monitor.value
        )
