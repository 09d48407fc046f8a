"""The subscription index: which subscriptions does a notification satisfy?

Pure: it knows filters and notifications, nothing of slices or sockets. `SubscriptionIndex` finds candidates by one
constraint of each filter and verifies them with `Filter.matches`, which is the law that it is tested against.
"""

from tidegate.layers.index.subscription_index import SubscriptionIndex

__all__ = ["SubscriptionIndex"]
