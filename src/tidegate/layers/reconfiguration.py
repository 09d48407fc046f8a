"""Reconfiguration: how the layers get from one configuration to the next, as pure functions of a stored state.

| phase | commands | ends when |
|---|---|---|
| FENCE | registry, Exit Points, Connection Points: ignore the dead | all do; now others may stop waiting for them |
| PREPARE | all slices of live epochs: the transaction | new Matchers have their subscriptions, all others know it |
| SWITCH | Access, Exit and Connection Points: the new epoch | all have switched. Entering it is the decision |
| DRAIN | Exit Points: the last sequences of the old epoch | the Connection Points have acknowledged all of it |
| DROP | Matchers: drop what moved. Exit Points: release held batches | done, and all Connection Points have moved |
| END | Access Points: write to the new owners only | no other write is pending; then unneeded slices retire |

Only a recovery begins with FENCE. It skips DRAIN, because unacknowledged batches are sent again in a new stream. An
abort goes from PREPARE to DROP and keeps the base: first the copies must be dropped, then double writes must stop. A
death at any moment begins a recovery, which supersedes the current transaction: its replies may never come.

The state is stored before commands are sent, by compare-and-set with the state stored before. A coordinator that loses
the race is deposed. A new coordinator sends the commands of the present phase again.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from tidegate.layers.control import (
    Command,
    Drain,
    End,
    Fence,
    Go,
    Prepare,
    Release,
    Retire,
    Step,
    Strict,
    Switch,
    Transaction,
)
from tidegate.layers.selector import Configuration

# For each step of the present phase, the slices that reported it, and the sequences that came with SWITCHED.
Replies: TypeAlias = dict[Step, dict[str, dict[str, int]]]
Commands: TypeAlias = list[tuple[str, Command]]


class Phase(StrEnum):
    FENCE = "fence"
    PREPARE = "prepare"
    SWITCH = "switch"
    DRAIN = "drain"
    DROP = "drop"
    END = "end"


class State(msgspec.Struct, frozen=True):
    """The stored state of a coordinator. `current` is the last decided configuration, `live` are all that may still be
    in use, and `epochs` is the highest epoch ever used, aborted ones included. `keep` is the configuration that stays
    when the transaction ends. `connection_points` are those that have joined and are not declared dead."""

    term: int
    current: Configuration
    live: tuple[Configuration, ...]
    epochs: int
    dead: frozenset[str] = frozenset()
    transaction: Transaction | None = None
    phase: Phase | None = None
    keep: Configuration | None = None
    last: dict[str, dict[str, int]] = {}
    connection_points: frozenset[str] = frozenset()

    @classmethod
    def first(cls, configuration: Configuration | None = None) -> State:
        """Returns the initial state. Without a configuration it has no slices: the first transaction adds them all."""
        live = (configuration,) if configuration is not None else ()
        current = configuration or Configuration(0, (), (), (), stream=0)
        return cls(0, current, live, current.epoch)


def begin(state: State, wanted: Configuration, *, is_buffered: bool = False) -> State:
    """Begins a change to the wanted slices. No other transaction may be active."""
    assert state.transaction is None
    return _start(state, wanted, is_recovery=False, is_buffered=is_buffered)


def abort(state: State) -> State:
    """Aborts the transaction and returns to the base. Possible only before the decision, see `is_abortable`."""
    assert is_abortable(state)
    return msgspec.structs.replace(state, phase=Phase.DROP, keep=state.current)


def is_abortable(state: State) -> bool:
    """Reports whether the transaction can be aborted. The first one cannot: there is no configuration to return to."""
    if state.transaction is None or state.transaction.is_recovery or not state.current.slices:
        return False
    return state.phase is Phase.PREPARE


def join(state: State, connection_point: str) -> State:
    return msgspec.structs.replace(state, connection_points=state.connection_points | {connection_point})


def declare_dead(state: State, names: frozenset[str]) -> State:
    return msgspec.structs.replace(state, dead=state.dead | names, connection_points=state.connection_points - names)


def lost(state: State) -> frozenset[str]:
    """Returns the dead slices of live configurations that no transaction replaces yet."""
    involved = frozenset[str]().union(*(configuration.slices for configuration in state.live))
    known = state.transaction.dead if state.transaction is not None else frozenset()
    return (state.dead & involved) - known


def recover(state: State, wanted: Configuration) -> State:
    """Begins a recovery from the last decided configuration to the wanted slices, none of them dead. It supersedes the
    current transaction."""
    return _start(state, wanted, is_recovery=True, is_buffered=False)


def _start(state: State, wanted: Configuration, *, is_recovery: bool, is_buffered: bool) -> State:
    epoch = state.epochs + 1
    stream = epoch if is_recovery else state.current.stream
    new = Configuration(epoch, wanted.access_points, wanted.matchers, wanted.exit_points, stream)
    assert not new.slices & state.dead, (new, state.dead)
    live = (*state.live, new)
    return msgspec.structs.replace(
        state,
        epochs=epoch,
        live=live,
        transaction=Transaction(new, state.current, live, state.dead, is_recovery, is_buffered),
        phase=Phase.FENCE if is_recovery else Phase.PREPARE,
        keep=new,
        last={},
    )


class _Parties:
    """The slices and Connection Points that take part in the transaction and are not declared dead."""

    def __init__(self, state: State) -> None:
        assert state.transaction is not None
        live, dead = state.transaction.live, state.dead
        self.access_points = {name for each in live for name in each.access_points} - dead
        self.matchers = {name for each in live for name in each.matchers} - dead
        self.exit_points = {name for each in live for name in each.exit_points} - dead
        self.connection_points = set(state.connection_points)


def commands(state: State, registry: str) -> Commands:
    """Returns the commands of the present phase. They are idempotent, so a new coordinator may send them again."""
    transaction, term = state.transaction, state.term
    if transaction is None or state.keep is None:
        return []
    who, epoch, keep = _Parties(state), transaction.epoch, state.keep
    is_kept = keep.epoch == epoch
    match state.phase:
        case Phase.FENCE:
            to = who.exit_points | who.connection_points | ({registry} if registry else set())
            return [(name, Fence(term, epoch, transaction.dead)) for name in sorted(to)]
        case Phase.PREPARE:
            to = who.exit_points | who.matchers | who.access_points
            return [(name, Prepare(term, transaction)) for name in sorted(to)]
        case Phase.SWITCH:
            to = who.exit_points | who.access_points | who.connection_points
            return [(name, Switch(term, transaction)) for name in sorted(to)]
        case Phase.DRAIN:
            drain = Drain(term, epoch, transaction.base.stream, state.last)
            return [(name, drain) for name in sorted(who.exit_points)]
        case Phase.DROP:
            told: Commands = [(name, Release(term, epoch, keep.epoch)) for name in sorted(who.exit_points)]
            told += [(name, Strict(term, epoch, keep)) for name in sorted(who.matchers)]
            if is_kept:
                told += [(name, Go(term, epoch)) for name in sorted(who.access_points)]
                told += [(name, Switch(term, transaction)) for name in sorted(who.connection_points)]
            return told
        case _:
            return [(name, End(term, epoch, keep, state.dead)) for name in sorted(who.access_points)]


def advance(state: State, replies: Replies, registry: str) -> State | None:
    """Returns the state of the next phase, or None while a reply is pending. After the death of a participant only a
    recovery may continue: new batches must not overtake those that the dead slice has not drained."""
    if state.transaction is None or lost(state):
        return None
    awaited = _awaited(state, registry)
    if any(names - replies.get(step, {}).keys() for step, names in awaited):
        return None
    return _following(state, replies)


def _awaited(state: State, registry: str) -> list[tuple[Step, set[str]]]:
    """Returns the steps that the present phase waits for, and the slices that must report each."""
    assert state.transaction is not None
    assert state.keep is not None
    transaction, who = state.transaction, _Parties(state)
    match state.phase:
        case Phase.FENCE:
            return [(Step.FENCED, who.exit_points | who.connection_points | ({registry} if registry else set()))]
        case Phase.PREPARE:
            return [
                (Step.READY, set(transaction.new.matchers)),
                (Step.PREPARED, who.access_points | who.exit_points),
            ]
        case Phase.SWITCH:
            return [(Step.SWITCHED, who.access_points | who.exit_points)]
        case Phase.DRAIN:
            return [(Step.DRAINED, set(transaction.base.exit_points) & who.exit_points)]
        case Phase.DROP:
            awaited = [(Step.DROPPED, who.matchers), (Step.RELEASED, who.exit_points)]
            if state.keep.epoch == transaction.epoch:
                awaited += [(Step.REHOMED, who.connection_points), (Step.GONE, who.access_points)]
            return awaited
        case _:
            return [(Step.ENDED, who.access_points)]


def _following(state: State, replies: Replies) -> State:
    assert state.transaction is not None
    assert state.keep is not None
    replace = msgspec.structs.replace
    match state.phase:
        case Phase.FENCE:
            return replace(state, phase=Phase.PREPARE)
        case Phase.PREPARE:
            return replace(state, phase=Phase.SWITCH, current=state.transaction.new)
        case Phase.SWITCH:
            after = Phase.DROP if state.transaction.is_recovery else Phase.DRAIN
            return replace(state, phase=after, last=replies[Step.SWITCHED])
        case Phase.DRAIN:
            return replace(state, phase=Phase.DROP)
        case Phase.DROP:
            return replace(state, phase=Phase.END, live=(state.keep,))
        case _:
            return replace(state, transaction=None, phase=None, keep=None, current=state.keep, live=(state.keep,))


def retired(before: State, after: State) -> Commands:
    """Returns a Retire for each slice that is not needed after the end of a transaction."""
    if before.transaction is None or after.transaction is not None:
        return []
    took_part = frozenset[str]().union(*(configuration.slices for configuration in before.transaction.live))
    return [(name, Retire(after.term)) for name in sorted(took_part - after.current.slices - after.dead)]
