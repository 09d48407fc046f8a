"""Matcher: which of its share of the subscriptions does each notification satisfy?

It answers every batch with one Partial to the Exit Point of the batch's publisher, also when nothing matches: the
Exit Point waits for all Matchers by name. A change of a subscription takes effect between two batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tidegate.errors import Overloaded
from tidegate.layers.frames import Change, ChangeOk, ChangeRefused, Outputs, Partial, Publish
from tidegate.layers.index import SubscriptionIndex
from tidegate.layers.selector import Configuration

LOOK_EVERY: Final = 4096  # notifications, after whether the index should be planned anew


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


class Matcher:
    """Guarantees: once ChangeOk for a subscription is sent, every later batch is matched against it. A change with a
    version that is not higher than the one it knows changes nothing and is acknowledged all the same."""

    def __init__(self, name: str, configuration: Configuration) -> None:
        self.name = name
        self._configuration = configuration
        self._index = SubscriptionIndex()
        self._versions: dict[int, int] = {}
        self._notifications = 0
        self._matches = 0
        self._next_look = LOOK_EVERY

    def on_change(self, source: str, frame: Change, now_s: float) -> Outputs:
        subscription = frame.subscription
        known = self._versions.get(subscription, 0)
        if frame.version > known:
            if frame.filter is not None:
                try:
                    self._index.add(subscription, frame.filter)
                except Overloaded as error:
                    return [(source, ChangeRefused(subscription, frame.version, error))]
                self._versions[subscription] = frame.version
            elif known:
                del self._versions[subscription]
                self._index.remove(subscription)
        return [(source, ChangeOk(subscription, frame.version))]

    def on_publish(self, source: str, frame: Publish, now_s: float) -> Outputs:
        batch = frame.batch
        offsets, ids = self._index.match_batch(batch)
        self._notifications += len(batch)
        self._matches += len(ids)
        if self._notifications >= self._next_look and not self._index.maintain():
            self._next_look = self._notifications + LOOK_EVERY
        partial = Partial(frame.access_point, frame.stream, frame.epoch, frame.sequence, self.name, offsets, ids)
        return [(self._configuration.exit_point(batch.publisher), partial)]

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
        )
