"""The counts of the main job at both ends of every path of a reading, and whether they agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tidegate.client import Delivery
from tidegate.demo.persistent_queries import PersistentQueries
from tidegate.devices import MAGNITUDES


@dataclass
class Counts:
    """One number for each end of a path. `totals` are the pipeline's own counts of its history, printed when it
    ends."""

    published: int = 0
    values: int = 0
    delivered: int = 0
    doubled: int = 0
    alerts: int = 0
    queue: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    last_sequence: int = 0
    last_time: str = ""
    queries: PersistentQueries = field(default_factory=PersistentQueries)

    def on_published(self, batch: list[dict[str, Any]]) -> None:
        """Counts readings that the broker has acknowledged."""
        self.published += len(batch)
        self.values += sum(name in reading for reading in batch for name in MAGNITUDES.values())
        self.last_time = str(batch[-1]["time"])
        self.queries.on_published(batch)

    def on_delivered(self, delivery: Delivery) -> None:
        """Counts a delivery. One publisher sends all readings in order, so a sequence that does not rise is a
        duplicate."""
        if delivery.sequence <= self.last_sequence:
            self.doubled += 1
        else:
            self.delivered += 1
            self.last_sequence = delivery.sequence

    @property
    def lost(self) -> int:
        """The number of published readings that did not arrive at every end."""
        queued: int = self.queue.get("enqueued", 0)
        return max(0, self.published - min(self.delivered, queued, self.totals.get("messages", 0)))

    def differences(self) -> list[str]:
        """Describes each pair of counts that does not agree; empty if all agree."""
        of_spark = self.totals
        pairs = [
            ("the subscriber of all readings received {} of {} published", self.delivered, self.published),
            ("the subscriber of all readings received {} of them twice", self.doubled, 0),
            ("the queue received {} messages of {} published", self.queue.get("enqueued", 0), self.published),
            (
                "Spark has processed {} messages of {} queued",
                of_spark.get("messages", 0),
                self.queue.get("enqueued", 0),
            ),
            ("Spark set {} messages aside", of_spark.get("set_aside", 0), 0),
            ("Spark kept {} values of {} published", of_spark.get("readings", 0), self.values),
            ("Spark received {} values twice", of_spark.get("duplicates", 0), 0),
            ("Spark received {} values late", of_spark.get("late", 0), 0),
            ("the subscriber of alerts received {} of {} that Spark found", self.alerts, of_spark.get("alerts", 0)),
        ]
        found = [text.format(seen, expected) for text, seen, expected in pairs if seen != expected]
        found += self.queries.differences()
        return found if self.published else ["nothing was published"]

    def summary(self) -> str:
        of_spark = self.totals
        kept = f"{of_spark.get('readings', 0):,} values in {of_spark.get('windows', 0):,} windows"
        lines = [
            f"{self.published:>12,} readings published and acknowledged, up to {self.last_time or 'never'}",
            f"{self.delivered:>12,} matched and delivered to a subscriber",
            f"{self.queue.get('enqueued', 0):>12,} matched and queued",
            f"{of_spark.get('messages', 0):>12,} processed by Spark: {kept}",
            f"{self.alerts:>12,} alerts published by Spark and received",
            f"{self.queries.reported:>12,} reported to {len(self.queries):,} persistent queries",
            f"{self.lost:>12,} lost",
            f"{self.doubled + of_spark.get('duplicates', 0):>12,} duplicated",
        ]
        return "\n".join(lines)
