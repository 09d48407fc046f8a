"""How a dequeue request finds its messages: what the four methods have in common.

A method is a state machine. It is told of requests, of what a try has brought, of messages that have come, and of time;
it answers with the request's next step. The dequeue controller takes the steps. Each method is a module of its own:

- `conventional`: round-robin, up to three physical queues, an answer at once: the baseline;
- `pms`: the fullest physical queues first, as a periodical count has seen them;
- `rds`: as conventional, but a request that missed sleeps and is tried again;
- `wakeup`: a request waits until messages have come; the store is not asked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

# Physical queues that are tried for one request (the paper's section 4.1).
TRIES_MAX: Final = 3


@dataclass(slots=True, eq=False)
class Request:
    """A dequeue request; `got` counts what its tries have brought so far, `tries` those since it last slept."""

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
    """Hold the request; ask again at this time, or when the method says so."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer with what there is."""


Step: TypeAlias = Try | Park | Reply
REPLY: Final = Reply()


class DequeueMethod(Protocol):
    """`monitor_period_s`: how often it wants to be told the counts of all physical queues, if it does. `wants_wakeups`:
    whether parked requests wait for the store's messages."""

    monitor_period_s: float | None
    wants_wakeups: bool

    @property
    def sleep_s(self) -> float:
        """How long a request that misses now would sleep."""

    def on_request(self, request: Request, now_s: float) -> Step: ...

    def on_result(self, request: Request, physical: int, got: int, waiting: int, now_s: float) -> Step:
        """A try has brought `got` messages, which `request.got` counts already; `waiting` are left there."""

    def on_time(self, request: Request, now_s: float) -> Step:
        """A parked request's time has come."""

    def on_ready(self, physical: int, waiting: int, now_s: float) -> list[tuple[Request, float]]:
        """Messages have come: parked requests, and the time from which each is to be asked about."""

    def on_counts(self, counts: Sequence[int], now_s: float) -> None: ...

    def on_gone(self, request: Request) -> list[tuple[Request, float]]:
        """A request is answered, or its client has gone; as for `on_ready`, others may take what it leaves."""


class RoundRobin:
    """The next physical queue, again and again; each controller starts somewhere else."""

    def __init__(self, count: int, start: int) -> None:
        self._count = count
        self._next = start % count

    def next(self) -> int:
        chosen = self._next
        self._next = (chosen + 1) % self._count
        return chosen
