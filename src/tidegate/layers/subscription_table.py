"""The subscriptions of one Connection Point as arrays, so that a kernel can find the outbox of each match.

A subscription's id gives its location: 15 bits Connection Point, 16 bits generation, 32 bits place in this table. When
a subscription has ended, its place is reused with the next generation. A notification that was still in flight to the
old subscription finds another id there, and is not delivered.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

# The columns of the table.
ID: Final = 0
OUTBOX: Final = 1
CLIENT_ID: Final = 2

CONNECTION_POINT_SHIFT: Final = 48
CONNECTION_POINTS_MAX: Final = 1 << 15
_GENERATION_SHIFT: Final = 32
_GENERATIONS: Final = 1 << 16
_PLACE_MASK: Final = (1 << _GENERATION_SHIFT) - 1
_FREE: Final = -1
_CONNECTION_POINT: Final = "connection-point-"


def connection_point_name(number: int) -> str:
    return f"{_CONNECTION_POINT}{number}"


def is_connection_point(name: str) -> bool:
    digits = name.removeprefix(_CONNECTION_POINT)
    return digits != name and digits.isascii() and digits.isdecimal() and int(digits) < CONNECTION_POINTS_MAX


def connection_point_number(name: str) -> int:
    return int(name.removeprefix(_CONNECTION_POINT))


class SubscriptionTable:
    """`rows[place]` holds the id of the live subscription there (or -1), its outbox, and the number that its client
    gave it. They share a row so that a match reads one cache line. The table grows by doubling and never shrinks."""

    def __init__(self, connection_point: int) -> None:
        assert 0 < connection_point < CONNECTION_POINTS_MAX, connection_point
        self._connection_point = connection_point
        self.rows: NDArray[np.int64] = np.full((64, 3), _FREE, np.int64)
        self._generations: NDArray[np.uint16] = np.zeros(64, np.uint16)
        self._free = list(range(63, -1, -1))

    def add(self, outbox: int, client_id: int) -> int:
        """Takes a free place and returns the id of the subscription, which is live at once."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        generation = int(self._generations[place])
        subscription = self._connection_point << CONNECTION_POINT_SHIFT | generation << _GENERATION_SHIFT | place
        self.rows[place] = subscription, outbox, client_id
        return subscription

    def hide(self, subscription: int) -> None:
        """Stops deliveries to a subscription. Its place stays taken until the Matchers have removed it."""
        place = subscription & _PLACE_MASK
        assert self.rows[place, ID] == subscription
        self.rows[place, ID] = _FREE

    def free(self, subscription: int) -> None:
        place = subscription & _PLACE_MASK
        assert self.rows[place, ID] == _FREE
        self._generations[place] = (int(self._generations[place]) + 1) % _GENERATIONS
        self._free.append(place)

    def _grow(self) -> None:
        size = len(self.rows)
        self.rows = np.concatenate([self.rows, np.full((size, 3), _FREE, np.int64)])
        self._generations = np.concatenate([self._generations, np.zeros(size, np.uint16)])
        self._free = list(range(2 * size - 1, size - 1, -1))
