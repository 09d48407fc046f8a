"""Publishes the progress of streaming queries: one notification per batch, for subscribers of `pipeline`.

    {"pipeline": "air-quality", "query": "readings", "batch": 12, "rows": 336, "rows_s": 812.5, "behind": 0,
     "batch_ms": 412}

Progress is best effort: while the broker is unavailable it is dropped, and the job continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from tidegate.pipeline.broker_link import ask_soon
from tidegate.pipeline.options import BrokerOptions
from tidegate.pipeline.progress import lag


class ProgressPublisher:
    """Publishes the progress of one job. `publish` is called periodically and publishes what is new."""

    def __init__(self, pipeline: str, broker: BrokerOptions) -> None:
        self._pipeline = pipeline
        self._broker = broker
        # Spark's timestamp of the progress that was last published, by query.
        self._published: dict[str, str] = {}
        self._publishing: Future[None] | None = None

    def publish(self, queries: Sequence[StreamingQuery]) -> None:
        if self._publishing is not None and not self._publishing.done():
            return
        news = [self._describe(query.name or "query", progress) for query, progress in self._new(queries)]
        if news:
            self._publishing = ask_soon(self._broker, lambda connection: connection.publish(news))

    def _new(self, queries: Sequence[StreamingQuery]) -> list[tuple[StreamingQuery, Any]]:
        found = []
        for query in queries:
            progress: Any = query.lastProgress
            if progress is not None and self._published.get(query.id) != progress.timestamp:
                self._published[query.id] = progress.timestamp
                found.append((query, progress))
        return found

    def _describe(self, query: str, progress: Any) -> Mapping[str, Any]:
        return {
            "pipeline": self._pipeline,
            "query": query,
            "batch": progress.batchId,
            "rows": progress.numInputRows,
            "rows_s": float(progress.processedRowsPerSecond or 0.0),
            "behind": lag(progress),
            "batch_ms": progress.durationMs.get("triggerExecution", 0),
        }
