"""The subscription index: which subscriptions does a notification satisfy?

Pure: it knows filters and notifications, nothing of slices or sockets. `Filter.matches` is the law that it is tested
against. subscription_index.py explains how it works, and where to read on.
"""

from tidegate.layers.index.subscription_index import SubscriptionIndex

__all__ = ["SubscriptionIndex"]
