"""The connections of one listener: how many are open, how many may be, and how many were refused or cut.

A connection takes a place when the operating system accepts it, before any TLS handshake, and gives the place back when
its socket is lost. A few surplus places exist above `connections_max`: a connection in one of them receives an error
that explains the refusal. Further connections are closed at once, without an error.

What may go wrong: a place that is never given back reduces the listener's capacity permanently. So a place must belong
to an object that is notified when the connection is lost.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tidegate.errors import Overloaded

SURPLUS_MAX: Final = 16
RETRY_AFTER_S: Final = 5.0


class ConnectionStatistics(msgspec.Struct, frozen=True):
    """`cut` counts connections that the broker closed because the peer sent or read nothing for too long."""

    open: int
    refused: int
    handshakes_failed: int
    cut: int


class TooManyConnections(Overloaded):
    """Refuses a connection because `connections_max` are open."""

    status = 503


class Connections:
    """Hands out at most `connections_max` places, and `SURPLUS_MAX` more for connections that are being refused."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self.open = 0
        self.refused = 0
        self.handshakes_failed = 0
        self.cut = 0

    def take(self) -> Place | None:
        """Returns a place for a new connection, or None if the connection must be closed at once."""
        if self.open >= self.connections_max:
            self.refused += 1
            if self.open >= self.connections_max + SURPLUS_MAX:
                return None
        self.open += 1
        return Place(self, is_surplus=self.is_above_limit)

    @property
    def is_above_limit(self) -> bool:
        return self.open > self.connections_max

    def refusal(self) -> TooManyConnections:
        return TooManyConnections(
            "L601",
            f"{self.connections_max} connections are open",
            "retry later, or raise connections_max",
            retry_after_s=RETRY_AFTER_S,
        )

    def statistics(self) -> ConnectionStatistics:
        return ConnectionStatistics(self.open, self.refused, self.handshakes_failed, self.cut)


class Place:
    """The place of one connection."""

    def __init__(self, connections: Connections, *, is_surplus: bool) -> None:
        self._connections = connections
        self._is_surplus = is_surplus
        self._is_taken = True

    @property
    def is_surplus(self) -> bool:
        """Whether to refuse the connection: it arrived above the limit, and the listener is still above it."""
        self._is_surplus = self._is_surplus and self._connections.is_above_limit
        return self._is_surplus

    def count_cut(self) -> None:
        self._connections.cut += 1

    def give_back(self) -> None:
        """Frees the place. Calling it again does nothing."""
        if self._is_taken:
            self._is_taken = False
            self._connections.open -= 1
