"""Coordinator: drives one transaction after another through its phases, and replaces slices that have died.

One coordinator is active at a time: the one that stored the state with the highest term. It stores every decision
before it acts on it, so that its successor can continue from there. `reconfiguration` makes the decisions; this module
tracks which slices have replied.

What may go wrong here: the coordinator is slow or disconnected while another has taken over. Then storing its state
fails, and it sends no more commands.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

import msgspec

from tidegate.layers import reconfiguration
from tidegate.layers.control import Fence, Reply, Switch, Transaction
from tidegate.layers.frames import Outputs
from tidegate.layers.reconfiguration import Replies, State
from tidegate.layers.selector import Configuration
from tidegate.layers.subscription_table import is_connection_point

log = logging.getLogger(__name__)


class Store(Protocol):
    """Keeps the coordinator's state for a successor."""

    def load(self) -> State: ...

    def replace(self, state: State) -> bool:
        """Stores the state and returns True. Returns False, and stores nothing, if a newer coordinator has stored a
        state already."""


class Coordinator:
    def __init__(self, name: str, store: Store, registry: str) -> None:
        self.name = name
        self.is_deposed = False
        self._store = store
        self._registry = registry
        self._state = store.load()
        self._replies: Replies = {}

    @property
    def state(self) -> State:
        return self._state

    def take_over(self) -> Outputs:
        """Begins a term and continues the transaction of the predecessor. The predecessor may have died before it
        greeted the last Connection Points that joined, so all of them get the current configuration again."""
        state = self._store.load()
        outputs = self._enter(msgspec.structs.replace(state, term=state.term + 1)) + self._bury()
        return self._send_configuration(self._state.connection_points) + outputs

    def change(self, wanted: Configuration, *, is_buffered: bool = False) -> Outputs:
        """Begins a transaction that scales or replaces slices. `wanted` names the slices; its epoch is ignored."""
        return self._enter(reconfiguration.begin(self._state, wanted, is_buffered=is_buffered))

    def abort(self) -> Outputs:
        return self._enter(reconfiguration.abort(self._state))

    def on_death(self, names: Collection[str]) -> Outputs:
        """Declares slices dead. The caller must then call `recover` with a configuration that replaces them."""
        state = reconfiguration.declare_dead(self._state, frozenset(names))
        if state == self._state or self.is_deposed:
            return []
        return self._enter(state) + self._bury()

    def recover(self, wanted: Configuration) -> Outputs:
        """Begins a transaction that replaces the dead. `wanted` must contain none of them."""
        return self._enter(reconfiguration.recover(self._state, wanted))

    def on_reply(self, source: str, frame: Reply, now_s: float) -> Outputs:
        transaction = self._state.transaction
        if self.is_deposed or transaction is None or frame.epoch != transaction.epoch or source in self._state.dead:
            return []
        self._replies.setdefault(frame.step, {})[source] = frame.last
        return self._advance()

    def on_joined(self, connection_point: str) -> Outputs:
        """Sends a new Connection Point the last decided configuration, and includes it in the current transaction."""
        outputs = self._enter(reconfiguration.join(self._state, connection_point))
        return self._send_configuration({connection_point}) + outputs

    def _send_configuration(self, connection_points: Collection[str]) -> Outputs:
        """Sends Connection Points the last decided configuration. These frames must precede the commands of the current
        transaction, which is newer."""
        state = self._state
        if self.is_deposed or not state.current.slices:
            return []
        here = Transaction(state.current, state.current, (state.current,), state.dead)
        return [(name, Switch(state.term, here)) for name in sorted(connection_points)]

    def _bury(self) -> Outputs:
        """Tells Access Points and Exit Points to stop waiting for dead Connection Points. No configuration contains
        Connection Points, so their death needs no transaction."""
        state = self._state
        dead = frozenset(name for name in state.dead if is_connection_point(name))
        if self.is_deposed or not dead:
            return []
        told = {name for each in state.live for name in each.access_points + each.exit_points} - state.dead
        return [(name, Fence(state.term, state.current.epoch, dead)) for name in sorted(told)]

    def _advance(self) -> Outputs:
        following = reconfiguration.advance(self._state, self._replies, self._registry)
        return self._enter(following) if following is not None else []

    def _enter(self, state: State) -> Outputs:
        """Stores a state, then returns its commands. A phase that waits for no reply is left at once."""
        if self.is_deposed or not self._store.replace(state):
            self.is_deposed = True
            log.warning("%s is no longer the coordinator", self.name)
            return []
        before, self._state = self._state, state
        self._replies = {}
        outputs: Outputs = [*reconfiguration.retired(before, state)]
        outputs += reconfiguration.commands(state, self._registry)
        return outputs + self._advance()
