"""Covers: which numbers of a publisher a physical queue has, as a few intervals that exist as long as the queue.

A publisher numbers what it sends. A number inside its cover was stored before, so sending it again is a duplicate. This
holds after any pause, restart or change of the clock. A cover is nearly always one interval, so it costs the same for
ten notifications as for ten million.

There are two kinds of statements. A *put* of a device states exactly its own numbers; neighbours merge. A *feed* states
more: "everything of this publisher that matches this filter, from `since` on, is in the queue". The queue point may
state that because every stream reaches it in the publisher's order (decision 023). The statement holds for its filter
only, so the key of a cover starts with a digest of the filter.

Each of P physical queues receives every P-th number of a publisher. Covers count in *places*, number // P, so that
neighbours in a physical queue are neighbours in its covers.

What may go wrong: a cover has more than INTERVALS_MAX intervals, or a physical queue more than PUBLISHERS_MAX covers.
Then the shortest interval, or the least recently used cover, is forgotten, and a later duplicate from it is stored
twice. A number that was not stored is never treated as a duplicate. For devices with such sparse numbers, the queue
also remembers the identities of single messages: those that started an interval, for `deduplication_s`.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

INTERVALS_MAX: Final = 32
# Covers in each physical queue. A cover takes about 300 bytes of memory.
PUBLISHERS_MAX: Final = 100_000
# Filters of a queue, including former ones, that each physical queue remembers for the covers that were made under
# them.
FILTERS_MAX: Final = 8

TAG_BYTES: Final = 8
PUBLISHER_BYTES: Final = 16
_PUT: Final = bytes(TAG_BYTES)
_PUT_IN_GROUP: Final = _PUT[:-1] + b"\x01"

# Sorted bounds of disjoint intervals: first, last, first, last, …
Bounds = list[int]


class Run(NamedTuple):
    """Entries of one publisher that are adjacent in a batch, from index `start` on, at ascending `places`. Storing them
    covers `low` to `high`. A feed names its `filter`. `matches` maps the tags of former filters to which of the entries
    they match."""

    key: bytes
    start: int
    places: Sequence[int]
    low: int
    high: int
    filter: str = ""
    matches: dict[bytes, list[bool]] = {}  # noqa: RUF012 - never changed

    @property
    def tag(self) -> bytes:
        return self.key[:TAG_BYTES]

    @property
    def publisher(self) -> bytes:
        return self.key[TAG_BYTES:]


class FormerFilter(Exception):
    """Some entries lie in the cover of another filter of their queue, so they were stored only if that filter matches
    them. The caller evaluates that filter and tries again; nothing has been stored yet in their physical queue."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@functools.lru_cache(maxsize=65_536)
def put_key(device: str, is_grouped: bool) -> bytes:
    """Returns the key of the cover for messages that are put for a device. Messages of a group have a cover of their
    own, which counts plain numbers: their group, and not their number, determines the physical queue."""
    return (_PUT_IN_GROUP if is_grouped else _PUT) + publisher_digest(device)


@functools.lru_cache(maxsize=65_536)
def feed_key(filter_text: str, publisher: str) -> bytes:
    return filter_tag(filter_text) + publisher_digest(publisher)


@functools.lru_cache(maxsize=1024)
def filter_tag(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=TAG_BYTES).digest()


def publisher_digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=PUBLISHER_BYTES).digest()


def is_covered(bounds: Bounds, place: int) -> bool:
    at = bisect_right(bounds, place)
    return at % 2 == 1 or (at > 0 and bounds[at - 1] == place)


def covered(bounds: Bounds | None, places: Sequence[int]) -> list[bool] | None:
    """Returns which of the ascending places lie in a cover; None if none does, as for nearly all new messages."""
    if not bounds or places[0] > bounds[-1] or places[-1] < bounds[0]:
        return None
    return [is_covered(bounds, place) for place in places]


def touches(bounds: Bounds, low: int, high: int) -> bool:
    """Returns whether an interval overlaps or touches one of a cover."""
    if bounds[-2] <= low <= bounds[-1] + 1:
        return True
    return any(bounds[at] <= high + 1 and low <= bounds[at + 1] + 1 for at in range(0, len(bounds), 2))


def extend(bounds: Bounds, low: int, high: int) -> None:
    """Adds an interval to a cover. It nearly always continues the last interval, which is the fast case."""
    if len(bounds) == 2 and bounds[0] <= low <= bounds[1] + 1:
        bounds[1] = max(bounds[1], high)
    else:
        bounds[:] = extended(bounds, low, high)


def extended(bounds: Bounds, low: int, high: int) -> Bounds:
    """Returns the cover with one more interval. Intervals that overlap or touch become one. If there are too many, the
    shortest is removed, and the lowest among equals, but never the one that has just grown."""
    merged: Bounds = []
    is_in = False
    for at in range(0, len(bounds), 2):
        first, last = bounds[at], bounds[at + 1]
        if last < low - 1:
            merged += (first, last)
        elif first > high + 1:
            if not is_in:
                merged += (low, high)
                is_in = True
            merged += (first, last)
        else:
            low, high = min(low, first), max(high, last)
    if not is_in:
        merged += (low, high)
    if len(merged) > 2 * INTERVALS_MAX:
        starts = [at for at in range(0, len(merged), 2) if merged[at] != low]
        at = min(starts, key=lambda start: merged[start + 1] - merged[start])
        del merged[at : at + 2]
    return merged
