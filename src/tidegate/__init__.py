"""Tidegate: an information broker for the Internet of Things that stays calm when everyone talks at once.

    publishers ─► Connection Point ─► Access Point ─► Matchers ─► Exit Point ─► Connection Point ─► subscribers

A notification is a set of typed attributes; a subscription is a filter on them. This package is the client and the
names that programs use; the broker's own parts need the extra `server`.
"""

from tidegate.client import Connection, Delivery, Subscription, SyncConnection, connect, connect_sync
from tidegate.errors import (
    BadInput,
    ConfigError,
    FilterError,
    NotAllowed,
    NotificationError,
    Overloaded,
    ProtocolError,
    TidegateError,
    Unavailable,
)
from tidegate.filters import Filter

__all__ = [
    "BadInput",
    "ConfigError",
    "Connection",
    "Delivery",
    "Filter",
    "FilterError",
    "NotAllowed",
    "NotificationError",
    "Overloaded",
    "ProtocolError",
    "Subscription",
    "SyncConnection",
    "TidegateError",
    "Unavailable",
    "connect",
    "connect_sync",
]
