"""A plain index: each filter is filed under one of its constraints, and only what is filed where a notification looks
is verified.

A filter with an equality is filed under each value of its most selective one; another is filed under the name of an
attribute that it needs; one that needs none (`*`, `!a`) is tried always. Identical filters share one record.
Invariant: a record is filed exactly where `_places` finds it for its filter, so removal finds it again, and a
notification that satisfies the filter looks into exactly one of these places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.filters import Filter, Operator

if TYPE_CHECKING:
    from tidegate.layers.batch import Batch


@dataclass(frozen=True)
class IndexStatistics:
    subscriptions: int
    records: int
    verified: int


@dataclass(slots=True, eq=False)
class _Record:
    """One filter and everyone who wants it."""

    filter: Filter
    ids: dict[int, None] = field(default_factory=dict)


_Records: TypeAlias = dict[_Record, None]


@dataclass(slots=True)
class _Attribute:
    """What is filed under one attribute: by value, and for any value."""

    by_value: dict[Any, _Records] = field(default_factory=dict)
    for_any: _Records = field(default_factory=dict)


class SubscriptionIndex:
    """`match` finds exactly the subscriptions whose `Filter.matches` says yes. One writer, no reader beside it."""

    def __init__(self) -> None:
        self._records: dict[Filter, _Record] = {}
        self._filter_of: dict[int, Filter] = {}
        self._attributes: dict[str, _Attribute] = {}
        self._always: _Records = {}
        self._verified = 0

    def __len__(self) -> int:
        return len(self._filter_of)

    def add(self, subscription: int, subscription_filter: Filter) -> None:
        """Adds a subscription, or gives a known one another filter."""
        if subscription in self._filter_of:
            self.remove(subscription)
        record = self._records.get(subscription_filter)
        if record is None:
            record = self._records[subscription_filter] = _Record(subscription_filter)
            for place in self._places(subscription_filter):
                place[record] = None
        record.ids[subscription] = None
        self._filter_of[subscription] = record.filter

    def remove(self, subscription: int) -> None:
        """KeyError when there is no such subscription."""
        record = self._records[self._filter_of.pop(subscription)]
        del record.ids[subscription]
        if not record.ids:
            del self._records[record.filter]
            for place in self._places(record.filter):
                del place[record]
            self._forget_empty(record.filter)

    def match(self, notifications: Iterable[Mapping[str, Any]]) -> list[list[int]]:
        """For each notification the ids of the subscriptions that it satisfies."""
        return [self._match_one(notification) for notification in notifications]

    def match_batch(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Notification i satisfies `ids[offsets[i]:offsets[i + 1]]`."""
        offsets = np.zeros(len(batch) + 1, np.int64)
        ids: list[int] = []
        for i, notification in enumerate(batch.notifications()):
            ids += self._match_one(notification)
            offsets[i + 1] = len(ids)
        return offsets, np.array(ids, np.int64)

    def statistics(self) -> IndexStatistics:
        return IndexStatistics(len(self._filter_of), len(self._records), self._verified)

    def _match_one(self, notification: Mapping[str, Any]) -> list[int]:
        attributes = self._attributes
        ids: list[int] = []
        self._verify(self._always, notification, ids)
        for name, value in notification.items():
            attribute = attributes.get(name)
            if attribute is not None:
                self._verify(attribute.for_any, notification, ids)
                self._verify(attribute.by_value.get(_exact(value), ()), notification, ids)
        return ids

    def _verify(self, candidates: Iterable[_Record], notification: Mapping[str, Any], ids: list[int]) -> None:
        for record in candidates:
            self._verified += 1
            if record.filter.matches(notification):
                ids += record.ids

    def _places(self, subscription_filter: Filter) -> Iterator[_Records]:
        """Where a filter is filed; makes the places that are not there."""
        chosen = _access_constraint(subscription_filter)
        if chosen is None:
            yield self._always
            return
        name, values = chosen
        attribute = self._attributes.setdefault(name, _Attribute())
        if not values:
            yield attribute.for_any
        for value in values:
            yield attribute.by_value.setdefault(value, {})

    def _forget_empty(self, subscription_filter: Filter) -> None:
        chosen = _access_constraint(subscription_filter)
        if chosen is None:
            return
        name, values = chosen
        attribute = self._attributes[name]
        for value in values:
            if not attribute.by_value[value]:
                del attribute.by_value[value]
        if not attribute.by_value and not attribute.for_any:
            del self._attributes[name]


def _access_constraint(subscription_filter: Filter) -> tuple[str, list[Any]] | None:
    """The attribute a filter is filed under, with the values if it is an equality; None when it needs no attribute."""
    equalities = [c for c in subscription_filter.constraints if c.operator is Operator.EQUAL]
    if equalities:
        chosen = min(equalities, key=lambda c: len(c.operands))
        return chosen.name, [_exact(value) for value in chosen.operands]
    for constraint in subscription_filter.constraints:
        if constraint.operator is not Operator.ABSENT:
            return constraint.name, []
    return None


def _exact(value: Any) -> Any:
    """A key for a value: Python finds True equal to 1, filters do not."""
    return ("boolean", value) if isinstance(value, bool) else value
