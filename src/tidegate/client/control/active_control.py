"""Active control of one persistent query: when to ask the broker again, in calm and in overload.

    due ─► request ─► response or failure ─► congested? losses? ─► AST + RBT, a slot of the broker ─► due

`ActiveControl` is told what happens and when, and holds in `due_s` when to call `on_due`. It reads no clock and has no
random source of its own. At most one request is under way. Notifications and responses of a query share one ordered
connection and carry the broker's number of the last decision to notify; so a gap in the numbers is a loss, which needs
no request to be known, and checks only find what was lost at the tail.

After a failure only the backoff is waited, as the check was not made; otherwise the sum of AST and RBT. A slot of the
broker, or its time to come back, is waited for at least. While notifications arrive no check is due.

What may go wrong. A clock that jumps back counts as standing still, and delays a check by at most what it was to wait.
Hints may be lies: one that is no time counts as missing, and no slot, spread or longest backoff of the broker is taken
for more than `interval_s_max`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tidegate.client.control.adaptive import Check, IntervalSettings, Strategy, new_interval
from tidegate.client.control.backoff import PACES_MAX, BackoffKind, BackoffSettings, Collision, new_backoff
from tidegate.client.control.congestion import CongestionDetector, DetectionSettings
from tidegate.client.control.variation import Uniform


@dataclass(frozen=True)
class Control:
    """How a persistent query is paced. The default is the full design."""

    interval: IntervalSettings = field(default_factory=IntervalSettings)
    detection: DetectionSettings = field(default_factory=DetectionSettings)
    backoff: BackoffSettings = field(default_factory=BackoffSettings)
    is_restarted_by_notifications: bool = True
    """A notification stands for a check: the next one is due a whole interval after it."""
    is_backoff_alone_after_failure: bool = True
    """Otherwise, as printed, the interval is waited too, although the check has failed."""


@dataclass(frozen=True)
class Hints:
    """What a broker tells with a response, all of it optional: None where it says nothing."""

    processing_s: float | None = None
    """Of this request, without its wait."""
    delay_s: float | None = None
    """D^br: the delay up to which the broker holds itself for stable."""
    pace_s: float | None = None
    """The interval between requests that it wishes each client to keep."""
    slot_s: float | None = None
    """Its appointment for the next request, from now."""


NO_HINTS = Hints()


@dataclass(frozen=True)
class ControlStatistics:
    interval_s: float
    """What was last waited, or is: AST and RBT, or the broker's slot."""
    ast_s: float
    rbt_s: float
    """Before it is varied; 0 in calm."""
    requests: int
    failures: int
    detections: int
    """Requests that met congestion, failures among them."""
    losses: int
    restarts: int
    """Checks that notifications have made unnecessary."""


class SequenceGaps:
    """Counts the broker's decisions to notify of which nothing has arrived. Numbers start at 1."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen = 0

    def on_message(self, sequence: int, carried: int) -> int:
        """A notification carries one decision, or those merged into it; a response, whose result holds their outcome,
        those that wait to be sent and that no response has carried yet. Returns by how many more the number grew."""
        lost = max(0, sequence - self._seen - carried)
        self._seen = max(self._seen, sequence)
        return lost

    def restart(self, sequence: int, *, is_different: bool) -> int:
        """On a new connection numbers prove nothing: the results are compared, and a difference counts as one loss."""
        self._seen = sequence
        return int(is_different)


class ActiveControl:
    """The machine of one persistent query, from its first request, due at once."""

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
        """Tells whether to send a request now; otherwise notifications have come, and `due_s` has moved."""
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
        """What `SequenceGaps` has found in a message, before the message itself."""
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
        """The broker denies the request; its backlog is what it tells to wait for."""
        self._fail(self._bounded_s(retry_after_s) or 0.0, retry_after_s, now_s)

    def on_timeout(self, now_s: float) -> None:
        """No response came in time, and a late one is to be ignored."""
        self._fail(self._detector.excess_s(max(0.0, now_s - self._asked_at_s)), None, now_s)

    def on_notification(self, now_s: float, spread_s: float | None = None) -> None:
        """One that brings the result's new state. It restarts the timers of everybody who hears it: so that they do not
        check together, they also wait for a random part of the time that the broker gives for fetches."""
        if self._control.is_restarted_by_notifications and not self.is_asking:
            self._heard_at_s = now_s
            self._heard_spread_s = self._bounded_s(spread_s) or 0.0

    def on_announcement(self, spread_s: float | None, now_s: float) -> None:
        """A notification that says to fetch. Everybody else has it too, so that the fetch is due at random within the
        time that the broker gives, or within the backoff if there is one. Further announcements do not put it off."""
        if self.is_asking:
            return  # the response is sent after this, and has what is announced
        within_s = self._bounded_s(spread_s)
        if within_s is None:
            within_s = 2.0 * self._backoff.backoff_s
        wait_s = within_s * self._draw()
        self._heard_at_s = None
        if not self._is_fetch_planned or now_s + wait_s < self.due_s:
            self._plan(now_s, wait_s)
            self._is_fetch_planned = True

    def wait_s(self, now_s: float) -> float:
        """How long to sleep before `on_due`, also when the clock has jumped back since it was planned."""
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
        backoff_s = self._collide(excess_s, adaptive_s, None)
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

    def _collide(self, excess_s: float, adaptive_s: float, pace_s: float | None) -> float:
        collision = Collision(self._waited_s, adaptive_s, excess_s, self._detector.average_s, pace_s)
        return self._backoff.on_collision(collision, self._draw)

    def _wait(self, wait_s: float, hint_s: float | None, now_s: float) -> None:
        self.is_asking = False
        self._waited_s = max(wait_s, self._bounded_s(hint_s) or 0.0)
        self._plan(now_s, self._waited_s)

    def _plan(self, now_s: float, wait_s: float) -> None:
        self._heard_at_s = None
        self._is_fetch_planned = False
        self._planned_s = wait_s
        self.due_s = now_s + wait_s

    def _bounded_s(self, hint_s: float | None, share: float = 1.0) -> float | None:
        """A hint that is no time counts as missing; one that is too long, as this share of the longest interval."""
        if hint_s is None or not 0.0 <= hint_s < math.inf:
            return None
        return min(hint_s, share * self._control.interval.interval_s_max)
