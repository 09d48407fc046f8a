"""Calls subscribers back when they have an indication to take.

A subscriber is attached while it has a connection. The notifier forgets it when the connection is lost; the persistent
query collects its changes meanwhile. An experiment can pass a notifier of its own to the knowledge base, for example
one that calls subscribers later.

What may go wrong: a subscriber's callback fails. This is logged, and the other subscribers are still called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeAlias

log = logging.getLogger(__name__)

OnNews: TypeAlias = Callable[[], None]


class Notifier:
    """Calls each subscriber as soon as it has an indication. A subclass may override `notify` to call it later."""

    def __init__(self) -> None:
        self.spread_s = 0.0  # the time over which the subscribers notified last should spread their fetches
        self._on_news: dict[str, OnNews] = {}

    def attach(self, subscription_id: str, on_news: OnNews) -> None:
        """Connects a subscription to the callback of its subscriber."""
        self._on_news[subscription_id] = on_news

    def detach(self, subscription_id: str) -> bool:
        """Disconnects a subscription from its subscriber. Reports whether it was connected."""
        return self._on_news.pop(subscription_id, None) is not None

    def notify(self, notified: list[str], spread_s: float) -> None:
        """Notifies the subscribers of one change. `spread_s` is the time over which they should spread their
        fetches."""
        self.spread_s = spread_s
        self.call(notified)

    def call(self, subscription_ids: Iterable[str]) -> None:
        """Calls the subscribers that are attached."""
        for subscription_id in subscription_ids:
            on_news = self._on_news.get(subscription_id)
            try:
                if on_news is not None:
                    on_news()
            except Exception:  # the change is committed, and the other subscribers must still be notified
                log.exception("cannot notify the subscriber of %s", subscription_id)
