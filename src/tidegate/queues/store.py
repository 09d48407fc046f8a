"""What a store of physical queues can do; `stores/` has one for LMDB and one for Redis, with one suite of tests.

A store decides everything that must be decided in one place: which number a message gets, whether it was there
before, who has leased it and until when, how often it was delivered, and when it is a dead letter. So controllers
keep nothing that matters.

A lease gives, in this order: what is to be delivered again, then what was never delivered. Three rules hold in it:

- messages of one group are delivered in order: while one of them is leased, later ones are not given to others;
- a message that failed twice, or that has one delivery left, is given alone, so that a poison message condemns none of
  its neighbours;
- a message that was delivered `max_deliveries` times moves to the dead-letter queue, to the physical queue of the same
  number, in the same step in which it would have been delivered again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from tidegate.errors import NoSuchQueue, Overloaded, QueueError, Unavailable
from tidegate.messages import PAGE_BYTES_MAX, Level
from tidegate.queues.definition import Definition, Durability

# Deliveries of a batch that failed before each of its messages is tried alone.
SUSPECT_AFTER: int = 2

# Each physical queue remembers how far so many producers of numbered batches are, those that came last. A Spark query
# is a producer a partition, so these are hundreds of queries, in a megabyte of memory.
PRODUCERS_MAX: Final = 10_000

# (physical queue, messages that can be leased there now)
OnReady: TypeAlias = Callable[[int, int], None]


class Entry(NamedTuple):
    """A message on its way into a physical queue. `identity` names it for deduplication, if it has a name."""

    sealed: bytes
    group: str = ""
    identity: bytes = b""


class Numbered(NamedTuple):
    """Names a batch: the digest of its producer, and its number among that producer's."""

    producer: bytes
    number: int


class Grant(msgspec.Struct, gc=False):
    """One leased message."""

    sequence: int
    delivery: int
    receipt: str
    sealed: bytes


class SealedPage(NamedTuple):
    """What a range read has found: sequences, sizes of the sealed records, and these one behind the other."""

    sequences: list[int]
    sizes: list[int]
    records: bytes

    def split(self) -> Iterator[tuple[int, memoryview]]:
        """(sequence, sealed record) of each."""
        view, start = memoryview(self.records), 0
        for sequence, size in zip(self.sequences, self.sizes, strict=True):
            yield sequence, view[start : start + size]
            start += size


class Granted(NamedTuple):
    """What a lease has given, and how many messages can be leased after it."""

    grants: list[Grant]
    waiting: int


@dataclass
class StoreCounts:
    """What has happened to a logical queue in this store, as this process has seen it."""

    enqueued: int = 0
    duplicates: int = 0
    refused: int = 0
    dropped: int = 0
    deleted: int = 0
    redelivered: int = 0
    expired: int = 0
    dead_lettered: int = 0
    corrupt: int = 0


class Store(Protocol):
    """All methods but the marked ones may wait for a disk or a network; each is done wholly or not at all, except that
    an enqueue into several physical queues of Redis is done for each of them. `is_shared`: other processes may change
    it, and nobody is told while nobody listens."""

    is_shared: bool

    async def open(self) -> list[Definition]:
        """Makes it ready; the queues that it has."""

    async def close(self) -> None: ...

    async def define(self, definition: Definition) -> Definition:
        """Makes a queue with its dead-letter queue, or changes its settings; as it is from now on."""

    async def drop(self, name: str) -> None:
        """The queue, its dead letters and all their messages are gone."""

    def watch_definitions(self, changed: Callable[[str, Definition | None], Awaitable[None]]) -> None:
        """Does not wait. Tells of queues that other processes make, change or drop (None)."""

    async def enqueue(
        self,
        queue: str,
        batches: dict[int, list[Entry]],
        *,
        make_room: bool = False,
        numbered: Numbered | None = None,
    ) -> int:
        """Puts entries into physical queues; durable when it returns the number of duplicates among them. Overloaded
        when they do not fit; with `make_room` the oldest messages go instead.

        Entries that are `numbered` have no identities. Each physical queue keeps its part together with the number, and
        nothing of it when it has kept that number, or a higher one, of that producer: then all are duplicates."""

    async def has(self, queue: str, batches: dict[int, list[Entry]]) -> bool:
        """Whether each entry would be a duplicate."""

    async def lease(
        self, queue: str, physical: int, messages_max: int, bytes_max: int, visibility_s: float
    ) -> Granted: ...

    async def delete(self, queue: str, receipts: list[str]) -> int:
        """How many were deleted; the other receipts are stale. So for the three below."""

    async def extend(self, queue: str, receipts: list[str], visibility_s: float) -> int: ...

    async def release(self, queue: str, receipts: list[str], delay_s: float) -> int: ...

    async def give_back(self, queue: str, receipts: list[str]) -> int:
        """As release without delay, and the delivery does not count."""

    async def end_leases(self, queue: str) -> int:
        """Ends every lease, as if its time were over; how many."""

    async def read(
        self, queue: str, physical: int, start: int, stop: int, messages_max: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> SealedPage:
        """Messages with sequences from `start` to below `stop`, leased or not; of more than `bytes_max` the first, at
        least one."""

    async def delete_below(self, queue: str, physical: int, sequence: int) -> int: ...

    async def set_aside(self, queue: str, physical: int, sequence: int) -> None:
        """Takes a corrupt record out of the queue and keeps it for whoever looks into the store."""

    async def redrive(self, queue: str, messages_max: int) -> int:
        """Moves dead letters back into their queue, as never delivered; how many."""

    async def levels(self, queue: str) -> list[Level]:
        """One a physical queue."""

    def counts(self, queue: str) -> StoreCounts:
        """Does not wait."""

    def watch(self, queue: str, on_ready: OnReady) -> None:
        """Does not wait. `on_ready` is called in the event loop when messages of a physical queue can be leased that
        could not before, as far as known: always by a store in this process, while `listen` is on by a shared one."""

    def listen(self, queue: str, *, is_on: bool) -> None:
        """Does not wait. Somebody waits for messages, or nobody does."""


class Receipt(msgspec.Struct, gc=False):
    """Which message, and which of its deliveries; `epoch` is of the store's start where leases end with the process."""

    physical: int
    sequence: int
    delivery: int
    epoch: str

    @classmethod
    def parse(cls, text: str) -> Receipt:
        try:
            physical, sequence, delivery, epoch = text.split(".")
            return cls(int(physical), int(sequence), int(delivery), epoch)
        except ValueError:
            raise QueueError("Q907", f"{text[:80]!r} is no receipt", "use those that a dequeue has given") from None


def is_alone(delivery: int, max_deliveries: int) -> bool:
    """Whether a message is given alone in this delivery of it."""
    return delivery > SUSPECT_AFTER or (delivery > 1 and delivery == max_deliveries)


def no_such_queue(name: str) -> NoSuchQueue:
    return NoSuchQueue("Q901", f"there is no queue {name!r}", "make it first: tidegate queue create, or PUT /v1/queues")


def queue_full(name: str, what: str, bound: str) -> Overloaded:
    return Overloaded(
        "L608",
        f"queue {name!r} is full: {what}",
        f"come back when consumers have deleted some, or raise its {bound}",
        retry_after_s=2.0,
    )


def store_failed(what: str) -> Unavailable:
    return Unavailable("U707", f"the store of the queues has failed: {what}", "nothing was accepted; see to the store")


def durability_rank(durability: Durability) -> int:
    return ("memory", "os", "fsync").index(durability)
