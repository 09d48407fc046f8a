"""Matcher: finds the subscriptions in its share that each notification satisfies.

A Matcher answers every batch with one Partial to the Exit Point of the batch's publisher, even when nothing matches:
the Exit Point waits for all Matchers by name. A change of a subscription takes effect between two batches.

While the layers are reconfigured, subscriptions move. Once the markers of all Access Points have arrived, a Matcher has
every change that was written to it alone. It then sends the subscriptions that others own in the new configuration, a
part at a time, between batches. Meanwhile two Matchers may hold the same subscription; that does no harm, since the
Exit Point joins their answers as sets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import Overloaded
from tidegate.index import SubscriptionIndex
from tidegate.index.packing import pack
from tidegate.layers.control import (
    Buried,
    Entry,
    Marker,
    NextPart,
    Prepare,
    ReadShare,
    Share,
    Step,
    Strict,
    Transaction,
)
from tidegate.layers.frames import Change, ChangeOk, ChangeRefused, Outputs, Partial, Publish
from tidegate.layers.selector import Configuration, owners
from tidegate.layers.slice import Slice
from tidegate.layers.subscription_table import CONNECTION_POINT_SHIFT, connection_point_number, is_connection_point

MAINTAIN_EVERY: Final = 4096  # notifications between two checks whether the index needs a new plan
# Subscriptions that are sent or dropped in one step, which takes some milliseconds.
MOVED_AT_ONCE: Final = 256


@dataclass(frozen=True)
class MatcherStatistics:
    subscriptions: int
    notifications: int
    matches: int
    filters: int
    index_bytes: int
    index_plans: int
    entries_scanned: int
    entries_verified: int
    moved_in: int


@dataclass
class _Move:
    """A Matcher's part in a transaction: whose markers and shares have arrived, and what it still has to send."""

    transaction: Transaction
    markers: set[str] = field(default_factory=set)
    shares: set[str] = field(default_factory=set)
    has_begun: bool = False
    to_send: deque[tuple[str, NDArray[np.int64]]] = field(default_factory=deque)


class Matcher(Slice):
    """Guarantees: once ChangeOk for a subscription is sent, every later batch is matched against it. A change whose
    version is at or below the known one is a duplicate: it has no effect, and is acknowledged all the same."""

    def __init__(self, name: str, configuration: Configuration | None, registry: str = "") -> None:
        super().__init__(name)
        self._live: tuple[Configuration, ...] = (configuration,) if configuration is not None else ()
        self._registry = registry
        self._index = SubscriptionIndex()
        self._versions: dict[int, int] = {}
        # The packed filters as they arrived, to send to other Matchers without packing them again. Kept only in a
        # cluster, where subscriptions move often and must move fast.
        self._filters: dict[int, bytes] = {}
        # Versions of subscriptions that were removed during a transaction, so that a late share cannot bring them back.
        self._tombstones: dict[int, int] = {}
        # Numbers of dead Connection Points. A share or a slow Access Point may still bring their subscriptions, which
        # are ignored.
        self._buried: set[int] = set()
        self._move: _Move | None = None
        self._strict: Strict | None = None
        self._to_drop: NDArray[np.int64] = np.empty(0, np.int64)
        self._ended = 0
        self._notifications = 0
        self._matches = 0
        self._moved_in = 0
        self._next_maintenance = MAINTAIN_EVERY

    # Notifications.

    def on_publish(self, source: str, frame: Publish, now_s: float) -> Outputs:
        batch = frame.batch
        offsets, ids = self._index.match_batch(batch)
        self._notifications += len(batch)
        self._matches += len(ids)
        if self._notifications >= self._next_maintenance and not self._index.maintain():
            self._next_maintenance = self._notifications + MAINTAIN_EVERY
        partial = Partial(frame.access_point, frame.stream, frame.epoch, frame.sequence, self.name, offsets, ids)
        return [(frame.exit_point, partial)]

    # Subscriptions.

    def on_change(self, source: str, frame: Change, now_s: float) -> Outputs:
        try:
            self._put(frame.subscription, frame.version, frame.filter)
        except Overloaded as error:
            return [(source, ChangeRefused(frame.subscription, frame.version, error))]
        return [(source, ChangeOk(frame.subscription, frame.version))]

    def _put(self, subscription: int, version: int, packed: bytes | None) -> None:
        """Stores a subscription that this Matcher owns in some live configuration. It drops one that it no longer owns:
        the new owner has a newer version."""
        known = self._versions.get(subscription) or self._tombstones.get(subscription, 0)
        if version <= known or subscription >> CONNECTION_POINT_SHIFT in self._buried:
            return
        is_mine = any(configuration.owner(subscription) == self.name for configuration in self._live)
        if packed is not None and is_mine:
            self._index.add_packed(np.array([subscription], np.int64), packed)
            self._versions[subscription] = version
            if self._registry:
                self._filters[subscription] = packed
            self._tombstones.pop(subscription, None)
            return
        if self._versions.pop(subscription, 0):
            self._filters.pop(subscription, None)
            self._index.remove(subscription)
        if is_mine and self._move is not None:
            self._tombstones[subscription] = version

    def _put_many(self, entries: list[Entry]) -> None:
        """Stores the entries of a share as `_put` does, with one insertion into the index for all of them."""
        versions, tombstones = self._versions, self._tombstones
        newer = [
            entry
            for entry in entries
            if entry.version > (versions.get(entry.subscription) or tombstones.get(entry.subscription, 0))
            and entry.subscription >> CONNECTION_POINT_SHIFT not in self._buried
        ]
        ids = np.array([entry.subscription for entry in newer], np.int64)
        is_mine = np.zeros(len(ids), bool)
        for configuration in self._live:
            if self.name in configuration.matchers:
                is_mine |= owners(ids, configuration) == configuration.matchers.index(self.name)
        mine = [entry for entry, mine in zip(newer, is_mine.tolist(), strict=True) if mine]
        self._index.add_packed(ids[is_mine], b"".join([entry.filter for entry in mine]))
        versions.update((entry.subscription, entry.version) for entry in mine)
        if self._registry:
            self._filters.update((entry.subscription, entry.filter) for entry in mine)
        for entry in mine:
            tombstones.pop(entry.subscription, None)

    def on_buried(self, source: str, frame: Buried, now_s: float) -> Outputs:
        self._bury({connection_point_number(frame.connection_point)})
        return []

    def _bury(self, numbers: set[int]) -> None:
        if numbers <= self._buried:
            return
        self._buried |= numbers
        ids = np.fromiter(self._versions, np.int64, len(self._versions))
        gone = ids[np.isin(ids >> CONNECTION_POINT_SHIFT, list(numbers))]
        self._index.remove_many(gone)
        for subscription in gone.tolist():
            del self._versions[subscription]
            self._filters.pop(subscription, None)

    # Reconfiguration.

    def on_prepare(self, source: str, frame: Prepare, now_s: float) -> Outputs:
        self._adopt(frame.transaction)
        return self._progress()

    def on_marker(self, source: str, frame: Marker, now_s: float) -> Outputs:
        self._adopt(frame.transaction)
        if self._move is None or self._move.transaction.epoch != frame.transaction.epoch:
            return []
        self._move.markers.add(source)
        return self._progress()

    def on_share(self, source: str, frame: Share, now_s: float) -> Outputs:
        self._adopt(frame.transaction)
        if self._move is None or self._move.transaction.epoch != frame.transaction.epoch:
            return []
        self._put_many(frame.entries)
        self._moved_in += len(frame.entries)
        if frame.is_last:
            self._move.shares.add(source)
        return self._progress()

    def on_next_part(self, source: str, frame: NextPart, now_s: float) -> Outputs:
        """Sends or drops the next part of the subscriptions that move."""
        if self._move is not None and self._move.transaction.epoch == frame.epoch and self._move.to_send:
            return self._send_some(self._move)
        if self._strict is not None and self._strict.epoch == frame.epoch:
            return self._drop_some(self._strict)
        return []

    def on_strict(self, source: str, frame: Strict, now_s: float) -> Outputs:
        if self._move is not None and self._move.transaction.epoch > frame.epoch:
            return []  # a later transaction has superseded this one, and its marker arrived first
        if self._ended < frame.epoch:
            self._ended = frame.epoch
            self._live = (frame.keep,)
            self._move = None
            self._tombstones.clear()
            self._strict = frame
            ids = np.fromiter(self._versions, np.int64, len(self._versions))
            matchers = frame.keep.matchers
            mine = matchers.index(self.name) if self.name in matchers else -1
            self._to_drop = ids[owners(ids, frame.keep) != mine]
            return self._drop_some(frame)
        return [] if self._strict is not None else self._reply(Step.DROPPED, frame.epoch)

    def statistics(self) -> MatcherStatistics:
        index = self._index.statistics()
        return MatcherStatistics(
            subscriptions=len(self._versions),
            notifications=self._notifications,
            matches=self._matches,
            filters=index.filters,
            index_bytes=index.bytes,
            index_plans=index.plans,
            entries_scanned=index.scanned,
            entries_verified=index.verified,
            moved_in=self._moved_in,
        )

    def subscriptions(self) -> Iterable[int]:
        """Returns the ids of the subscriptions that this Matcher holds."""
        return self._versions.keys()

    def _adopt(self, transaction: Transaction) -> None:
        """Begins a transaction. The first news of it may come from the coordinator, from an Access Point's marker or
        with a share."""
        if transaction.epoch <= self._ended:
            return
        if self._move is not None and transaction.epoch <= self._move.transaction.epoch:
            return
        self._move = _Move(transaction)
        self._strict = None
        self._live = transaction.live
        self._fenced |= transaction.dead
        self._bury({connection_point_number(name) for name in transaction.dead if is_connection_point(name)})

    def _progress(self) -> Outputs:
        """Begins to send shares once every Access Point has sent its marker. Reports READY once the shares of all
        others have arrived."""
        move = self._move
        if move is None:
            return []
        transaction = move.transaction
        outputs: Outputs = []
        writers = {name for configuration in transaction.live for name in configuration.access_points}
        if not move.has_begun and move.markers >= writers - transaction.dead:
            move.has_begun = True
            outputs += self._begin_to_share(move)
        if self._is_ready(move):
            outputs += self._reply(Step.READY, transaction.epoch)
        return outputs

    def _begin_to_share(self, move: _Move) -> Outputs:
        """Sends each Matcher of the new configuration the subscriptions that it takes over from this one. A share may
        be empty: the receiver waits for one from every Matcher of the base. Shares of dead Matchers come from the
        registry."""
        new, base = move.transaction.new, move.transaction.base
        outputs: Outputs = []
        if self.name in base.matchers:
            ids = np.fromiter(self._versions, np.int64, len(self._versions))
            ids = ids[owners(ids, base) == base.matchers.index(self.name)]
            owner = owners(ids, new)
            for place, name in enumerate(new.matchers):
                if name != self.name:
                    move.to_send.append((name, ids[owner == place]))
            outputs += self._send_some(move)
        if self.name in new.matchers and self._lost(move):
            outputs.append((self._registry, ReadShare(move.transaction)))
        return outputs

    def _send_some(self, move: _Move) -> Outputs:
        """Sends the next part of the shares. It skips subscriptions that were removed since: their new owner got that
        change too."""
        if not move.to_send:
            return []
        name, ids = move.to_send.popleft()
        some, rest = ids[:MOVED_AT_ONCE].tolist(), ids[MOVED_AT_ONCE:]
        entries = [
            Entry(subscription, version, self._filters.get(subscription) or pack(self._index.filter_of(subscription)))
            for subscription in some
            if (version := self._versions.get(subscription))
        ]
        if len(rest):
            move.to_send.appendleft((name, rest))
        outputs: Outputs = [(name, Share(move.transaction, entries, is_last=not len(rest)))]
        if move.to_send:
            outputs.append((self.name, NextPart(move.transaction.epoch)))
        return outputs

    def _drop_some(self, strict: Strict) -> Outputs:
        some, self._to_drop = self._to_drop[:MOVED_AT_ONCE], self._to_drop[MOVED_AT_ONCE:]
        gone = [subscription for subscription in some.tolist() if self._versions.pop(subscription, 0)]
        for subscription in gone:
            self._filters.pop(subscription, None)
        self._index.remove_many(np.array(gone, np.int64))
        if len(self._to_drop):
            return [(self.name, NextPart(strict.epoch))]
        self._strict = None
        return self._reply(Step.DROPPED, strict.epoch)

    def _lost(self, move: _Move) -> bool:
        return not move.transaction.dead.isdisjoint(move.transaction.base.matchers)

    def _is_ready(self, move: _Move) -> bool:
        """Reports whether all shares for this Matcher have arrived. It need not have finished sending its own."""
        transaction = move.transaction
        if self.name not in transaction.new.matchers or not move.has_begun:
            return False
        expected = set(transaction.base.matchers) - transaction.dead - {self.name}
        if self._lost(move):
            expected.add(self._registry)
        return move.shares >= expected
