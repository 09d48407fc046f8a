"""The client: publish, subscribe by content, and use queues, over the native protocol. Needs nothing but msgspec.

A `Connection` has three links to the broker: one to publish, one to subscribe and one for queues, each opened at its
first use. So a program that falls behind delays its own deliveries, never the acknowledgements of what it publishes.
Links reconnect automatically. They resend unacknowledged notifications under the same numbers and subscribe again.
"""

from tidegate.client.connection import Connection, connect
from tidegate.client.durable import DurableSubscription
from tidegate.client.message import Message
from tidegate.client.numbered_publisher import NumberedPublisher
from tidegate.client.persistent_query import PersistentQuery
from tidegate.client.persistent_result import Change
from tidegate.client.queue import Queue
from tidegate.client.subscriber import Delivery, Subscription
from tidegate.client.synchronous import SyncConnection, SyncQueue, connect_sync

__all__ = [
    "Change",
    "Connection",
    "Delivery",
    "DurableSubscription",
    "Message",
    "NumberedPublisher",
    "PersistentQuery",
    "Queue",
    "Subscription",
    "SyncConnection",
    "SyncQueue",
    "connect",
    "connect_sync",
]
