"""Registry: the promises of a registry, whichever store it keeps subscriptions in.

1. A change is durable when `change` returns.
2. Reads are linearizable: they find every change that returned before they began.
3. The highest version of each subscription is kept; a removal removes the entry. An older change that arrives late
   could therefore bring a removed subscription back. This does not happen: a writer's changes are written in order, and
   another writer sends a subscription's changes only after the first one has settled them or is fenced.
4. A fenced writer writes nothing any more: the fence is tested in the step that writes. Either a write is wholly before
   the fence, and every read after the fence finds it, or it is refused.

What may go wrong: the store fails (U721). A change that failed may still have been stored. It is safe to send it again,
as long as no other change of the same writer is sent before it.
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
    """A store of subscriptions, for use by one event loop. Several processes may open the same registry."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def change(self, writer: str, changes: list[Change]) -> None:
        """Stores all changes in one commit. Raises FencedWriter, and stores none, if the writer was declared dead."""

    async def fence(self, dead: frozenset[str]) -> None:
        """Fences writers: once this returns, nothing that they send is stored, permanently."""

    def read_share(self, transaction: Transaction, matcher: str) -> AsyncIterator[list[Entry]]:
        """Yields the subscriptions that dead Matchers own in the base and this one owns in the new configuration, in
        parts of at most PART_ENTRIES_MAX. A subscription that changes meanwhile may appear in its old or new form, or
        twice."""

    async def forget(self, connection_point: int) -> None:
        """Removes all subscriptions of a dead Connection Point, whose sessions have ended with it."""

    async def subscriptions(self) -> int:
        """Returns the number of subscriptions."""


def newest(changes: Iterable[Change]) -> list[Change]:
    """Returns the change with the highest version of each subscription: it alone decides what is kept."""
    found: dict[int, Change] = {}
    for change in changes:
        known = found.get(change.subscription)
        if known is None or change.version > known.version:
            found[change.subscription] = change
    return list(found.values())


def ids_of(keys: bytes) -> NDArray[np.int64]:
    """Decodes ids from 8 big-endian bytes each, as stores keep them."""
    return np.frombuffer(keys, ">i8").astype(np.int64)


def keys_of(ids: NDArray[np.int64]) -> list[bytes]:
    joined = ids.astype(">i8").tobytes()
    return [joined[at : at + 8] for at in range(0, len(joined), 8)]


def share_of(ids: NDArray[np.int64], transaction: Transaction, matcher: str) -> NDArray[np.int64]:
    """Returns the ids that dead Matchers own in the base and this one owns in the new configuration."""
    base, new = transaction.base, transaction.new
    dead = [place for place, name in enumerate(base.matchers) if name in transaction.dead]
    lost: NDArray[np.int64] = ids[np.isin(owners(ids, base), dead)]
    mine: NDArray[np.int64] = lost[owners(lost, new) == new.matchers.index(matcher)]
    return mine


def ids_at(ids: NDArray[np.int64], connection_point: int) -> NDArray[np.int64]:
    """Returns the ids that belong to a Connection Point."""
    found: NDArray[np.int64] = ids[ids >> CONNECTION_POINT_SHIFT == connection_point]
    return found


async def in_parts(pages: AsyncIterator[list[Entry]]) -> AsyncIterator[list[Entry]]:
    """Yields the same entries in parts of PART_ENTRIES_MAX; only the last part may be smaller."""
    part: list[Entry] = []
    async for page in pages:
        part += page
        while len(part) >= PART_ENTRIES_MAX:
            yield part[:PART_ENTRIES_MAX]
            part = part[PART_ENTRIES_MAX:]
    if part:
        yield part


def registry_failed(what: str) -> Unavailable:
    return Unavailable("U721", f"the registry has failed: {what}", "nothing was acknowledged; check its store")


def fenced(writer: str) -> FencedWriter:
    return FencedWriter(
        "U720", f"{writer!r} was declared dead, and its changes are refused", "start it again under another name"
    )
