"""What a persistent query asks of a broker and hears from it, whatever the protocol: the seam of its transports.

A transport makes links. On a link everything is in order: what was notified before a check was answered has been read
before that answer. So a number in an answer that is above the last one read is a loss, and nothing else is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from tidegate.client.control import NO_HINTS, Hints
from tidegate.errors import Overloaded

Row: TypeAlias = Any
"""Terms by their variables, as in SPARQL's JSON; True or False of an ASK; a notification, of a filter."""


@dataclass(frozen=True)
class Opened:
    """The first message of a link. Without a result, what was missed since the number that was given follows."""

    subscription: str
    sequence: int
    result: list[Row] | None = None
    hints: Hints = NO_HINTS


@dataclass(frozen=True)
class Indicated:
    """`merged` changes more than one are in it."""

    sequence: int
    added: list[Row]
    removed: list[Row] = field(default_factory=list)
    merged: int = 0
    spread_s: float | None = None


@dataclass(frozen=True)
class Checked:
    """The answer to the check of this number: the number of the last indication, where the protocol can tell it, or
    the present result, to compare."""

    check: int
    sequence: int | None = None
    result: list[Row] | None = None
    hints: Hints = NO_HINTS


@dataclass(frozen=True)
class Refused:
    """The broker has no time for the check of this number."""

    check: int
    error: Overloaded


Heard: TypeAlias = Indicated | Checked | Refused


class PersistentLink(Protocol):
    """`read` is called by one task. Unavailable when the link is lost; other errors are final."""

    opened: Opened

    def ask(self, check: int) -> None: ...
    async def read(self) -> Heard: ...
    def close(self, *, is_for_good: bool) -> None: ...


class PersistentTransport(Protocol):
    """`is_resumable` tells whether what was lost can be had again, by opening another link."""

    is_resumable: bool

    async def open(self, subscription: str, sequence: int) -> PersistentLink:
        """Goes on after an indication of a subscription, or begins one, where this is empty or forgotten."""
        ...
