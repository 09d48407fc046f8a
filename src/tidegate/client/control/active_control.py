"""Active control of one persistent query: when to ask the broker again, in calm and in overload.

    due ─► request ─► response or failure ─► congested? losses? ─► AST + RBT, a slot of the broker ─► due

`ActiveControl` receives events with their times, and sets `due_s` to when the caller must call `on_due`. It reads no
clock and has no random source of its own. At most one request is in flight.

Notifications and responses of a query share one ordered connection. Both carry the number of the broker's last decision
to notify. So a gap in the numbers proves a loss without a request, and checks only find losses after the last message.

After a failure the client waits only for the backoff, because the check was not made; otherwise for AST plus RBT. It
waits at least for the slot or the retry time that the broker has given. No check is due while notifications arrive.

What may go wrong: the clock jumps back. That counts as standing still, and delays a check by at most its planned wait.
Hints may be wrong: an invalid one counts as missing, and no slot, spread or longest backoff of the broker is
taken for more than `interval_s_max`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tidegate.client.control.adaptive import Check, IntervalSettings, Strategy, new_interval
from tidegate.client.control.backoff import PACES_MAX, BackoffKind, BackoffSettings, Collision, new_backoff
from tidegate.client.control.congestion import CongestionDetector, DetectionSettings
from tidegate.client.control.hints import MISSING, bound_s
from tidegate.client.control.variation import Uniform


@dataclass(frozen=True)
class Control:
    """The settings that pace a persistent query. The default is the full design."""

    interval: IntervalSettings = field(default_factory=IntervalSettings)
    detection: DetectionSettings = field(default_factory=DetectionSettings)
    backoff: BackoffSettings = field(default_factory=BackoffSettings)
    is_restarted_by_notifications: bool = True
    """A notification replaces a check: the next check is due a whole interval after it."""
    is_backoff_alone_after_failure: bool = True
    """Wait only for the backoff after a failed check. If False, wait for the interval too, as printed."""


@dataclass(frozen=True)
class Hints:
    """The hints that a broker sends with a response. Each is optional, and None if it is missing."""

    processing_s: float | None = None
    """The processing time of this request, without its time in queues."""
    delay_s: float | None = None
    """D^br: the largest delay that the broker considers healthy."""
    pace_s: float | None = None
    """The interval between requests that the broker asks of each client."""
    slot_s: float | None = None
    """The time from now to the slot that the broker reserves for the next request."""


NO_HINTS = Hints()


@dataclass(frozen=True)
class ControlStatistics:
    interval_s: float
    """The current or last wait: AST plus RBT, or the broker's slot."""
    ast_s: float
    rbt_s: float
    """The RBT before its random variation; 0 without congestion."""
    requests: int
    failures: int
    detections: int
    """Requests that met congestion, including failures."""
    losses: int
    restarts: int
    """Checks that notifications made unnecessary."""


class SequenceGaps:
    """Counts the broker's decisions to notify that never reached this client. Numbers start at 1."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen = 0

    def on_message(self, sequence: int, carried: int) -> int:
        """Returns the number of lost decisions: by how much the sequence grew beyond those that the message `carried`.

        A notification carries one decision and those merged into it. A response carries the decisions that wait to be
        sent, because its result includes their outcome, except those that an earlier response carried."""
        lost = max(0, sequence - self._seen - carried)
        self._seen = max(self._seen, sequence)
        return lost

    def restart(self, sequence: int, *, is_different: bool) -> int:
        """Begins a new connection, on which old numbers prove nothing. Returns 1 loss if the results differ, else 0."""
        self._seen = sequence
        return int(is_different)


class ActiveControl:
    """Paces one persistent query as a state machine. The first request is due at once, except with Strategy.NONE."""

    def __init__(self, control: Control, draw: Uniform, now_s: float) -> None:
        self.due_s = math.inf if control.interval.strategy is Strategy.NONE else now_s
        self.is_asking = False
        self._planned_s = self.due_s - now_s
        self._control = control
        self._draw = draw
        self._interval = new_interval(control.interval)
        self._detector = CongestionDetector(control.detection)
        self._backoff = new_backoff(control.backoff)
        self._asked_at_s = self._checked_at_s = now_s
        self._heard_at_s: float | None = None
        self._heard_spread_s = 0.0
        self._is_fetch_planned = False
        self._waited_s = 0.0
        self._new_losses = self._losses = 0
        self._requests = self._failures = self._restarts = 0

    def on_due(self, now_s: float) -> bool:
        """Returns whether to send a request now. If not, notifications have made it unnecessary and moved `due_s`."""
        assert not self.is_asking, "one request at a time"
        if self._heard_at_s is not None and self._is_restarted(self._heard_at_s, now_s):
            return False
        self.is_asking = True
        self._asked_at_s = now_s
        self._heard_at_s = None
        self._is_fetch_planned = False
        self._requests += 1
        self.due_s = self._planned_s = math.inf
        return True

    def on_losses(self, losses: int) -> None:
        """Counts the losses that `SequenceGaps` found in a message. Call it before the event for the message itself."""
        self._new_losses += losses
        self._losses += losses

    def on_response(self, hints: Hints, now_s: float) -> None:
        response_s = max(0.0, now_s - self._asked_at_s)
        is_congested = self._detector.on_response(response_s, hints.processing_s, hints.delay_s)
        adaptive_s = self._step_interval(is_congested, response_s, now_s)
        backoff_s = 0.0
        if is_congested:
            pace_s = self._bounded_s(hints.pace_s, 1.0 / PACES_MAX)
            backoff_s = self._collide(self._detector.excess_s(response_s), adaptive_s, pace_s)
        else:
            self._backoff.on_calm(self._waited_s)
        self._wait(adaptive_s + backoff_s, hints.slot_s, now_s)

    def on_refusal(self, retry_after_s: float | None, now_s: float) -> None:
        """Plans the next request after a refusal. The time that the broker asks for is taken as its backlog."""
        self._fail(max(0.0, self._bounded_s(retry_after_s)), retry_after_s, now_s)

    def on_timeout(self, now_s: float) -> None:
        """Plans the next request after a timeout. The caller must ignore a late response."""
        self._fail(self._detector.excess_s(max(0.0, now_s - self._asked_at_s)), None, now_s)

    def on_notification(self, now_s: float, spread_s: float | None = None) -> None:
        """Notes a notification that brings the new state of the result. It restarts the timers of all clients that
        receive it. So that they do not check together, each also waits for a random part of the broker's spread."""
        if self._control.is_restarted_by_notifications and not self.is_asking:
            self._heard_at_s = now_s
            self._heard_spread_s = max(0.0, self._bounded_s(spread_s))

    def on_announcement(self, spread_s: float | None, now_s: float) -> None:
        """Plans a fetch after a notification that asks for one. All clients receive it, so the fetch is due at a random
        time within the spread that the broker gives, else within the backoff if there is one. Further announcements do
        not postpone it."""
        if self.is_asking:
            return  # the pending response will include what is announced
        within_s = self._bounded_s(spread_s)
        if within_s < 0.0:
            within_s = 2.0 * self._backoff.backoff_s
        wait_s = within_s * self._draw()
        self._heard_at_s = None
        if not self._is_fetch_planned or now_s + wait_s < self.due_s:
            self._plan(now_s, wait_s)
            self._is_fetch_planned = True

    def wait_s(self, now_s: float) -> float:
        """Returns how long to sleep before `on_due`: at most the planned wait, even if the clock jumped back."""
        return max(0.0, min(self.due_s - now_s, self._planned_s))

    def statistics(self) -> ControlStatistics:
        return ControlStatistics(
            interval_s=self._waited_s,
            ast_s=self._interval.interval_s,
            rbt_s=self._backoff.backoff_s,
            requests=self._requests,
            failures=self._failures,
            detections=self._detector.detections,
            losses=self._losses,
            restarts=self._restarts,
        )

    def _is_restarted(self, heard_at_s: float, now_s: float) -> bool:
        losses, elapsed_s = self._take_check(now_s)
        since_s = max(0.0, now_s - heard_at_s)
        wait_s = self._interval.on_notified(losses, elapsed_s) - since_s
        if wait_s <= 0:
            return False
        if self._heard_spread_s > 0:
            wait_s += self._heard_spread_s * self._draw()
        self._plan(now_s, wait_s)
        self._restarts += 1
        return True

    def _fail(self, excess_s: float, retry_after_s: float | None, now_s: float) -> None:
        self._failures += 1
        self._detector.on_failure()
        adaptive_s = self._step_interval(True, None, now_s)
        backoff_s = self._collide(excess_s, adaptive_s, MISSING)
        is_alone = self._control.is_backoff_alone_after_failure and self._control.backoff.kind is not BackoffKind.NONE
        self._wait(backoff_s if is_alone else adaptive_s + backoff_s, retry_after_s, now_s)

    def _step_interval(self, is_congested: bool, response_s: float | None, now_s: float) -> float:
        losses, elapsed_s = self._take_check(now_s)
        return self._interval.on_check(Check(losses, elapsed_s, is_congested, response_s), self._draw)

    def _take_check(self, now_s: float) -> tuple[int, float]:
        losses, elapsed_s = self._new_losses, max(0.0, now_s - self._checked_at_s)
        self._new_losses = 0
        self._checked_at_s = now_s
        return losses, elapsed_s

    def _collide(self, excess_s: float, adaptive_s: float, pace_s: float) -> float:
        collision = Collision(self._waited_s, adaptive_s, excess_s, self._detector.average_s, pace_s)
        return self._backoff.on_collision(collision, self._draw)

    def _wait(self, wait_s: float, hint_s: float | None, now_s: float) -> None:
        self.is_asking = False
        self._waited_s = max(wait_s, self._bounded_s(hint_s))
        self._plan(now_s, self._waited_s)

    def _plan(self, now_s: float, wait_s: float) -> None:
        self._heard_at_s = None
        self._is_fetch_planned = False
        self._planned_s = wait_s
        self.due_s = now_s + wait_s

    def _bounded_s(self, hint_s: float | None, share: float = 1.0) -> float:
        """Returns a usable hint, at most this share of the longest interval; MISSING if there is none."""
        return bound_s(hint_s, share * self._control.interval.interval_s_max)
