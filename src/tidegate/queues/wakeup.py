"""Wake-up: a request is held until messages arrive, and the store is asked only when it has some.

There is no sleep time to tune: the store reports messages, and the request that has waited longest gets them. A request
that wants at least `min` messages is held until that many wait, or until the oldest of them has waited for `linger_s`.
This gives fewer and fuller answers for a bounded delay. A request is topped up from other physical queues that are
known to have messages.

What may go wrong: a wake-up is lost (another controller died with it, a connection broke). While requests are held, a
slow safety check reads the counts from the store, and handles them as if the messages had just arrived.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tidegate.queues.method import REPLY, TRIES_MAX, Park, Request, Step, Try


class Wakeup:
    """`_waiting[i]` is the number of messages that physical queue i is known to have. `_since_s` is when the oldest of
    all of them arrived, as far as this controller knows. Messages that a woken request is about to take are promised to
    it."""

    monitor_period_s: float | None = None
    wants_wakeups = True
    sleep_s = 0.0

    def __init__(self, physical_queues: int, start: int, linger_s: float) -> None:
        self._waiting = [0] * physical_queues
        self._linger_s = linger_s
        self._since_s = 0.0
        self._parked: OrderedDict[int, Request] = OrderedDict()
        self._promised: dict[int, int] = {}
        self._next = start % physical_queues

    def on_request(self, request: Request, now_s: float) -> Step:
        if self._parked:  # earlier requests come first; messages that they leave wake this one too
            return self._park(request)
        return self._next_step(request, now_s)

    def on_result(self, request: Request, physical: int, got: int, waiting: int, now_s: float) -> Step:
        self._note(physical, waiting, now_s)
        if request.got:
            is_done = request.wants <= 0 or request.tries >= TRIES_MAX
            return REPLY if is_done else self._try_fullest(request) or REPLY
        # Another consumer was faster. This request has waited longest, so it stays in front.
        request.tries = 0
        self._promised.pop(id(request), None)
        step = self._next_step(request, now_s)
        if id(request) in self._parked:
            self._parked.move_to_end(id(request), last=False)
        return step

    def on_time(self, request: Request, now_s: float) -> Step:
        return self._next_step(request, now_s)

    def on_ready(self, physical: int, waiting: int, now_s: float) -> list[tuple[Request, float]]:
        self._note(physical, waiting, now_s)
        return self._wake()

    def on_counts(self, counts: Sequence[int], now_s: float) -> None:
        """Ignores counts: this method receives every change through `on_ready`."""

    def on_gone(self, request: Request) -> list[tuple[Request, float]]:
        self._parked.pop(id(request), None)
        self._promised.pop(id(request), None)
        return self._wake()

    def _note(self, physical: int, waiting: int, now_s: float) -> None:
        if waiting and not any(self._waiting):
            self._since_s = now_s
        self._waiting[physical] = waiting

    def _unpromised(self) -> int:
        return sum(self._waiting) - sum(self._promised.values())

    def _next_step(self, request: Request, now_s: float) -> Step:
        """Serves a request if enough messages wait, or some have waited long enough. Otherwise parks it until then, at
        most to its deadline."""
        available = self._unpromised()
        is_due = available >= request.min or now_s >= self._lingers_until_s(request)
        if available > 0 and is_due:
            self._promised[id(request)] = min(available, request.wants)
            if (step := self._try_fullest(request)) is not None:
                self._parked.pop(id(request), None)
                return step
            del self._promised[id(request)]
        if now_s >= request.deadline_s:
            self._parked.pop(id(request), None)
            return REPLY
        return self._park(request)

    def _park(self, request: Request) -> Step:
        self._parked.setdefault(id(request), request)
        return Park(self._lingers_until_s(request) if self._unpromised() > 0 else request.deadline_s)

    def _lingers_until_s(self, request: Request) -> float:
        return min(self._since_s + self._linger_s, request.deadline_s)

    def _wake(self) -> list[tuple[Request, float]]:
        """Returns the requests that have waited longest, as many as there are messages for, and when each is to be
        reconsidered. That is at once if there are enough messages for it, and otherwise when it has lingered."""
        available = self._unpromised()
        woken: list[tuple[Request, float]] = []
        for request in self._parked.values():
            if available <= 0:
                break
            woken.append((request, 0.0 if available >= request.min else self._lingers_until_s(request)))
            available -= request.wants
        return woken

    def _try_fullest(self, request: Request) -> Try | None:
        """Tries the physical queue with the most messages, taking turns among equals; None if all are empty. The
        messages that the try is about to take are counted as gone, so that other requests do not look for them."""
        count = len(self._waiting)
        self._next = (self._next + 1) % count
        fullest = max(range(count), key=lambda i: (self._waiting[i], (i - self._next) % count))
        taken = min(self._waiting[fullest], request.wants)
        if not taken:
            return None
        self._waiting[fullest] -= taken
        self._promised[id(request)] = max(0, self._promised.get(id(request), 0) - taken)
        return Try(fullest)
