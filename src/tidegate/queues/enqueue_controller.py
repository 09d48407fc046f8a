"""Enqueue controller: puts a message that a listener has accepted into one physical queue of a store.

How it chooses the physical queue:

- A message of a group always goes to the group's physical queue, so that the group keeps its order.
- A message that is named by device and sequence goes round-robin by that sequence. When it is sent again, through
  whichever controller, it goes to the same physical queue, which remembers it (`covers`).
- All other messages of a batch go together to the next physical queue in turn.
- A numbered batch goes to the physical queue that its producer and number determine. When the batch is sent again, in
  whatever order, it finds its mark there.

A message is acknowledged once the store has made it as durable as the queue demands. A full queue refuses the whole
batch.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any
from zlib import crc32

import msgspec

from tidegate.errors import QueueError
from tidegate.filters import Filter
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
from tidegate.queues.covers import FormerFilter, Run, feed_key, filter_tag, put_key
from tidegate.queues.definition import Definition
from tidegate.queues.feed import Feed, FeedPart
from tidegate.queues.method import RoundRobin
from tidegate.queues.records import body_of, seal
from tidegate.queues.store import Batches, Entry, Numbered, QueueFull, QueueStore, Runs, Store

_SEQUENCE_MAX = 1 << 63


class EnqueueController:
    """Enqueues into one logical queue. Its only state is whose turn it is."""

    def __init__(self, store: Store, definition: Definition, costs: Costs) -> None:
        self.definition = definition
        self._store = store
        self._costs = costs
        physical_queues = definition.settings.physical_queues
        self._order = RoundRobin(physical_queues, random.randrange(physical_queues))  # noqa: S311

    async def enqueue(
        self, messages: Sequence[NewMessage], *, make_room: bool = False, producer: str = "", number: int = 0
    ) -> Enqueued:
        """Returns when all messages are durable. After an error it is unknown which of them were stored. Numbered
        batches, and messages with device and sequence, can safely be sent again."""
        durability = self.definition.settings.durability or ""
        if not messages:
            return Enqueued(0, 0, durability)
        if len(messages) > BATCH_MESSAGES_MAX:
            raise QueueError("Q906", f"a batch has {len(messages)} messages", f"send at most {BATCH_MESSAGES_MAX}")
        numbered = _numbered(producer, number) if producer or number else None
        runs: Runs = {}
        if numbered is not None:
            batches = self._route_numbered(messages, numbered)
        else:
            batches, runs = self._route_batch(messages)
        duplicates = await self._put(len(messages), batches, runs, make_room=make_room, numbered=numbered)
        return Enqueued(len(messages), duplicates, durability)

    async def feed(self, feed: Feed, *, make_room: bool = False) -> None:
        """Returns when all messages are durable; messages that the queue already has are left out. After an error the
        feed can safely be repeated."""
        batches, runs = self._route_feed(feed)
        while True:
            try:
                await self._put(len(feed), batches, runs, make_room=make_room)
                return
            except FormerFilter as former:
                # Each attempt adds the matches of one more filter, of which a queue remembers few, so the loop ends.
                runs = _with_matches(former.text, batches, runs)

    def unstored(self, feed: Feed, full: QueueFull) -> Feed:
        """Returns the part of a feed that belongs into the physical queues that are full."""
        return feed.only(lambda message: self._route(message, 0) in full.physical)

    async def has(self, feed: Feed) -> bool:
        """Returns whether all messages of a feed would be duplicates."""
        return await self._stored.has(*self._route_feed(feed))

    @property
    def _stored(self) -> QueueStore:
        """The queue in the store. It may be dropped between two steps, so each step looks it up."""
        return self._store.queue(self.definition.name)

    async def _put(
        self, count: int, batches: Batches, runs: Runs, *, make_room: bool, numbered: Numbered | None = None
    ) -> int:
        storing = Timed(self._stored.enqueue(batches, make_room=make_room, numbered=numbered, runs=runs))
        duplicates = await storing
        self._costs.enqueued(count, storing.seconds)
        return duplicates

    def _route_batch(self, messages: Sequence[NewMessage]) -> tuple[Batches, Runs]:
        now_s, turn = time.time(), self._order.next()
        step = self.definition.settings.physical_queues
        remembers = self.definition.settings.deduplication_s > 0
        batches: Batches = {}
        found: dict[int, list[list[Any]]] = {}
        for index, message in enumerate(messages):
            physical = self._route(message, turn)
            entries = batches.setdefault(physical, [])
            # A device that sends no sequences gives its messages no identity; otherwise its second message would be a
            # duplicate of its first.
            is_named = message.device and message.sequence
            entry = Entry(
                _sealed(message, index, now_s),
                message.group,
                identity(message.device, message.sequence) if is_named else b"",
            )
            if is_named and remembers:
                key = put_key(message.device, bool(message.group))
                place = message.sequence if message.group else message.sequence // step
                _add_place(found.setdefault(physical, []), key, len(entries), place)
            entries.append(entry)
        runs = {
            physical: [Run(key, start, range(low, high + 1), low, high) for key, start, low, high in each]
            for physical, each in found.items()
        }
        return batches, runs

    def _route_feed(self, feed: Feed) -> tuple[Batches, Runs]:
        now_s = time.time()
        batches: Batches = {}
        runs: Runs = {}
        step = self.definition.settings.physical_queues
        for part in feed.parts:
            device = part.messages[0].device
            key, digest = feed_key(part.filter, device), _digest(device)
            for physical, messages in self._shares(part, digest[0]):
                entries = batches.setdefault(physical, [])
                places = [message.sequence // step for message in messages]
                # A physical queue receives only the numbers with one remainder, so `since` is rounded up to the next
                # place.
                low = -((messages[0].sequence % step - part.since) // step)
                run = Run(key, len(entries), places, min(low, places[0]), places[-1], part.filter)
                runs.setdefault(physical, []).append(run)
                # A feed stores no identities, but it compares them: older versions of the broker stored some, and so do
                # devices.
                for index, each in enumerate(messages):
                    entries.append(Entry(_sealed(each, index, now_s), "", digest + each.sequence.to_bytes(8, "big")))
        return batches, runs

    def _shares(self, part: FeedPart, shift: int) -> Iterable[tuple[int, list[NewMessage]]]:
        """Divides the messages of one publisher among the physical queues."""
        step = self.definition.settings.physical_queues
        if step == 1:
            return ((0, part.messages),)
        if len(part.messages) == 1:
            return (((shift + part.messages[0].sequence) % step, part.messages),)
        shares: dict[int, list[NewMessage]] = {}
        for message in part.messages:
            shares.setdefault((shift + message.sequence) % step, []).append(message)
        return shares.items()

    def _route_numbered(self, messages: Sequence[NewMessage], numbered: Numbered) -> Batches:
        """Assigns the messages of a numbered batch to physical queues. The number identifies them all, so single
        messages need no identity."""
        now_s, place = time.time(), self._physical_of_batch(numbered)
        batches: Batches = {}
        for index, message in enumerate(messages):
            entry = Entry(_sealed(message, index, now_s), message.group)
            batches.setdefault(self._physical_of_group(message.group) if message.group else place, []).append(entry)
        return batches

    def _route(self, message: NewMessage, turn: int) -> int:
        if message.group:
            return self._physical_of_group(message.group)
        if message.device:
            return (_digest(message.device)[0] + message.sequence) % self.definition.settings.physical_queues
        return turn

    def _physical_of_group(self, group: str) -> int:
        return crc32(group.encode()) % self.definition.settings.physical_queues

    def _physical_of_batch(self, numbered: Numbered) -> int:
        """Chooses the physical queue of a numbered batch. Uses a digest, not a sum: a producer may number its batches
        in steps that would never reach some physical queues."""
        digest = blake2b(numbered.number.to_bytes(8, "big"), key=numbered.producer, digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.definition.settings.physical_queues


def _sealed(message: NewMessage, index: int, now_s: float) -> bytes:
    if not _is_surely_within_bounds(message):
        _check(message, index)
    return seal(Record(message.group, now_s, message.body, message.device, message.sequence, message.headers))


def _add_place(found: list[list[Any]], key: bytes, index: int, place: int) -> None:
    """Extends the last run, [key, start, low, high], if the entry is the next one of the same device. Otherwise starts
    a new run."""
    if found:
        last = found[-1]
        if last[0] == key and place == last[3] + 1 and index == last[1] + place - last[2]:
            last[3] = place
            return
    found.append([key, index, place, place])


def _with_matches(text: str, batches: Batches, runs: Runs) -> Runs:
    """Returns the runs, with the information which of their notifications a former filter of the queue matches."""
    tag, matches = filter_tag(text), Filter.parse(text).matches

    def match(physical: int, run: Run) -> Run:
        entries = batches[physical][run.start : run.start + len(run.places)]
        found = [matches(msgspec.msgpack.decode(body_of(entry.sealed))) for entry in entries]
        return run._replace(matches={**run.matches, tag: found})

    return {physical: [match(physical, run) for run in each] for physical, each in runs.items()}


def _numbered(producer: str, number: int) -> Numbered:
    if not 0 < len(producer) <= TEXT_CHARACTERS_MAX or not 0 < number <= BATCH_NUMBER_MAX:
        raise QueueError(
            "Q915",
            f"a batch with the producer {producer[:40]!r} and the number {number} is invalid",
            f"give both: a producer of 1 to {TEXT_CHARACTERS_MAX} characters, and a number from 1 to 2^53",
        )
    return Numbered(blake2b(producer.encode(), digest_size=16).digest(), number)


def identity(device: str, sequence: int) -> bytes:
    return _digest(device) + sequence.to_bytes(8, "big")


@functools.lru_cache(maxsize=65_536)
def _digest(device: str) -> bytes:
    return blake2b(device.encode(), digest_size=8).digest()


def _is_surely_within_bounds(message: NewMessage) -> bool:
    """Checks quickly whether a message is within all bounds, as nearly all are. Otherwise `_check` finds out which
    bound it exceeds."""
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
            f"send 1 to {MESSAGE_BYTES_MAX} bytes; store larger data elsewhere and send its address",
        )
    for name, text in (("group", message.group), ("device", message.device)):
        if len(text) > TEXT_CHARACTERS_MAX:
            raise QueueError(
                "Q905",
                f"message [{index}]: the {name} has {len(text)} characters",
                f"use at most {TEXT_CHARACTERS_MAX}",
            )
    if not 0 <= message.sequence < _SEQUENCE_MAX:
        raise QueueError("Q905", f"message [{index}]: the sequence {message.sequence} is invalid", "count from 1")
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
    """Makes a message whose body is any value that MessagePack can carry."""
    return NewMessage(msgspec.Raw(msgspec.msgpack.encode(body)), **fields)
