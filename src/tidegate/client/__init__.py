"""The client: publish, and subscribe by content, over the native protocol. Needs nothing but msgspec.

A `Connection` has two links to the broker, one to publish and one to subscribe, each opened when it is first used: a
consumer that falls behind holds up its deliveries, never the acknowledgements of what it publishes. Links reconnect
by themselves; what is unacknowledged is sent again under the same numbers, and subscriptions are made again.
"""

from tidegate.client.connection import Connection, connect
from tidegate.client.subscriber import Delivery, Subscription
from tidegate.client.synchronous import SyncConnection, connect_sync

__all__ = ["Connection", "Delivery", "Subscription", "SyncConnection", "connect", "connect_sync"]
