"""The interface between a persistent query and its transports: its requests and the broker's messages in any protocol.

A transport opens links. A link keeps order: indications that the broker sent before it answered a check are read before
that answer. So an answer with a number above the last one read proves a loss, and nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from tidegate.client.control import NO_HINTS, Hints
from tidegate.errors import Overloaded

Row: TypeAlias = Any
"""A map from variables to terms, as in SPARQL's JSON; True or False for an ASK; a notification for a filter."""


@dataclass(frozen=True)
class Opened:
    """The first message of a link. Without a result, the indications missed since the given sequence follow."""

    subscription: str
    sequence: int
    result: list[Row] | None = None
    hints: Hints = NO_HINTS


@dataclass(frozen=True)
class Indicated:
    """A change in the result, with its number. It includes `merged` further changes."""

    sequence: int
    added: list[Row]
    removed: list[Row] = field(default_factory=list)
    merged: int = 0
    spread_s: float | None = None


@dataclass(frozen=True)
class Checked:
    """The answer to the check with this number: the sequence of the last indication if the protocol has it, else the
    current result, to compare."""

    check: int
    sequence: int | None = None
    result: list[Row] | None = None
    hints: Hints = NO_HINTS


@dataclass(frozen=True)
class Refused:
    """The broker is overloaded and refuses the check with this number."""

    check: int
    error: Overloaded


Heard: TypeAlias = Indicated | Checked | Refused


class PersistentLink(Protocol):
    """An open query. One task calls `read`, which raises Unavailable if the link is lost; other errors are final."""

    opened: Opened

    def ask(self, check: int) -> None: ...
    async def read(self) -> Heard: ...
    def close(self, *, is_final: bool) -> None: ...


class PersistentTransport(Protocol):
    """Opens links. `is_resumable` is true if opening another link recovers what was lost."""

    is_resumable: bool

    async def open(self, subscription: str, sequence: int) -> PersistentLink:
        """Resumes a subscription after an indication. Begins a new one if `subscription` is empty or the broker has
        forgotten it."""
        ...
