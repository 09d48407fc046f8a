"""The simulation detects faults: every rule of the protocol that is left out breaks a promise with some seed.

Each hole existed in a first design of the protocol (docs/elasticity.md explains them one by one). Its test reopens it
by replacing one step of one slice, and runs seeds until a law is broken. A rule that no seed needs would be doubtful.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from elastic_world import ElasticWorld

from tidegate.errors import ForeignFrame
from tidegate.layers import reconfiguration
from tidegate.layers.access_point import AccessPoint
from tidegate.layers.control import Step, Transaction
from tidegate.layers.coordinator import Coordinator
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import ChangeOk, SubmitAck
from tidegate.layers.matcher import Matcher
from tidegate.layers.publishers import HighWaterMarks
from tidegate.layers.slice import Slice
from tidegate.layers.uplink import Uplink

Patch = pytest.MonkeyPatch
SEEDS_MAX = 300


def drained_means_released(patch: Patch) -> None:
    original = ExitPoint._deliver

    def deliver(self: ExitPoint, access_point: str, stream: Any, sequence: int, *rest: Any) -> Any:
        outputs = original(self, access_point, stream, sequence, *rest)
        if sequence in stream.waits_for:
            stream.waits_for[sequence].clear()
            outputs += self._acknowledge(access_point, stream, sequence)
        return outputs

    patch.setattr(ExitPoint, "_deliver", deliver)


def matchers_store_what_they_do_not_own(patch: Patch) -> None:
    original = Matcher._put

    def put(self: Matcher, subscription: int, version: int, packed: bytes | None) -> None:
        live = self._live
        self._live = (_Everything(self.name),)  # type: ignore[assignment]
        try:
            original(self, subscription, version, packed)
        finally:
            self._live = live

    patch.setattr(Matcher, "_put", put)


class _Everything:
    """A configuration that assigns everything to one Matcher."""

    def __init__(self, name: str) -> None:
        self._name = name

    def owner(self, subscription: int) -> str:
        return self._name


def an_abort_costs_nothing(patch: Patch) -> None:
    original = Matcher.on_strict

    def on_strict(self: Matcher, source: str, frame: Any, now_s: float) -> Any:
        if frame.keep.epoch != frame.epoch:
            self._move, self._ended, self._live = None, frame.epoch, (frame.keep,)
            return self._reply(Step.DROPPED, frame.epoch)
        return original(self, source, frame, now_s)

    patch.setattr(Matcher, "on_strict", on_strict)


def the_switch_waits_for_nobody_but_matchers(patch: Patch) -> None:
    original = reconfiguration._awaited

    def awaited(state: Any, *rest: Any) -> Any:
        return [each for each in original(state, *rest) if each[0] is not Step.PREPARED]

    patch.setattr(reconfiguration, "_awaited", awaited)


def a_removed_access_point_is_left_at_once(patch: Patch) -> None:
    def settle(self: Uplink) -> Any:
        return self._move_to(self._next, self._held) if self._next is not None else []

    patch.setattr(Uplink, "settle", settle)


def versions_are_acknowledged_in_any_order(patch: Patch) -> None:
    def settle(self: AccessPoint, subscription: int) -> Any:
        waiting = self._pending.get(subscription, [])
        done = [each for each in waiting if not each.needs]
        waiting[:] = [each for each in waiting if each.needs]
        if not waiting:
            self._pending.pop(subscription, None)
        acknowledged = [(each.source, ChangeOk(subscription, each.change.version)) for each in done]
        return acknowledged + self._report_ended()

    patch.setattr(AccessPoint, "_settle", settle)


def removals_leave_no_tombstones(patch: Patch) -> None:
    original = Matcher._put

    def put(self: Matcher, *change: Any) -> None:
        original(self, *change)
        self._tombstones.clear()

    patch.setattr(Matcher, "_put", put)


def nothing_is_held_for_the_old_exit_point(patch: Patch) -> None:
    patch.setattr(ExitPoint, "_is_held", lambda *_: False)


def a_death_waits_for_the_transaction_to_end(patch: Patch) -> None:
    original = Coordinator.recover

    def recover(self: Coordinator, wanted: Any) -> Any:
        return original(self, wanted) if self.state.transaction is None else []

    patch.setattr(Coordinator, "recover", recover)


def a_phase_goes_on_without_the_dead(patch: Patch) -> None:
    patch.setattr(reconfiguration, "lost", lambda _: frozenset())


def writes_go_to_two_epochs_only(patch: Patch) -> None:
    def transaction(new: Any, base: Any, live: Any, *rest: Any) -> Transaction:
        return Transaction(new, base, (base, new), *rest)

    patch.setattr(reconfiguration, "Transaction", transaction)


def a_hold_ends_with_the_next_transaction(patch: Patch) -> None:
    original = ExitPoint.on_prepare

    def on_prepare(self: ExitPoint, source: str, frame: Any, now_s: float) -> Any:
        if frame.transaction.epoch > self._prepared:
            self._holds.clear()
        return original(self, source, frame, now_s)

    patch.setattr(ExitPoint, "on_prepare", on_prepare)


def old_streams_go_item_by_item(patch: Patch) -> None:
    def begin_stream(self: ExitPoint, number: int) -> None:
        if number > self._number:
            self._number = number
            for stream in self._streams.values():
                stream.next_release = 1
                stream.entries = {key: entry for key, entry in stream.entries.items() if entry.is_complete}

    patch.setattr(ExitPoint, "_begin_stream", begin_stream)


def a_publish_is_acknowledged_when_it_is_accepted(patch: Patch) -> None:
    original = AccessPoint.on_submit

    def on_submit(self: AccessPoint, source: str, frame: Any, now_s: float) -> Any:
        accepted = [(source, SubmitAck(frame.batch.publisher, frame.batch.last))]
        return original(self, source, frame, now_s) + accepted

    patch.setattr(AccessPoint, "on_submit", on_submit)


def a_change_is_acknowledged_before_the_registry_has_it(patch: Patch) -> None:
    original = AccessPoint.on_change

    def on_change(self: AccessPoint, source: str, frame: Any, now_s: float) -> Any:
        outputs = original(self, source, frame, now_s)
        for pending in self._pending.get(frame.subscription, ()):
            pending.needs.discard(self._registry)
        return outputs

    patch.setattr(AccessPoint, "on_change", on_change)


def pending_changes_are_not_sent_to_new_owners(patch: Patch) -> None:
    def send(self: AccessPoint, before: Any) -> Any:
        outputs = []
        for subscription, waiting in list(self._pending.items()):
            for pending in waiting:
                pending.needs -= self._fenced
            outputs += self._settle(subscription)
        return outputs

    patch.setattr(AccessPoint, "_send_pending_to_new_owners", send)


def nobody_is_deaf_to_the_dead(patch: Patch) -> None:
    original = Slice.handle

    def handle(self: Slice, source: str, frame: Any, now_s: float) -> Any:
        fenced, self._fenced = self._fenced, self._fenced - {source}
        try:
            return original(self, source, frame, now_s)
        finally:
            self._fenced |= fenced

    patch.setattr(Slice, "handle", handle)


def what_comes_again_is_delivered_again(patch: Patch) -> None:
    patch.setattr(HighWaterMarks, "last", lambda *_: 0)
    patch.setattr(HighWaterMarks, "advance", lambda *_: None)


def markers_of_the_base_are_enough(patch: Patch) -> None:
    """Ignores that an Access Point that is leaving may still have clients."""
    original = Matcher._progress

    def progress(self: Matcher) -> Any:
        move = self._move
        if move is not None and move.markers >= set(move.transaction.base.access_points) - move.transaction.dead:
            move.markers |= {name for each in move.transaction.live for name in each.access_points}
        return original(self)

    patch.setattr(Matcher, "_progress", progress)


def stale_coordinators_are_obeyed(patch: Patch) -> None:
    original = Slice.handle

    def handle(self: Slice, source: str, frame: Any, now_s: float) -> Any:
        self._term = 0
        return original(self, source, frame, now_s)

    patch.setattr(Slice, "handle", handle)


def stale_coordinators_may_store(patch: Patch) -> None:
    import elastic_world

    def replace(self: Any, state: Any) -> bool:
        self.state = state
        return True

    patch.setattr(elastic_world.SimulatedStore, "replace", replace)


# The events that may happen in the runs, and the first seed to try. For rare coincidences this seed is known.
CRASHES = {"crashes": True}
HOLES: dict[Callable[[Patch], None], tuple[dict[str, bool], int]] = {
    drained_means_released: ({}, 184),
    matchers_store_what_they_do_not_own: ({}, 23),
    an_abort_costs_nothing: ({}, 427),
    the_switch_waits_for_nobody_but_matchers: ({}, 487),
    a_removed_access_point_is_left_at_once: ({}, 4),
    versions_are_acknowledged_in_any_order: (CRASHES, 246),
    removals_leave_no_tombstones: ({}, 10),
    nothing_is_held_for_the_old_exit_point: ({}, 2),
    a_death_waits_for_the_transaction_to_end: (CRASHES, 0),
    a_phase_goes_on_without_the_dead: (CRASHES | {"buffered": True}, 2093),
    writes_go_to_two_epochs_only: (CRASHES, 22),
    a_hold_ends_with_the_next_transaction: (CRASHES, 112),
    old_streams_go_item_by_item: (CRASHES, 56),
    a_publish_is_acknowledged_when_it_is_accepted: (CRASHES, 12),
    a_change_is_acknowledged_before_the_registry_has_it: (CRASHES, 90),
    pending_changes_are_not_sent_to_new_owners: (CRASHES, 134),
    nobody_is_deaf_to_the_dead: (CRASHES, 75),
    what_comes_again_is_delivered_again: (CRASHES, 13),
    stale_coordinators_may_store: (CRASHES, 143),
    stale_coordinators_are_obeyed: (CRASHES, 1946),
    markers_of_the_base_are_enough: (CRASHES, 5933),
}


# Without these two rules a slice receives a frame about something that it cannot know, and fails in this function.
FAILS_IN: dict[Callable[[Patch], None], tuple[type[Exception], str]] = {
    the_switch_waits_for_nobody_but_matchers: (ForeignFrame, "_entry"),
    writes_go_to_two_epochs_only: (ValueError, "choose"),
}


@pytest.mark.seeds
@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.__name__)
def test_a_hole_is_found(hole: Callable[[Patch], None], monkeypatch: Patch) -> None:
    hole(monkeypatch)
    possible, first = HOLES[hole]
    for seed in range(first, first + SEEDS_MAX):
        try:
            ElasticWorld(seed, **possible, rebinds=False, brokers=False).run()
        except AssertionError:
            return
        except (ForeignFrame, ValueError) as error:
            place = traceback.extract_tb(error.__traceback__)[-1].name
            if FAILS_IN.get(hole) != (type(error), place):
                raise
            return
    pytest.fail(f"{SEEDS_MAX} seeds do not need this rule")
