"""Durable push over HTTP: a connection takes what waits for a named subscription, and goes on where the last one ended.

The notifications lie in the subscription's queue. They are leased, written to the connection, and then deleted; what
was not written when the client leaves, or the broker ends, is there for the next connection. What may go wrong: the
network loses what was written to it. Whoever must not lose even that dequeues from the queue `subscription.NAME`, and
deletes each notification when it is done with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final

from tidegate.errors import ConflictingQueue
from tidegate.listeners.http_peer import hear_of_losses
from tidegate.listeners.http_queues import return_messages
from tidegate.listeners.http_subscriptions import find_subscription, get_subscription
from tidegate.listeners.json_message import delivery_json
from tidegate.messages import Dequeue, Leased, Settle
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import Definition

LEASE_MESSAGES: Final = 100
LEASE_S: Final = 60.0
KEEP_ALIVE_S: Final = 15.0
# A part is deleted when it is written, and the lease of the rest begins anew: so a thin line has LEASE_S for each.
PART_BYTES: Final = 64 * 1024


class DurableSession:
    """One connection that takes from a named subscription; `events` gives lists of encoded JSON objects. Connections
    that take from the same one share its notifications; one that comes takes over what others have not written yet."""

    def __init__(self, queues: LogicalQueues, queue: str) -> None:
        self._queues = queues
        self._queue = queue
        self._unwritten: list[Leased] = []

    async def events(self) -> AsyncIterator[list[bytes]]:
        """What waits, until the broker stops; an empty list now and then while nothing does. Whoever asks for the
        next list has written the one before."""
        await self._queues.take_over(self._queue)
        wanted = Dequeue(self._queue, max=LEASE_MESSAGES, wait_s=KEEP_ALIVE_S, visibility_s=LEASE_S)
        while not self._queues.is_stopping:
            self._unwritten = await self._queues.dequeue(wanted)
            if not self._unwritten:
                yield []
            for part in _parts(self._unwritten):
                yield [delivery_json(each) for each in part]
                await hear_of_losses()
                await self._on_written(part)

    def stop(self) -> None:
        """The queues have stopped, and with them what waits in `events`."""

    async def close(self) -> None:
        if self._unwritten:
            await return_messages(self._queues, self._queue, self._unwritten)

    async def _on_written(self, part: list[Leased]) -> None:
        await self._queues.settle(Settle(self._queue, "delete", [each.receipt for each in part]))
        self._unwritten = self._unwritten[len(part) :]
        if self._unwritten:
            receipts = [each.receipt for each in self._unwritten]
            await self._queues.settle(Settle(self._queue, "extend", receipts, visibility_s=LEASE_S))


async def open_durable(queues: LogicalQueues, query: Mapping[str, str]) -> DurableSession:
    """Takes from the subscription `name`; makes it when there is none and a filter is given."""
    definition = await _subscription(queues, query["name"], query.get("filter"), query.get("policy", "block"))
    return DurableSession(queues, definition.name)


async def _subscription(queues: LogicalQueues, name: str, text: str | None, policy: str) -> Definition:
    known = find_subscription(queues, name)
    if known is None and text is not None:
        return await queues.define_subscription(name, text, policy)
    known = get_subscription(queues, name)
    if text not in (None, known.settings.filter):
        raise ConflictingQueue(
            "Q904",
            f"subscription {name!r} has the filter {known.settings.filter!r}, not {text!r}",
            "leave the filter out, or change it: POST /v1/subscriptions",
        )
    return known


def _parts(leased: list[Leased]) -> Iterator[list[Leased]]:
    """In order, each of at least one message and, beyond that, of at most PART_BYTES."""
    part: list[Leased] = []
    size_bytes = 0
    for each in leased:
        size_bytes += len(memoryview(each.record))
        if part and size_bytes > PART_BYTES:
            yield part
            part, size_bytes = [], len(memoryview(each.record))
        part.append(each)
    if part:
        yield part
