"""Tidegate: an information broker for the Internet of Things that stays calm when everyone talks at once.

    publishers ─► Connection Point ─► Access Point ─► Matchers ─► Exit Point ─► Connection Point ─► subscribers

A notification is a set of typed attributes; a subscription is a filter on them. This package exports the client and
the types that programs use. Running a broker needs the extra `server`.
"""

from tidegate.client import (
    Change,
    Connection,
    Delivery,
    DurableSubscription,
    Message,
    NumberedPublisher,
    PersistentQuery,
    Queue,
    Subscription,
    SyncConnection,
    SyncQueue,
    connect,
    connect_sync,
)
from tidegate.errors import (
    BadInput,
    ConfigError,
    ConflictingQueue,
    FilterError,
    NoSuchQueue,
    NotAllowed,
    NotificationError,
    Overloaded,
    ProtocolError,
    QueueError,
    TidegateError,
    Unavailable,
)
from tidegate.filters import Filter
from tidegate.messages import NewMessage

__all__ = [
    "BadInput",
    "Change",
    "ConfigError",
    "ConflictingQueue",
    "Connection",
    "Delivery",
    "DurableSubscription",
    "Filter",
    "FilterError",
    "Message",
    "NewMessage",
    "NoSuchQueue",
    "NotAllowed",
    "NotificationError",
    "NumberedPublisher",
    "Overloaded",
    "PersistentQuery",
    "ProtocolError",
    "Queue",
    "QueueError",
    "Subscription",
    "SyncConnection",
    "SyncQueue",
    "TidegateError",
    "Unavailable",
    "connect",
    "connect_sync",
]
