"""Selectors: which Matcher holds a subscription, which Exit Point joins a publisher's notifications.

They use rendezvous hashing: every slice draws a number for the key, and the highest wins. When a slice leaves or joins,
only the keys that it wins move (1/(n+1) of them when the n+1st joins). All slices compute the same answer from the
configuration alone. A configuration is immutable; its epoch is never used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from tidegate.layers.layer import Layer

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Configuration:
    """The slices that serve in an epoch. `stream` is the epoch of the last recovery. It numbers the streams of the
    Access Points, so that a batch from before a crash cannot be mistaken for one that is sent again."""

    epoch: int
    access_points: tuple[str, ...]
    matchers: tuple[str, ...]
    exit_points: tuple[str, ...]
    stream: int = 1

    @property
    def slices(self) -> frozenset[str]:
        return frozenset(self.access_points + self.matchers + self.exit_points)

    def of(self, layer: Layer) -> tuple[str, ...]:
        """Returns the slices of a layer."""
        names: tuple[str, ...] = getattr(self, layer.field)
        return names

    def owner(self, subscription: int) -> str:
        """Returns the Matcher that holds a subscription."""
        return choose(subscription, self.matchers)

    def exit_point(self, publisher: str) -> str:
        """Returns the Exit Point that keeps a publisher's order."""
        if len(self.exit_points) == 1:
            return self.exit_points[0]
        return choose_by_name(publisher, self.exit_points)


def choose(key: int, names: Sequence[str]) -> str:
    """Returns the winner for a key. Ties, which do not happen in practice, go to the greater name."""
    if len(names) == 1:
        return names[0]
    return max(names, key=lambda name: (_mix(key ^ _digest(name)), name))


def choose_by_name(name: str, names: Sequence[str]) -> str:
    return choose(_digest(name), names)


def owners(subscriptions: NDArray[np.int64], configuration: Configuration) -> NDArray[np.int64]:
    """Returns the index of the owner among the Matchers, for many subscriptions at once."""
    keys = subscriptions.view(np.uint64)
    best = np.zeros(len(keys), np.int64)
    if len(configuration.matchers) == 1:
        return best
    highest = np.zeros(len(keys), np.uint64)
    # By name, so that a tie goes to the greater name, as in `choose`.
    for place in sorted(range(len(configuration.matchers)), key=lambda place: configuration.matchers[place]):
        drawn = _mix_many(keys ^ np.uint64(_digest(configuration.matchers[place])))
        wins = drawn >= highest
        best[wins] = place
        highest[wins] = drawn[wins]
    return best


@lru_cache(maxsize=65_536)
def _digest(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    """Applies splitmix64's finaliser, so that neighbouring ids draw unrelated numbers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _mix_many(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
