"""What streaming queries have done, published: a notification a batch, for whoever subscribes to `pipeline`.

    {"pipeline": "air-quality", "query": "readings", "batch": 12, "rows": 336, "rows_s": 812.5, "behind": 0,
     "batch_ms": 412}

It is news, not data: while the broker is away it is dropped, and the job goes on.
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
    """For one job; `tell` is called now and then, and publishes what is new."""

    def __init__(self, pipeline: str, broker: BrokerOptions) -> None:
        self._pipeline = pipeline
        self._broker = broker
        # What was told of each query last: Spark's name of that moment.
        self._told: dict[str, str] = {}
        self._asked: Future[None] | None = None

    def tell(self, queries: Sequence[StreamingQuery]) -> None:
        if self._asked is not None and not self._asked.done():
            return
        news = [self._describe(query.name or "query", progress) for query, progress in self._new(queries)]
        if news:
            self._asked = ask_soon(self._broker, lambda connection: connection.publish(news))

    def _new(self, queries: Sequence[StreamingQuery]) -> list[tuple[StreamingQuery, Any]]:
        found = []
        for query in queries:
            progress: Any = query.lastProgress
            if progress is not None and self._told.get(query.id) != progress.timestamp:
                self._told[query.id] = progress.timestamp
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
