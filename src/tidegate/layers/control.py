"""Frames that reconfigure the layers: commands of the coordinator, answers to them, and what moves between slices.

A transaction takes the layers from one configuration to the next while everything flows. docs/elasticity.md tells why
each step is there; the order of the phases stands in `reconfiguration`.

    coordinator ─Fence─► registry, Exit Points, Connection Points        (after a death only)
                ─Prepare─► all slices   ─Marker─► Matchers ─Share─► Matchers
                ─Switch─► Access Points, Exit Points, Connection Points
                ─Drain─► Exit Points
                ─Release─► Exit Points  ─Strict─► Matchers  ─Go─► Access Points
                ─End─► Access Points    ─Retire─► who is not needed any more

Commands are idempotent: a coordinator that takes over sends those of the present phase again.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from tidegate.layers.selector import Configuration


class Transaction(msgspec.Struct, frozen=True):
    """From `base`, the last decided configuration, to `new`. `live` are all configurations that may still be in use,
    the new one included; `dead` is everybody who was declared dead."""

    new: Configuration
    base: Configuration
    live: tuple[Configuration, ...]
    dead: frozenset[str]
    is_recovery: bool = False
    is_buffered: bool = False

    @property
    def epoch(self) -> int:
        return self.new.epoch


class Command(msgspec.Struct, frozen=True):
    """`term` numbers coordinators: a slice ignores those of an older one."""

    handler: ClassVar[str]
    term: int


class Fence(Command, frozen=True):
    """Ignore the dead, for good."""

    handler: ClassVar[str] = "on_fence"
    epoch: int
    dead: frozenset[str]


class Prepare(Command, frozen=True):
    """From here on every change of a subscription goes to its owners in all live epochs."""

    handler: ClassVar[str] = "on_prepare"
    transaction: Transaction


class Switch(Command, frozen=True):
    """The decision is taken: Access Points stamp the new epoch."""

    handler: ClassVar[str] = "on_switch"
    transaction: Transaction


class Drain(Command, frozen=True):
    """Tell when everything up to these sequences, by Access Point and Exit Point, is acknowledged."""

    handler: ClassVar[str] = "on_drain"
    epoch: int
    stream: int
    last: dict[str, dict[str, int]]


class Release(Command, frozen=True):
    """What was held back for an older epoch to drain may leave."""

    handler: ClassVar[str] = "on_release"
    epoch: int
    keep: int


class Strict(Command, frozen=True):
    """Drop what the configuration that is kept does not give you, and store nothing else from now on."""

    handler: ClassVar[str] = "on_strict"
    epoch: int
    keep: Configuration


class Go(Command, frozen=True):
    """The old epoch has drained: what a buffered switch has held back may enter."""

    handler: ClassVar[str] = "on_go"
    epoch: int


class End(Command, frozen=True):
    """Write to the owners in this configuration only."""

    handler: ClassVar[str] = "on_end"
    epoch: int
    keep: Configuration
    dead: frozenset[str]


class Retire(Command, frozen=True):
    """You are not needed any more. A host takes it, not a slice."""

    handler: ClassVar[str] = "on_retire"


class Step(StrEnum):
    """What a slice has done."""

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


class Reply(msgspec.Struct, frozen=True):
    """`last` goes with SWITCHED: the last sequence that went to each Exit Point before."""

    handler: ClassVar[str] = "on_reply"
    step: Step
    epoch: int
    last: dict[str, int]


class Marker(msgspec.Struct, frozen=True):
    """From an Access Point, on the channel that its changes take: what comes behind it is written to all owners."""

    handler: ClassVar[str] = "on_marker"
    transaction: Transaction


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A subscription that moves."""

    subscription: int
    version: int
    filter: bytes


class Share(msgspec.Struct, frozen=True):
    """Subscriptions that the receiver owns in the new configuration: a part of them, up to the last."""

    handler: ClassVar[str] = "on_share"
    transaction: Transaction
    entries: list[Entry]
    is_last: bool


class ReadShare(msgspec.Struct, frozen=True):
    """To the registry: what did dead Matchers own that is mine now?"""

    handler: ClassVar[str] = "on_read_share"
    transaction: Transaction


class GoOn(msgspec.Struct, frozen=True):
    """From a Matcher to itself: there is more to share or to drop, after what came meanwhile."""

    handler: ClassVar[str] = "on_go_on"
    epoch: int


class Buried(msgspec.Struct, frozen=True):
    """From an Access Point, behind all changes of it: a Connection Point is dead, and its subscriptions with it."""

    handler: ClassVar[str] = "on_buried"
    connection_point: str


class Suspect(msgspec.Struct, frozen=True):
    """To the coordinator: these cannot be reached."""

    handler: ClassVar[str] = "on_suspect"
    names: frozenset[str]
