"""Exit Point: joins the partial answers of all Matchers for a notification, and delivers it once, in order.

Each Access Point sends one stream of batches. A batch is complete when its body and the Partial of every Matcher of its
epoch have arrived; batches are released in the order of the stream. The answers are joined by union, so a subscription
that two Matchers hold at once (as happens while a layer scales) is still served once. A batch is acknowledged to the
Access Point when every Connection Point that received some of it has put it into its outboxes.

What may go wrong here: a slice dies before it sends its part (a new stream replaces the whole old one, and the Access
Points send unacknowledged batches again); a publisher moves here from another Exit Point (its batches are held back
until the other Exit Point has drained); a Connection Point dies (its acknowledgements are no longer awaited).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import ForeignFrame
from tidegate.layers.batch import Batch
from tidegate.layers.control import Drain, Fence, Prepare, Release, Step, Switch
from tidegate.layers.frames import Ack, Body, Deliver, DeliverAck, Outputs, Partial, Refused
from tidegate.layers.selector import Configuration
from tidegate.layers.slice import Slice
from tidegate.layers.subscription_table import CONNECTION_POINT_SHIFT, connection_point_name

Matches = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class ExitPointStatistics:
    released_batches: int
    notifications: int
    incomplete_batches: int
    unacknowledged_batches: int


@dataclass(slots=True)
class _Entry:
    """A batch that waits for its body or for Partials."""

    configuration: Configuration
    batch: Batch | None = None
    entrance: str = ""
    partials: dict[str, Matches] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.batch is not None and len(self.partials) == len(self.configuration.matchers)


@dataclass(slots=True)
class _Stream:
    """The batches of one Access Point. `next_release` is the lowest sequence that is not released. For each released
    batch, `waits_for` has the Connection Points that have not acknowledged it, and `refused` what queues did not
    store."""

    next_release: int = 1
    entries: dict[int, _Entry] = field(default_factory=dict)
    waits_for: dict[int, set[str]] = field(default_factory=dict)
    refused: dict[int, list[Refused]] = field(default_factory=dict)

    def is_acknowledged(self, sequence: int) -> bool:
        return self.next_release > sequence and all(waiting > sequence for waiting in self.waits_for)


class ExitPoint(Slice):
    """Guarantees: batches of one Access Point leave in its order, each once, each with the union of the Matchers'
    answers. Its tables are bounded by the Access Points' windows."""

    def __init__(self, name: str, configuration: Configuration | None) -> None:
        super().__init__(name)
        self._configurations = {configuration.epoch: configuration} if configuration is not None else {}
        self._number = configuration.stream if configuration is not None else 0
        self._streams: dict[str, _Stream] = {}
        self._prepared = 0
        # For each epoch that is being introduced, its base. Batches of publishers that belong to another Exit Point
        # in the base are held back until that one has drained, so that they cannot overtake older batches.
        self._holds: dict[int, Configuration] = {}
        self._draining: Drain | None = None
        self._released = 0
        self._notifications = 0

    # Notifications.

    def on_body(self, source: str, frame: Body, now_s: float) -> Outputs:
        entry = self._entry(frame)
        if entry is None:
            return []
        _check_lengths(frame.batch, *entry.partials.values())
        entry.batch, entry.entrance = frame.batch, frame.entrance
        return self._release(frame.access_point)

    def on_partial(self, source: str, frame: Partial, now_s: float) -> Outputs:
        entry = self._entry(frame)
        if entry is None:
            return []
        if frame.matcher not in entry.configuration.matchers:
            raise ForeignFrame(f"{frame.matcher} is not a Matcher of epoch {frame.epoch}")
        matches = (frame.offsets, frame.ids)
        _check_lengths(entry.batch, matches, *entry.partials.values())
        entry.partials[frame.matcher] = matches
        return self._release(frame.access_point)

    def on_deliver_ack(self, source: str, frame: DeliverAck, now_s: float) -> Outputs:
        stream = self._streams.get(frame.access_point)
        if frame.stream != self._number or stream is None or frame.sequence not in stream.waits_for:
            return []
        stream.waits_for[frame.sequence].discard(source)
        if frame.refused:
            stream.refused.setdefault(frame.sequence, []).extend(frame.refused)
        return self._acknowledge(frame.access_point, stream, frame.sequence)

    # Reconfiguration.

    def on_fence(self, source: str, frame: Fence, now_s: float) -> Outputs:
        return self._forget(frame.dead) + super().on_fence(source, frame, now_s)

    def on_prepare(self, source: str, frame: Prepare, now_s: float) -> Outputs:
        transaction = frame.transaction
        outputs = self._forget(transaction.dead)
        if transaction.epoch > self._prepared:
            self._prepared = transaction.epoch
            self._configurations |= {each.epoch: each for each in transaction.live}
            if transaction.base.exit_points and not transaction.is_recovery:
                self._holds[transaction.epoch] = transaction.base
        return outputs + self._reply(Step.PREPARED, transaction.epoch)

    def on_switch(self, source: str, frame: Switch, now_s: float) -> Outputs:
        self._begin_stream(frame.transaction.new.stream)
        return self._reply(Step.SWITCHED, frame.transaction.epoch)

    def on_drain(self, source: str, frame: Drain, now_s: float) -> Outputs:
        self._draining = frame
        return self._report_drained()

    def on_release(self, source: str, frame: Release, now_s: float) -> Outputs:
        """Releases the batches that were held back for an older epoch. Forgets the configurations of older epochs too:
        all their batches have been delivered."""
        self._holds = {epoch: base for epoch, base in self._holds.items() if epoch > frame.keep}
        self._configurations = {epoch: each for epoch, each in self._configurations.items() if epoch >= frame.keep}
        outputs: Outputs = []
        for access_point in list(self._streams):
            outputs += self._release(access_point)
        return outputs + self._reply(Step.RELEASED, frame.epoch)

    def statistics(self) -> ExitPointStatistics:
        streams = self._streams.values()
        incomplete = sum(len(stream.entries) for stream in streams)
        unacknowledged = sum(len(stream.waits_for) for stream in streams)
        return ExitPointStatistics(self._released, self._notifications, incomplete, unacknowledged)

    # Inside.

    def _entry(self, frame: Body | Partial) -> _Entry | None:
        if frame.access_point in self._fenced:
            return None
        if frame.stream != self._number:
            if frame.stream < self._number:
                return None
            self._begin_stream(frame.stream)
        stream = self._streams.get(frame.access_point)
        if stream is None:
            stream = self._streams[frame.access_point] = _Stream()
        if frame.sequence < stream.next_release:
            raise ForeignFrame(f"batch {frame.sequence} of {frame.access_point} is a duplicate")
        entry = stream.entries.get(frame.sequence)
        if entry is None:
            configuration = self._configurations.get(frame.epoch)
            if configuration is None:
                raise ForeignFrame(f"{self.name} does not know epoch {frame.epoch}")
            entry = stream.entries[frame.sequence] = _Entry(configuration)
        return entry

    def _begin_stream(self, number: int) -> None:
        """Drops older streams as a whole, never batch by batch: the Access Points send everything that is not
        acknowledged again, in order."""
        if number > self._number:
            self._number = number
            self._streams.clear()

    def _release(self, access_point: str) -> Outputs:
        stream = self._streams[access_point]
        outputs: Outputs = []
        while (entry := stream.entries.get(stream.next_release)) is not None:
            if not entry.is_complete or self._is_held(entry):
                break
            sequence = stream.next_release
            del stream.entries[sequence]
            stream.next_release += 1
            assert entry.batch is not None
            self._released += 1
            self._notifications += len(entry.batch)
            outputs += self._deliver(access_point, stream, sequence, entry)
        return outputs

    def _is_held(self, entry: _Entry) -> bool:
        if not self._holds:
            return False
        base = self._holds.get(entry.configuration.epoch)
        assert entry.batch is not None
        return base is not None and base.exit_point(entry.batch.publisher) != self.name

    def _deliver(self, access_point: str, stream: _Stream, sequence: int, entry: _Entry) -> Outputs:
        batch, entrance, epoch = entry.batch, entry.entrance, entry.configuration.epoch
        assert batch is not None
        outputs: Outputs = []
        waits_for = stream.waits_for[sequence] = set()
        for name, (offsets, ids) in by_connection_point(*union(entry.partials)):
            if name not in self._fenced:
                waits_for.add(name)
                outputs.append(
                    (name, Deliver(access_point, self._number, sequence, batch, entrance, epoch, offsets, ids))
                )
        return outputs or self._acknowledge(access_point, stream, sequence)

    def _acknowledge(self, access_point: str, stream: _Stream, sequence: int) -> Outputs:
        if stream.waits_for[sequence]:
            return []
        del stream.waits_for[sequence]
        refused = stream.refused.pop(sequence, [])
        return [(access_point, Ack(self._number, sequence, refused)), *self._report_drained()]

    def _forget(self, dead: frozenset[str]) -> Outputs:
        """Stops waiting for acknowledgements from dead Connection Points, and ignores dead Access Points from now
        on."""
        new = dead - self._fenced
        self._fenced |= dead
        outputs: Outputs = []
        if new:
            for access_point, stream in self._streams.items():
                for sequence in [each for each, names in stream.waits_for.items() if names & new]:
                    stream.waits_for[sequence] -= new
                    outputs += self._acknowledge(access_point, stream, sequence)
        return outputs

    def _report_drained(self) -> Outputs:
        draining = self._draining
        if draining is None or draining.stream != self._number:
            return []
        for access_point, last in draining.last.items():
            stream = self._streams.get(access_point)
            sequence = last.get(self.name, 0)
            if sequence and (stream is None or not stream.is_acknowledged(sequence)):
                return []
        self._draining = None
        return self._reply(Step.DRAINED, draining.epoch)


def _check_lengths(batch: Batch | None, *partials: Matches) -> None:
    """Raises ForeignFrame unless the body and all Partials of a batch have the same number of notifications."""
    counts = {len(offsets) - 1 for offsets, _ids in partials} | ({len(batch)} if batch is not None else set())
    if len(counts) > 1:
        raise ForeignFrame(f"the parts of a batch have different numbers of notifications: {sorted(counts)}")


def union(partials: dict[str, Matches]) -> Matches:
    """Joins the matches of all Matchers, with each subscription once per notification."""
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
    """Splits matches by Connection Point, which is part of every subscription id."""
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
    """Returns, for each match, the index of its notification."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _offsets(places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Inverts `_places`, for sorted places of `count` notifications."""
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(places, minlength=count), out=offsets[1:])
    return offsets
