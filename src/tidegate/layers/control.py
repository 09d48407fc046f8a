"""Frames that reconfigure the layers: the coordinator's commands, the replies to them, and the subscriptions that move.

A transaction takes the layers from one configuration to the next while notifications flow. docs/elasticity.md explains
why each step is needed; `reconfiguration` defines the order of the phases.

    coordinator ─Fence─► registry, Exit Points, Connection Points        (after a death only)
                ─Prepare─► all slices   ─Marker─► Matchers ─Share─► Matchers
                ─Switch─► Access Points, Exit Points, Connection Points
                ─Drain─► Exit Points
                ─Release─► Exit Points  ─Strict─► Matchers  ─Go─► Access Points
                ─End─► Access Points    ─Retire─► slices that left the configuration

Commands are idempotent: a coordinator that takes over sends the commands of the present phase again.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tidegate.layers.frames import LayerFrame
from tidegate.layers.selector import Configuration


class Transaction(msgspec.Struct, frozen=True):
    """A step from `base`, the last decided configuration, to `new`. `live` are all configurations that may still be in
    use, the new one included; `dead` are all slices and Connection Points that were declared dead."""

    new: Configuration
    base: Configuration
    live: tuple[Configuration, ...]
    dead: frozenset[str]
    is_recovery: bool = False
    is_buffered: bool = False

    @property
    def epoch(self) -> int:
        return self.new.epoch


class Command(LayerFrame, msgspec.Struct, frozen=True):
    """A coordinator's command. `term` numbers the coordinators: a slice ignores commands from an older one."""

    term: int


class Fence(Command, frozen=True):
    """Tells the receiver to ignore frames from the dead permanently."""

    number = 11
    epoch: int
    dead: frozenset[str]


class Prepare(Command, frozen=True):
    """Announces a transaction: from here on, every change of a subscription goes to its owners in all live epochs."""

    number = 12
    transaction: Transaction


class Switch(Command, frozen=True):
    """Announces that the new configuration is decided: Access Points stamp batches with the new epoch."""

    number = 13
    transaction: Transaction


class Drain(Command, frozen=True):
    """Asks an Exit Point to report when all batches up to `last` are acknowledged. `last` has the last sequence of the
    old epoch by Access Point and Exit Point."""

    number = 14
    epoch: int
    stream: int
    last: dict[str, dict[str, int]]


class Release(Command, frozen=True):
    """Lets an Exit Point deliver the batches that it held back while an older epoch drained."""

    number = 15
    epoch: int
    keep: int


class Strict(Command, frozen=True):
    """Tells a Matcher to drop the subscriptions that it does not own in the configuration `keep`, and to store no
    others from now on."""

    number = 16
    epoch: int
    keep: Configuration


class Go(Command, frozen=True):
    """Tells an Access Point that the old epoch has drained: batches held back by a buffered switch may enter."""

    number = 17
    epoch: int


class End(Command, frozen=True):
    """Tells an Access Point to write changes only to the owners in the configuration `keep`."""

    number = 18
    epoch: int
    keep: Configuration
    dead: frozenset[str]


class Retire(Command, frozen=True):
    """Tells a slice's host that the slice has left the configuration. The host handles it, not the slice."""

    number = 19


class Step(StrEnum):
    """The step of a transaction that a slice reports as done."""

    FENCED = "fenced"
    PREPARED = "prepared"
    READY = "ready"
    SWITCHED = "switched"
    DRAINED = "drained"
    RELEASED = "released"
    DROPPED = "dropped"
    GONE = "gone"
    REHOMED = "rehomed"
    ENDED = "ended"


class Reply(LayerFrame, msgspec.Struct, frozen=True):
    """A slice's reply to a command. `last` is set with SWITCHED only: the last sequence that the Access Point sent to
    each Exit Point before it switched."""

    number = 20
    step: Step
    epoch: int
    last: dict[str, int]


class Marker(LayerFrame, msgspec.Struct, frozen=True):
    """From an Access Point to a Matcher, on the channel of its changes: every later change goes to all live owners."""

    number = 21
    transaction: Transaction


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A subscription that moves to another Matcher."""

    subscription: int
    version: int
    filter: bytes


class Share(LayerFrame, msgspec.Struct, frozen=True):
    """Some of the subscriptions that the receiver owns in the new configuration. `is_last` marks the sender's last."""

    number = 22
    transaction: Transaction
    entries: list[Entry]
    is_last: bool


class ReadShare(LayerFrame, msgspec.Struct, frozen=True):
    """Asks the registry for the subscriptions of dead Matchers that the sender owns in the new configuration."""

    number = 23
    transaction: Transaction


class NextPart(LayerFrame, msgspec.Struct, frozen=True):
    """A Matcher's reminder to itself that it has more subscriptions to send or to drop. Frames that arrived in between
    go first. It never leaves the process."""

    epoch: int


class Buried(LayerFrame, msgspec.Struct, frozen=True):
    """From an Access Point: a Connection Point is dead, so its subscriptions have ended. The frame follows all of that
    Connection Point's changes on the same channel."""

    number = 24
    connection_point: str


class Suspect(LayerFrame, msgspec.Struct, frozen=True):
    """Reports to the coordinator that these slices cannot be reached."""

    number = 25
    names: frozenset[str]
