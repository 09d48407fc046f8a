"""Exit Point: the partial answers of all Matchers for a notification meet here, and it leaves once, in order.

Per Access Point there is one stream of batches. A batch is complete when its body and the Partial of every Matcher of
its epoch are in; it is released in the order of the stream. The answers are joined by union, so a subscription that
two Matchers hold at once (as happens while a layer scales) is still served once. A batch is acknowledged to the
Access Point when every Connection Point that got some of it has put it into its outboxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tidegate.layers.batch import Batch
from tidegate.layers.frames import Ack, Body, Deliver, DeliverAck, Outputs, Partial
from tidegate.layers.selector import Configuration
from tidegate.layers.subscription_table import CONNECTION_POINT_SHIFT, connection_point_name

Matches = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class ExitPointStatistics:
    released_batches: int
    incomplete_batches: int
    unacknowledged_batches: int


@dataclass(slots=True)
class _Entry:
    """A batch on its way to completeness."""

    batch: Batch | None = None
    partials: dict[str, Matches] = field(default_factory=dict)


@dataclass(slots=True)
class _Stream:
    """What one Access Point sends. `next_release` is the lowest sequence that is not released."""

    next_release: int = 1
    entries: dict[int, _Entry] = field(default_factory=dict)


class ExitPoint:
    """Guarantees: batches of one Access Point leave in its order, each once, each with the union of the Matchers'
    answers. Its tables are bounded by the Access Points' windows."""

    def __init__(self, name: str, configuration: Configuration) -> None:
        self.name = name
        self._matchers = frozenset(configuration.matchers)
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._waits_for: dict[tuple[int, str, int], set[str]] = {}
        self._released = 0

    def on_body(self, source: str, frame: Body, now_s: float) -> Outputs:
        self._entry(frame).batch = frame.batch
        return self._release(frame.stream, frame.access_point)

    def on_partial(self, source: str, frame: Partial, now_s: float) -> Outputs:
        self._entry(frame).partials[frame.matcher] = (frame.offsets, frame.ids)
        return self._release(frame.stream, frame.access_point)

    def on_deliver_ack(self, source: str, frame: DeliverAck, now_s: float) -> Outputs:
        key = (frame.stream, frame.access_point, frame.sequence)
        waits_for = self._waits_for[key]
        waits_for.discard(source)
        return [] if waits_for else self._acknowledge(key)

    def statistics(self) -> ExitPointStatistics:
        incomplete = sum(len(stream.entries) for stream in self._streams.values())
        return ExitPointStatistics(self._released, incomplete, len(self._waits_for))

    def _entry(self, frame: Body | Partial) -> _Entry:
        key = (frame.stream, frame.access_point)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream()
        assert frame.sequence >= stream.next_release, (frame.sequence, stream.next_release)
        entry = stream.entries.get(frame.sequence)
        if entry is None:
            entry = stream.entries[frame.sequence] = _Entry()
        return entry

    def _release(self, stream_epoch: int, access_point: str) -> Outputs:
        stream = self._streams[stream_epoch, access_point]
        outputs: Outputs = []
        while (entry := stream.entries.get(stream.next_release)) is not None:
            if entry.batch is None or entry.partials.keys() != self._matchers:
                break
            sequence = stream.next_release
            del stream.entries[sequence]
            stream.next_release += 1
            self._released += 1
            outputs += self._deliver((stream_epoch, access_point, sequence), entry.batch, union(entry.partials))
        return outputs

    def _deliver(self, key: tuple[int, str, int], batch: Batch, matches: Matches) -> Outputs:
        stream, access_point, sequence = key
        outputs: Outputs = [
            (name, Deliver(access_point, stream, sequence, batch, offsets, ids))
            for name, (offsets, ids) in by_connection_point(*matches)
        ]
        self._waits_for[key] = {str(name) for name, _ in outputs}
        return outputs or self._acknowledge(key)

    def _acknowledge(self, key: tuple[int, str, int]) -> Outputs:
        del self._waits_for[key]
        stream, access_point, sequence = key
        return [(access_point, Ack(stream, sequence))]


def union(partials: dict[str, Matches]) -> Matches:
    """The matches of all Matchers, each subscription once a notification."""
    if len(partials) == 1:
        return next(iter(partials.values()))
    places = np.concatenate([_places(offsets) for offsets, _ in partials.values()])
    ids = np.concatenate([ids for _, ids in partials.values()])
    order = np.lexsort((ids, places))
    places, ids = places[order], ids[order]
    is_new = np.ones(len(ids), bool)
    is_new[1:] = (places[1:] != places[:-1]) | (ids[1:] != ids[:-1])
    count = len(next(iter(partials.values()))[0]) - 1
    return _offsets(places[is_new], count), ids[is_new]


def by_connection_point(offsets: NDArray[np.int64], ids: NDArray[np.int64]) -> Iterator[tuple[str, Matches]]:
    """The matches of each Connection Point, which the id of a subscription names."""
    if not len(ids):
        return
    lowest = int(np.minimum.reduce(ids)) >> CONNECTION_POINT_SHIFT
    if lowest == int(np.maximum.reduce(ids)) >> CONNECTION_POINT_SHIFT:
        yield connection_point_name(lowest), (offsets, ids)
        return
    numbers, places = ids >> CONNECTION_POINT_SHIFT, _places(offsets)
    for number in np.unique(numbers).tolist():
        mine = numbers == number
        yield connection_point_name(number), (_offsets(places[mine], len(offsets) - 1), ids[mine])


def _places(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each match the notification it belongs to."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _offsets(places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The inverse of `_places`, for sorted places of `count` notifications."""
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(places, minlength=count), out=offsets[1:])
    return offsets
