"""The subscription index: which subscriptions does a notification satisfy?

The index is pure: it depends on filters and notifications, not on slices or sockets. Tests compare its answers with
`Filter.matches`. To learn how it works, start with subscription_index.py, which points to the other modules.
"""

from tidegate.index.subscription_index import SubscriptionIndex

__all__ = ["SubscriptionIndex"]
