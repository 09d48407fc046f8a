"""Coordinator: drives one transaction after another through its phases, and replaces what has died.

There is one at a time: whoever stores a state with the highest term. It decides nothing that is not stored first, so
that its successor can go on from there. All that it decides stands in `reconfiguration`; here is who has answered.

What may go wrong here: it is slow or cut off while another has taken over. Then storing fails, and it says no more.
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
    """Where the state is kept for a successor."""

    def load(self) -> State: ...

    def replace(self, state: State) -> bool:
        """Stores it, unless one with a higher term is stored already: then False, and nothing has happened."""


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
        """Begins a term: what its predecessor was about to do goes on. It may not have told those who joined last; to
        the others what they are told is nothing new."""
        state = self._store.load()
        outputs = self._enter(msgspec.structs.replace(state, term=state.term + 1)) + self._bury()
        return self._tell_joined(self._state.connection_points) + outputs

    def change(self, wanted: Configuration, *, is_buffered: bool = False) -> Outputs:
        """Begins to scale or replace; `wanted` names the slices, its epoch does not matter."""
        return self._enter(reconfiguration.begin(self._state, wanted, is_buffered=is_buffered))

    def abort(self) -> Outputs:
        return self._enter(reconfiguration.abort(self._state))

    def on_death(self, names: Collection[str]) -> Outputs:
        """Declares slices dead; what they leave open is for `recover`."""
        state = reconfiguration.declare_dead(self._state, frozenset(names))
        if state == self._state or self.is_deposed:
            return []
        return self._enter(state) + self._bury()

    def recover(self, wanted: Configuration) -> Outputs:
        """Begins to replace the dead; `wanted` has none of them."""
        return self._enter(reconfiguration.recover(self._state, wanted))

    def on_reply(self, source: str, frame: Reply, now_s: float) -> Outputs:
        transaction = self._state.transaction
        if self.is_deposed or transaction is None or frame.epoch != transaction.epoch or source in self._state.dead:
            return []
        self._replies.setdefault(frame.step, {})[source] = frame.last
        return self._go_on()

    def on_joined(self, connection_point: str) -> Outputs:
        """A new Connection Point learns what the last decided configuration is, and takes part in what is under way."""
        outputs = self._enter(reconfiguration.join(self._state, connection_point))
        return self._tell_joined({connection_point}) + outputs

    def _tell_joined(self, connection_points: Collection[str]) -> Outputs:
        """To be sent before the commands of what is under way, which is newer."""
        state = self._state
        if self.is_deposed or not state.current.slices:
            return []
        here = Transaction(state.current, state.current, (state.current,), state.dead)
        return [(name, Switch(state.term, here)) for name in sorted(connection_points)]

    def _bury(self) -> Outputs:
        """Dead Connection Points are part of no configuration: whoever waits for them is told at once."""
        state = self._state
        dead = frozenset(name for name in state.dead if is_connection_point(name))
        if self.is_deposed or not dead:
            return []
        told = {name for each in state.live for name in each.access_points + each.exit_points} - state.dead
        return [(name, Fence(state.term, state.current.epoch, dead)) for name in sorted(told)]

    def _go_on(self) -> Outputs:
        following = reconfiguration.advance(self._state, self._replies, self._registry)
        return self._enter(following) if following is not None else []

    def _enter(self, state: State) -> Outputs:
        """Stores a state, and then does what it says. A phase that needs nobody is left at once."""
        if self.is_deposed or not self._store.replace(state):
            self.is_deposed = True
            log.warning("%s is no coordinator any more", self.name)
            return []
        before, self._state = self._state, state
        self._replies = {}
        outputs: Outputs = [*reconfiguration.retired(before, state)]
        outputs += reconfiguration.commands(state, self._registry)
        return outputs + self._go_on()
