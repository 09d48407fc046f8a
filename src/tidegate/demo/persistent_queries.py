"""Programs with open queries: some hundreds of persistent queries, whose checks are paced by active control.

Most of them are filters over the readings. One per station is SPARQL over the graph, where the broker mirrors the
latest value; its final result must be the value that was published last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Any, Final

import msgspec

from tidegate.client import Connection, PersistentQuery
from tidegate.devices import STATIONS
from tidegate.filters import Filter

MIRRORED: Final = "NO2"
MIRROR: Final = msgspec.json.encode([{"to": "graph", "subject": "station", "attributes": [MIRRORED]}]).decode()
LIMITS: Final = {"NO2": (40, 90, 120, 230), "O3": (50, 100, 130), "PM10": (20, 40, 50)}
PUBLISH_S: Final = 1.0


class PersistentQueries:
    """All persistent queries, with what they received and what they should have received."""

    def __init__(self) -> None:
        self._filters_of = {
            station.code: [
                Filter.parse(f"station=='{station.code}';{name}>{limit}")
                for name, limits in LIMITS.items()
                for limit in limits
            ]
            for station in STATIONS
        }
        self._latest: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._queries: list[PersistentQuery] = []
        self.expected = 0
        self.reported = 0

    def on_published(self, batch: list[dict[str, Any]]) -> None:
        for reading in batch:
            self.expected += sum(each.matches(reading) for each in self._filters_of[reading["station"]])
            if MIRRORED in reading:
                self._latest[reading["station"]] = reading[MIRRORED]

    def on_seen(self, station: str, value: float) -> None:
        """Records the value that a query over the graph reported."""
        self._seen[station] = value

    @property
    def are_complete(self) -> bool:
        return not self.differences()

    def differences(self) -> list[str]:
        found = []
        if self.reported != self.expected:
            found.append(f"persistent queries received {self.reported} readings of {self.expected}")
        wrong = [station for station, value in self._latest.items() if self._seen.get(station) != value]
        if wrong:
            found.append(f"persistent queries over the graph missed the latest value of {len(wrong)} stations")
        return found

    def __len__(self) -> int:
        return len(self._queries)

    def state(self) -> dict[str, Any]:
        """Returns how the queries are paced, as a notification: medians over the queries, and sums."""
        each = [query.statistics().control for query in self._queries]
        return {
            "persistent_queries": len(each),
            "interval_s": median(control.interval_s for control in each),
            "ast_s": median(control.ast_s for control in each),
            "rbt_s": median(control.rbt_s for control in each),
            "checks": sum(control.requests for control in each),
            "detections": sum(control.detections for control in each),
            "losses": sum(control.losses for control in each),
            "changes": sum(query.statistics().changes for query in self._queries),
        }

    @asynccontextmanager
    async def opened(self, broker: Connection) -> AsyncIterator[None]:
        """Opens and reads all queries and publishes their state, until the context ends."""
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            working = []
            for station in STATIONS:
                for each in self._filters_of[station.code]:
                    query = await stack.enter_async_context(broker.persistent_query(each))
                    self._queries.append(query)
                    working.append(tasks.create_task(self._count(query)))
                text = f"SELECT ?value {{ <{station.code}> <{MIRRORED}> ?value }}"
                query = await stack.enter_async_context(broker.persistent_query(text))
                self._queries.append(query)
                working.append(tasks.create_task(self._follow(query, station.code)))
            working.append(tasks.create_task(self._publish_state(broker)))
            yield
            for task in working:
                task.cancel()

    async def _count(self, query: PersistentQuery) -> None:
        async for change in query:
            self.reported += len(change.added)

    async def _follow(self, query: PersistentQuery, station: str) -> None:
        async for change in query:
            for row in change.added:
                self.on_seen(station, float(row["value"]["value"]))

    async def _publish_state(self, broker: Connection) -> None:
        while True:
            await broker.publish(self.state())
            await asyncio.sleep(PUBLISH_S)
