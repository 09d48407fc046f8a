"""Enqueue controller: the message has been accepted by a listener, and goes into one physical queue of a store.

Which one? A message of a group always goes to its group's, so that the group keeps its order. A message that is named
by device and sequence goes round-robin by that sequence: when it is sent again, through whichever controller, it comes
to the same physical queue, which remembers it. All others of a batch go together to the next in turn. Of a numbered
batch they go to the one that its producer and number name: when it is sent again, in whatever order, it finds its mark.

Acknowledged is what the store has made as durable as the queue demands; a queue that is full refuses the whole batch.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any
from zlib import crc32

import msgspec

from tidegate.errors import QueueError
from tidegate.messages import (
    BATCH_MESSAGES_MAX,
    BATCH_NUMBER_MAX,
    HEADER_CHARACTERS_MAX,
    HEADERS_MAX,
    MESSAGE_BYTES_MAX,
    TEXT_CHARACTERS_MAX,
    Enqueued,
    NewMessage,
    Record,
)
from tidegate.queues.costs import Costs, Timed
from tidegate.queues.definition import Definition
from tidegate.queues.method import RoundRobin
from tidegate.queues.records import seal
from tidegate.queues.store import Entry, Numbered, Store

_SEQUENCE_MAX = 1 << 63


class EnqueueController:
    """Of one logical queue. Keeps only whose turn it is."""

    def __init__(self, store: Store, definition: Definition, costs: Costs) -> None:
        self.definition = definition
        self._store = store
        self._costs = costs
        physical_queues = definition.settings.physical_queues
        self._order = RoundRobin(physical_queues, random.randrange(physical_queues))  # noqa: S311

    async def enqueue(
        self, messages: Sequence[NewMessage], *, make_room: bool = False, producer: str = "", number: int = 0
    ) -> Enqueued:
        """Returns when all are durable. With an error none of them may be; those with device and sequence, and numbered
        batches, can safely be sent again."""
        durability = self.definition.settings.durability or ""
        if not messages:
            return Enqueued(0, 0, durability)
        if len(messages) > BATCH_MESSAGES_MAX:
            raise QueueError("Q906", f"{len(messages)} messages in a batch", f"send at most {BATCH_MESSAGES_MAX}")
        numbered = _numbered(producer, number) if producer or number else None
        batches = self._by_number(messages, numbered) if numbered is not None else self._in_turn(messages)
        storing = Timed(self._store.enqueue(self.definition.name, batches, make_room=make_room, numbered=numbered))
        duplicates = await storing
        self._costs.enqueued(len(messages), storing.seconds)
        return Enqueued(len(messages), duplicates, durability)

    async def has(self, messages: Sequence[NewMessage]) -> bool:
        return await self._store.has(self.definition.name, self._in_turn(messages))

    def _in_turn(self, messages: Sequence[NewMessage]) -> dict[int, list[Entry]]:
        now_s, turn = time.time(), self._order.next()
        batches: dict[int, list[Entry]] = {}
        for index, message in enumerate(messages):
            # A device that does not count its messages names none of them: its second must not pass for its first.
            is_named = message.device and message.sequence
            entry = Entry(
                _sealed(message, index, now_s),
                message.group,
                identity(message.device, message.sequence) if is_named else b"",
            )
            batches.setdefault(self._route(message, turn), []).append(entry)
        return batches

    def _by_number(self, messages: Sequence[NewMessage], numbered: Numbered) -> dict[int, list[Entry]]:
        """The number names them all, so that single ones need no identity."""
        now_s, place = time.time(), self._place(numbered)
        batches: dict[int, list[Entry]] = {}
        for index, message in enumerate(messages):
            entry = Entry(_sealed(message, index, now_s), message.group)
            batches.setdefault(self._of_group(message.group) if message.group else place, []).append(entry)
        return batches

    def _route(self, message: NewMessage, turn: int) -> int:
        if message.group:
            return self._of_group(message.group)
        if message.device:
            return (_digest(message.device)[0] + message.sequence) % self.definition.settings.physical_queues
        return turn

    def _of_group(self, group: str) -> int:
        return crc32(group.encode()) % self.definition.settings.physical_queues

    def _place(self, numbered: Numbered) -> int:
        """A digest, not a sum: numbers of a producer may have a step that some physical queues never see."""
        digest = blake2b(numbered.number.to_bytes(8, "big"), key=numbered.producer, digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.definition.settings.physical_queues


def _sealed(message: NewMessage, index: int, now_s: float) -> bytes:
    if not _is_surely_within_bounds(message):
        _check(message, index)
    return seal(Record(message.group, now_s, message.body, message.device, message.sequence, message.headers))


def _numbered(producer: str, number: int) -> Numbered:
    if not 0 < len(producer) <= TEXT_CHARACTERS_MAX or not 0 < number <= BATCH_NUMBER_MAX:
        raise QueueError(
            "Q915",
            f"a numbered batch has the producer {producer[:40]!r} and the number {number}",
            f"give both: a name of 1 to {TEXT_CHARACTERS_MAX} characters, and a number from 1 to 2^53",
        )
    return Numbered(blake2b(producer.encode(), digest_size=16).digest(), number)


def identity(device: str, sequence: int) -> bytes:
    return _digest(device) + sequence.to_bytes(8, "big")


@functools.lru_cache(maxsize=65_536)
def _digest(device: str) -> bytes:
    return blake2b(device.encode(), digest_size=8).digest()


def _is_surely_within_bounds(message: NewMessage) -> bool:
    """Nearly all messages are within all bounds; which bound another exceeds is found out more slowly."""
    return (
        0 < len(memoryview(message.body)) <= MESSAGE_BYTES_MAX
        and len(message.group) <= TEXT_CHARACTERS_MAX
        and len(message.device) <= TEXT_CHARACTERS_MAX
        and 0 <= message.sequence < _SEQUENCE_MAX
        and not message.headers
    )


def _check(message: NewMessage, index: int) -> None:
    size_bytes = len(memoryview(message.body))
    if not 0 < size_bytes <= MESSAGE_BYTES_MAX:
        raise QueueError(
            "Q905",
            f"the body of message [{index}] has {size_bytes} bytes",
            f"send 1 to {MESSAGE_BYTES_MAX}, or the address of where it lies",
        )
    for name, text in (("group", message.group), ("device", message.device)):
        if len(text) > TEXT_CHARACTERS_MAX:
            raise QueueError(
                "Q905",
                f"message [{index}]: the {name} has {len(text)} characters",
                f"use at most {TEXT_CHARACTERS_MAX}",
            )
    if not 0 <= message.sequence < _SEQUENCE_MAX:
        raise QueueError("Q905", f"message [{index}]: {message.sequence} is no sequence", "count from 1")
    if len(message.headers) > HEADERS_MAX:
        raise QueueError("Q905", f"message [{index}] has {len(message.headers)} headers", f"use at most {HEADERS_MAX}")
    for name, value in message.headers.items():
        if len(name) + len(value) > HEADER_CHARACTERS_MAX:
            raise QueueError(
                "Q905",
                f"message [{index}]: the header {name[:40]!r} has {len(name) + len(value)} characters",
                f"use at most {HEADER_CHARACTERS_MAX}",
            )


def make_message(body: Any, **fields: Any) -> NewMessage:
    """A message with any value as its body that MessagePack can carry."""
    return NewMessage(msgspec.Raw(msgspec.msgpack.encode(body)), **fields)
