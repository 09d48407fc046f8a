"""What a registry promises, whichever store it keeps subscriptions in.

1. A change is durable when `change` returns.
2. Reads are linearizable: they find every change that has returned before they began.
3. Of each subscription the highest version is kept; a removal removes the entry. So a removed subscription could come
   back by an older change that arrives late. None does: a writer's changes are written in their order, and another
   writer sends a subscription's changes only after the first one has settled them or is fenced.
4. Whoever is fenced writes nothing any more: the fence is tested in the step that writes. A write is wholly before the
   fence, and every read after the fence finds it, or it is refused.

What may go wrong: the store fails (U721). A change that failed may have happened all the same; it is safe to send it
again, as long as nothing of the same writer is sent before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import FencedWriter, Unavailable
from tidegate.layers.control import Entry, Transaction
from tidegate.layers.frames import Change
from tidegate.layers.selector import owners
from tidegate.layers.subscription_table import CONNECTION_POINT_SHIFT

PART_ENTRIES_MAX: Final = 1000


class Registry(Protocol):
    """For one event loop; several processes may have the same one open."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def change(self, writer: str, changes: list[Change]) -> None:
        """All of them in one commit; FencedWriter, and none has happened, when the writer was declared dead."""

    async def fence(self, dead: frozenset[str]) -> None:
        """From its return on nothing that these writers send is taken, for good."""

    def read_share(self, transaction: Transaction, matcher: str) -> AsyncIterator[list[Entry]]:
        """What Matchers that are dead own in the base and this one owns in the new configuration, in parts of at most
        PART_ENTRIES_MAX. What changes meanwhile may come as it was before or after, or twice."""

    async def forget(self, connection_point: int) -> None:
        """Removes all subscriptions of a Connection Point that is dead: its sessions are gone."""

    async def subscriptions(self) -> int:
        """How many there are."""


def newest(changes: Iterable[Change]) -> list[Change]:
    """The one with the highest version of each subscription: it alone decides what is kept."""
    found: dict[int, Change] = {}
    for change in changes:
        known = found.get(change.subscription)
        if known is None or change.version > known.version:
            found[change.subscription] = change
    return list(found.values())


def ids_of(keys: bytes) -> NDArray[np.int64]:
    """Ids from their 8 bytes each, big-endian, as stores keep them."""
    return np.frombuffer(keys, ">i8").astype(np.int64)


def keys_of(ids: NDArray[np.int64]) -> list[bytes]:
    joined = ids.astype(">i8").tobytes()
    return [joined[at : at + 8] for at in range(0, len(joined), 8)]


def share_of(ids: NDArray[np.int64], transaction: Transaction, matcher: str) -> NDArray[np.int64]:
    """Those that dead Matchers own in the base and this one owns in the new configuration."""
    base, new = transaction.base, transaction.new
    dead = [place for place, name in enumerate(base.matchers) if name in transaction.dead]
    lost: NDArray[np.int64] = ids[np.isin(owners(ids, base), dead)]
    mine: NDArray[np.int64] = lost[owners(lost, new) == new.matchers.index(matcher)]
    return mine


def ids_at(ids: NDArray[np.int64], connection_point: int) -> NDArray[np.int64]:
    """Those that live at a Connection Point."""
    found: NDArray[np.int64] = ids[ids >> CONNECTION_POINT_SHIFT == connection_point]
    return found


async def in_parts(pages: AsyncIterator[list[Entry]]) -> AsyncIterator[list[Entry]]:
    """The same entries, in parts that are full but for the last; none when there are none."""
    part: list[Entry] = []
    async for page in pages:
        part += page
        while len(part) >= PART_ENTRIES_MAX:
            yield part[:PART_ENTRIES_MAX]
            part = part[PART_ENTRIES_MAX:]
    if part:
        yield part


def registry_failed(what: str) -> Unavailable:
    return Unavailable("U721", f"the registry has failed: {what}", "nothing was acknowledged; see to its store")


def fenced(writer: str) -> FencedWriter:
    return FencedWriter(
        "U720", f"{writer!r} was declared dead, and its changes are refused", "start it again under another name"
    )
