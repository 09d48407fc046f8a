"""Durable push over HTTP: a connection receives the pending notifications of a named subscription, and continues where
the last connection ended.

The notifications are in the subscription's queue. They are leased, written to the connection, and then deleted.
Notifications that were not written when the client leaves, or the broker stops, wait for the next connection.

What may go wrong: the network loses bytes that were already written, and their notifications are deleted. Clients that
must not lose even those should dequeue from the queue `subscription.NAME` and delete each message after processing it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final

from tidegate.errors import ConflictingQueue
from tidegate.listeners.http.json_message import delivery_json
from tidegate.listeners.http.peer import detect_disconnect
from tidegate.listeners.http.queues import return_messages
from tidegate.listeners.http.subscriptions import find_subscription, get_subscription
from tidegate.messages import Dequeue, Leased, Settle
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import Definition

LEASE_MESSAGES: Final = 100
LEASE_S: Final = 60.0
KEEP_ALIVE_S: Final = 15.0
# Leased notifications are written in parts of this size. Each written part is deleted and the leases of the rest are
# extended, so a slow connection has LEASE_S for each part, not for all of them.
PART_BYTES: Final = 64 * 1024


class DurableSession:
    """One connection that reads a named subscription; `events` yields lists of encoded JSON objects.

    Connections that read the same subscription share its notifications. A new one takes over the notifications that
    the others have leased and not yet written."""

    def __init__(self, queues: LogicalQueues, queue: str) -> None:
        self._queues = queues
        self._queue = queue
        self._unwritten: list[Leased] = []

    async def events(self) -> AsyncIterator[list[bytes]]:
        """Yields pending notifications until the broker stops, and an empty list every `KEEP_ALIVE_S` while none are.

        Asking for the next list confirms that the one before was written; its notifications are then deleted."""
        await self._queues.take_over(self._queue)
        wanted = Dequeue(self._queue, max=LEASE_MESSAGES, wait_s=KEEP_ALIVE_S, visibility_s=LEASE_S)
        while not self._queues.is_stopping:
            self._unwritten = await self._queues.dequeue(wanted)
            if not self._unwritten:
                yield []
            for part in _parts(self._unwritten):
                yield [delivery_json(each) for each in part]
                # Writing to a lost connection raises nothing. If the client has left, its response is cancelled during
                # this wait, before the notifications are deleted.
                await detect_disconnect()
                await self._on_written(part)

    def stop(self) -> None:
        """Does nothing: the queues stop first, and that ends a dequeue that waits in `events`."""

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
    """Opens a session on the subscription `name`. Creates it if it does not exist and a filter is given."""
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
            "omit the filter, or change it with POST /v1/subscriptions",
        )
    return known


def _parts(leased: list[Leased]) -> Iterator[list[Leased]]:
    """Yields the messages in order, in parts of at most PART_BYTES; a larger message is a part of its own."""
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
