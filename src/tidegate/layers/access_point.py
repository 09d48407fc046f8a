"""Access Point: sends each notification that enters the layers to all Matchers, and its body to one Exit Point.

An Access Point holds no subscriptions. It stamps each batch with the epoch of the configuration and a sequence number
for its Exit Point. It keeps the batch until that Exit Point reports that all Connection Points have it. Only then is
the publish acknowledged: an earlier acknowledgement would lose the batches that a crashing slice had in flight.

A change of a subscription goes to the registry, and to the Matcher that owns the subscription in each configuration
that may still be in use. The change is acknowledged when all of them have it. Versions of one subscription are
acknowledged in order.

What may go wrong here: a slice dies (the coordinator begins a new stream, and all unacknowledged batches are sent
again, in order); a Matcher cannot take a subscription (the change is refused once no reply to it is pending).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tidegate.errors import ForeignFrame, TidegateError
from tidegate.layers.control import Buried, End, Fence, Go, Marker, Prepare, Step, Switch, Transaction
from tidegate.layers.frames import (
    Ack,
    Body,
    Change,
    ChangeOk,
    ChangeRefused,
    Outputs,
    Publish,
    Submit,
    SubmitAck,
)
from tidegate.layers.selector import Configuration
from tidegate.layers.slice import Slice
from tidegate.layers.subscription_table import is_connection_point


@dataclass(frozen=True)
class AccessPointStatistics:
    """`unacknowledged_batches` counts what the Access Point would send again after a slice crashes."""

    batches: int
    notifications: int
    unacknowledged_batches: int
    pending_changes: int
    held: int


@dataclass(slots=True)
class _Pending:
    """A change of a subscription, and in `needs` the slices that have not confirmed it yet."""

    source: str
    change: Change
    needs: set[str]
    refusal: TidegateError | None = None


@dataclass(slots=True)
class _Held:
    """Frames held back, in order of arrival: before the first configuration, or during a buffered switch."""

    submits: bool = False
    changes: bool = False
    frames: list[tuple[str, Submit | Change]] = field(default_factory=list)


class AccessPoint(Slice):
    """Guarantees: a batch is acknowledged to its Connection Point after, and only after, all subscribers' Connection
    Points have it. Its buffer is bounded by the windows of the publishers, which the Connection Points enforce.

    A new Access Point has no configuration and waits for the switch to one that includes it. `registry` is empty
    where no slice can die alone."""

    def __init__(self, name: str, configuration: Configuration | None, registry: str = "") -> None:
        super().__init__(name)
        self._current = configuration
        self._live: tuple[Configuration, ...] = (configuration,) if configuration is not None else ()
        self._registry = registry
        self._transaction: Transaction | None = None
        self._sequences: defaultdict[str, int] = defaultdict(int)
        self._unacknowledged: dict[tuple[str, int], tuple[str, Submit]] = {}
        self._pending: dict[int, list[_Pending]] = {}
        self._held = _Held()
        self._last: tuple[int, dict[str, int]] = (0, {})
        self._ending: End | None = None
        # Subscriptions with a pending change that a former owner has not confirmed yet.
        self._strays: set[int] = set()
        self._ended = 0
        self._batches = 0
        self._notifications = 0

    # Notifications.

    def on_submit(self, source: str, frame: Submit, now_s: float) -> Outputs:
        if self._current is None or self._held.submits:
            self._held.frames.append((source, frame))
            return []
        self._batches += 1
        self._notifications += len(frame.batch)
        return self._stamp(self._current, source, frame)

    def on_ack(self, source: str, frame: Ack, now_s: float) -> Outputs:
        if self._current is None or frame.stream != self._current.stream:
            return []
        acknowledged = self._unacknowledged.pop((source, frame.sequence), None)
        if acknowledged is None:
            raise ForeignFrame(f"{source} acknowledges batch {frame.sequence}, which is not pending there")
        connection_point, submit = acknowledged
        return [(connection_point, SubmitAck(submit.batch.publisher, submit.batch.last, frame.refused))]

    def _stamp(self, configuration: Configuration, source: str, frame: Submit) -> Outputs:
        batch = frame.batch
        exit_point = configuration.exit_point(batch.publisher)
        sequence = self._sequences[exit_point] = self._sequences[exit_point] + 1
        self._unacknowledged[exit_point, sequence] = (source, frame)
        stamp = (self.name, configuration.stream, configuration.epoch, sequence, batch)
        outputs: Outputs = [(exit_point, Body(*stamp, source))]
        for matcher in configuration.matchers:
            if matcher not in self._fenced:
                outputs.append((matcher, Publish(*stamp, exit_point)))
        return outputs

    # Subscriptions.

    def on_change(self, source: str, frame: Change, now_s: float) -> Outputs:
        if self._current is None or self._held.changes:
            self._held.frames.append((source, frame))
            return []
        needs = self._owners(frame.subscription)
        if self._registry:
            needs.add(self._registry)
        self._pending.setdefault(frame.subscription, []).append(_Pending(source, frame, needs))
        return [(name, frame) for name in sorted(needs)] if needs else self._settle(frame.subscription)

    def on_change_ok(self, source: str, frame: ChangeOk | ChangeRefused, now_s: float) -> Outputs:
        for pending in self._pending.get(frame.subscription, ()):
            if pending.change.version == frame.version:
                pending.needs.discard(source)
                if isinstance(frame, ChangeRefused):
                    pending.refusal = frame.error
        return self._settle(frame.subscription)

    on_change_refused = on_change_ok

    def _owners(self, subscription: int) -> set[str]:
        return {configuration.owner(subscription) for configuration in self._live} - self._fenced

    def _settle(self, subscription: int) -> Outputs:
        """Acknowledges the versions that every receiver has, up to the first one that some receiver lacks. A removal
        must not be confirmed while the version that it removes is still in flight."""
        waiting = self._pending.get(subscription, [])
        outputs: Outputs = []
        while waiting and not waiting[0].needs:
            done = waiting.pop(0)
            version = done.change.version
            if done.refusal is not None:
                outputs.append((done.source, ChangeRefused(subscription, version, done.refusal)))
            else:
                outputs.append((done.source, ChangeOk(subscription, version)))
        if not waiting:
            self._pending.pop(subscription, None)
        if subscription in self._strays and not self._is_stray(subscription):
            self._strays.discard(subscription)
            outputs += self._report_ended()
        return outputs

    # Reconfiguration.

    def on_fence(self, source: str, frame: Fence, now_s: float) -> Outputs:
        """Reports dead Connection Points to every holder of their subscriptions, and drops their pending changes. The
        report follows the last change on the same channel, so no later change brings a subscription back."""
        self._held.frames = [(sender, held) for sender, held in self._held.frames if sender not in frame.dead]
        for subscription, waiting in list(self._pending.items()):
            if waiting[0].source in frame.dead:
                del self._pending[subscription]
                self._strays.discard(subscription)
        matchers = {name for configuration in self._live for name in configuration.matchers} - self._fenced - frame.dead
        outputs = _bury(frame.dead, matchers | ({self._registry} if self._registry else set()))
        return outputs + self._report_ended() + super().on_fence(source, frame, now_s)

    def on_prepare(self, source: str, frame: Prepare, now_s: float) -> Outputs:
        """Begins to write changes to the owners in all live configurations. Markers go out before the first write to
        a new owner, so that a Matcher knows when it has every change that was written to it alone."""
        transaction = frame.transaction
        outputs: Outputs = []
        if self._transaction is None or transaction.epoch > self._transaction.epoch:
            self._transaction = transaction
            self._ending = None
            self._strays.clear()
            self._fenced |= transaction.dead
            before, self._live = self._live, transaction.live
            matchers = {name for configuration in transaction.live for name in configuration.matchers} - self._fenced
            outputs += [(name, Marker(transaction)) for name in sorted(matchers)]
            outputs += _bury(self._fenced - transaction.dead, matchers)  # slices that died since the transaction began
            outputs += self._send_pending_to_new_owners(before)
            if transaction.is_buffered and not transaction.is_recovery:
                self._held.changes = True
        return outputs + self._reply(Step.PREPARED, transaction.epoch)

    def on_switch(self, source: str, frame: Switch, now_s: float) -> Outputs:
        transaction = frame.transaction
        outputs: Outputs = []
        if self._current is None or self._current.epoch < transaction.epoch:
            # Kept, so that a repeated Switch gets the same answer although new batches have raised the sequences.
            self._last = (transaction.epoch, dict(self._sequences))
            is_new_stream = self._current is not None and transaction.new.stream != self._current.stream
            self._current = transaction.new
            if is_new_stream:
                outputs += self._send_again()
            self._held.changes = False
            self._held.submits = transaction.is_buffered and not transaction.is_recovery
            outputs += self._admit_held(now_s)
        epoch, last = self._last
        return outputs + self._reply(Step.SWITCHED, transaction.epoch, last if epoch == transaction.epoch else {})

    def on_go(self, source: str, frame: Go, now_s: float) -> Outputs:
        outputs: Outputs = []
        if self._current is not None and self._current.epoch == frame.epoch:
            self._held.submits = False
            outputs += self._admit_held(now_s)
        return outputs + self._reply(Step.GONE, frame.epoch)

    def on_end(self, source: str, frame: End, now_s: float) -> Outputs:
        outputs = self._forget(frame.dead)
        if self._transaction is not None and self._transaction.epoch > frame.epoch:
            return outputs
        if self._ended < frame.epoch:
            self._ended = frame.epoch
            self._live = (frame.keep,)
            self._held.submits = self._held.changes = False
            outputs += self._admit_held(now_s)
        self._ending = frame
        self._strays = {subscription for subscription in self._pending if self._is_stray(subscription)}
        return outputs + self._report_ended()

    def statistics(self) -> AccessPointStatistics:
        return AccessPointStatistics(
            self._batches,
            self._notifications,
            len(self._unacknowledged),
            sum(map(len, self._pending.values())),
            len(self._held.frames),
        )

    def _send_pending_to_new_owners(self, before: tuple[Configuration, ...]) -> Outputs:
        outputs: Outputs = []
        for subscription, waiting in list(self._pending.items()):
            new = self._owners(subscription) - {configuration.owner(subscription) for configuration in before}
            for pending in waiting:
                pending.needs -= self._fenced
                pending.needs |= new
                outputs += [(name, pending.change) for name in sorted(new)]
            outputs += self._settle(subscription)
        return outputs

    def _send_again(self) -> Outputs:
        """Sends all unacknowledged batches in the new stream, in order, before any new batch."""
        assert self._current is not None
        again, self._unacknowledged = list(self._unacknowledged.values()), {}
        self._sequences.clear()
        return [output for source, frame in again for output in self._stamp(self._current, source, frame)]

    def _admit_held(self, now_s: float) -> Outputs:
        """Handles the held frames in order of arrival. Frames that must still wait are held again."""
        frames, self._held.frames = self._held.frames, []
        outputs: list[Any] = [output for source, frame in frames for output in self.handle(source, frame, now_s)]
        return outputs

    def _forget(self, dead: frozenset[str]) -> Outputs:
        """Stops waiting for confirmations from dead slices."""
        self._fenced |= dead
        outputs: Outputs = []
        for subscription, waiting in list(self._pending.items()):
            for pending in waiting:
                pending.needs -= dead
            outputs += self._settle(subscription)
        return outputs

    def _is_stray(self, subscription: int) -> bool:
        assert self._ending is not None
        expected = {self._ending.keep.owner(subscription), self._registry}
        return any(pending.needs - expected for pending in self._pending.get(subscription, ()))

    def _report_ended(self) -> Outputs:
        """Reports ENDED once no write is pending to a former owner of a subscription."""
        if self._ending is None or self._strays:
            return []
        epoch, self._ending = self._ending.epoch, None
        return self._reply(Step.ENDED, epoch)


def _bury(dead: Collection[str], holders: Collection[str]) -> Outputs:
    return [(holder, Buried(name)) for name in sorted(dead) if is_connection_point(name) for holder in sorted(holders)]
