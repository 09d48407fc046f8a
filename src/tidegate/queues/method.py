"""How a dequeue request finds its messages: what the four methods have in common.

A method is a state machine. Its inputs are requests, results of tries, arrivals of messages, and time; it returns the
request's next step. The dequeue controller executes the steps. Each method is a module of its own:

- `conventional`: round-robin, up to three physical queues, an immediate answer: the baseline;
- `pms`: the fullest physical queues first, according to a periodic count;
- `rds`: as conventional, but a request that missed sleeps and is tried again;
- `wakeup`: a request waits until messages arrive; only then is the store asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

# The number of physical queues that are tried for one request (the paper's section 4.1).
TRIES_MAX: Final = 3


@dataclass(slots=True, eq=False)
class Request:
    """A dequeue request. `got` counts the messages found so far, `tries` the physical queues tried since it last
    slept."""

    max: int
    min: int
    deadline_s: float
    got: int = 0
    tries: int = 0

    @property
    def wants(self) -> int:
        return self.max - self.got


@dataclass(frozen=True, slots=True)
class Try:
    """Lease from this physical queue."""

    physical: int


@dataclass(frozen=True, slots=True)
class Park:
    """Hold the request until this time, or until the method wakes it."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer with the messages found so far."""


Step: TypeAlias = Try | Park | Reply
REPLY: Final = Reply()


class DequeueMethod(Protocol):
    """`monitor_period_s` is how often the method needs the counts of all physical queues; None if it needs none.
    `wants_wakeups` is true if parked requests wait for the store to report messages."""

    monitor_period_s: float | None
    wants_wakeups: bool

    @property
    def sleep_s(self) -> float:
        """How long a request that misses now would sleep."""

    def on_request(self, request: Request, now_s: float) -> Step: ...

    def on_result(self, request: Request, physical: int, got: int, waiting: int, now_s: float) -> Step:
        """Handles a try that found `got` messages, which `request.got` already includes; `waiting` messages are left
        there."""

    def on_time(self, request: Request, now_s: float) -> Step:
        """Handles a parked request whose time has come, or that was woken."""

    def on_ready(self, physical: int, waiting: int, now_s: float) -> list[tuple[Request, float]]:
        """Handles the arrival of messages. Returns parked requests, and the time at which each is to be
        reconsidered."""

    def on_counts(self, counts: Sequence[int], now_s: float) -> None: ...

    def on_gone(self, request: Request) -> list[tuple[Request, float]]:
        """Handles a request that was answered, or whose client disconnected. Returns, as `on_ready` does, requests that
        may take what it leaves."""


class RoundRobin:
    """Returns the physical queues in turn, endlessly; each controller starts at a different one."""

    def __init__(self, count: int, start: int) -> None:
        self._count = count
        self._next = start % count

    def next(self) -> int:
        chosen = self._next
        self._next = (chosen + 1) % self._count
        return chosen
