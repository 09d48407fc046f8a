"""The contract of a store of physical queues. `stores/` implements it for LMDB and for Redis; one test suite runs on
both.

A store makes every decision that must be made in one place, so controllers hold no durable state. It assigns sequences,
detects duplicates, keeps leases and their deadlines, counts deliveries, and makes dead letters.

A lease first grants messages that must be delivered again, then messages that were never delivered. Four rules apply:

- messages of one group are delivered in order: while one of them is leased, later ones are not granted to others;
- a message that failed twice, or that has one delivery left, is granted alone, so that a poison message does not
  condemn its neighbours;
- a message that is older than `lifetime_s` is no longer granted: it is deleted, or moves to the dead-letter queue;
- a message that was delivered `max_deliveries` times moves to the dead-letter queue, to the physical queue of the same
  number, in the same step in which it would have been delivered again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from tidegate.errors import NoSuchQueue, Overloaded, QueueError, TidegateError, Unavailable
from tidegate.messages import PAGE_BYTES_MAX, Leased, Level
from tidegate.queues.covers import Run
from tidegate.queues.definition import Definition, Durability
from tidegate.queues.records import unseal

# After this many failed deliveries in a batch, each of its messages is tried alone.
SUSPECT_AFTER: int = 2

# Each physical queue remembers the progress of this many producers of numbered batches, those that came last. A Spark
# query is one producer per partition, so this is enough for hundreds of queries, in a megabyte of memory.
PRODUCERS_MAX: Final = 10_000

# Arguments: the physical queue, and how many messages can be leased there now.
OnReady: TypeAlias = Callable[[int, int], None]


class Entry(NamedTuple):
    """A message on its way into a physical queue. `identity` identifies it for deduplication; empty if it has none."""

    sealed: bytes
    group: str = ""
    identity: bytes = b""


# The entries for each physical queue, and the runs of publishers among them.
Batches: TypeAlias = dict[int, list[Entry]]
Runs: TypeAlias = dict[int, list[Run]]


class Numbered(NamedTuple):
    """Identifies a numbered batch: the digest of its producer, and its number among that producer's batches."""

    producer: bytes
    number: int


class SealedPage(NamedTuple):
    """The result of a range read: sequences, sizes of the sealed records, and the records concatenated."""

    sequences: list[int]
    sizes: list[int]
    records: bytes

    def split(self) -> Iterator[tuple[int, memoryview]]:
        """Yields (sequence, sealed record) of each message."""
        view, start = memoryview(self.records), 0
        for sequence, size in zip(self.sequences, self.sizes, strict=True):
            yield sequence, view[start : start + size]
            start += size


class Granted(NamedTuple):
    """The result of a lease: messages, the sequences of corrupt records, which the caller sets aside, and how many
    messages can still be leased after it."""

    leased: list[Leased]
    corrupt: list[int]
    waiting: int

    @classmethod
    def of(cls, physical: int, epoch: str, taken: Iterable[tuple[int, int, bytes]], waiting: int) -> Granted:
        """Makes messages of (sequence, delivery, sealed record). If nothing was taken although messages wait, they
        cannot be leased now. Zero is reported, or a caller that asks again at once would loop for ever."""
        leased: list[Leased] = []
        corrupt: list[int] = []
        for sequence, delivery, sealed in taken:
            record = unseal(sealed)
            if record is None:
                corrupt.append(sequence)
            else:
                receipt = f"{physical}.{sequence}.{delivery}.{epoch}"
                leased.append(Leased(receipt, delivery, physical, sequence, msgspec.Raw(record)))
        return cls(leased, corrupt, waiting if leased or corrupt else 0)


@dataclass
class StoreCounts:
    """Counts the events of a logical queue, as this process has seen them. `unreachable` messages are in the counters
    but cannot be found: the store is damaged."""

    enqueued: int = 0
    duplicates: int = 0
    refused: int = 0
    dropped: int = 0
    deleted: int = 0
    redelivered: int = 0
    expired: int = 0
    dead_lettered: int = 0
    expired_messages: int = 0
    corrupt: int = 0
    unreachable: int = 0
    forgotten_publishers: int = 0


class Store(Protocol):
    """Keeps definitions, and finds the queues that they define. All methods may wait for a disk or a network, except
    those marked "Does not wait". Each is done completely or not at all. If `is_shared`, other processes may change the
    store, and changes are reported only while `QueueStore.listen` is on."""

    is_shared: bool

    @property
    def cover_bytes(self) -> int:
        """The memory of this process that the covers of all queues take."""

    async def open(self) -> list[Definition]:
        """Opens the store and returns its queues."""

    async def close(self) -> None: ...

    async def define(self, definition: Definition) -> Definition:
        """Creates a queue with its dead-letter queue, or changes its settings. Returns the definition that is now in
        force."""

    async def drop(self, name: str) -> None:
        """Removes a queue, its dead letters and all their messages."""

    def watch_definitions(self, changed: Callable[[str, Definition | None], Awaitable[None]]) -> None:
        """Does not wait. Reports queues that other processes create, change or drop (None)."""

    def queue(self, name: str) -> QueueStore:
        """Does not wait. Raises NoSuchQueue if there is none. Look a queue up for each step, and do not keep it: it may
        be dropped while a step waits."""

    def trouble(self) -> TidegateError | None:
        """Does not wait. Returns why messages are refused now, for example because the disk is full; None if they are
        not."""


class QueueStore(Protocol):
    """One logical queue in a store. All methods may wait for a disk or a network, except those marked "Does not wait".
    Each is done completely or not at all, except that an enqueue into several physical queues of Redis is atomic for
    each of them only."""

    async def enqueue(
        self,
        batches: Batches,
        *,
        make_room: bool = False,
        numbered: Numbered | None = None,
        runs: Runs | None = None,
    ) -> int:
        """Puts entries into physical queues. They are durable when it returns the number of duplicates among them.
        Raises Overloaded if they do not fit; with `make_room` the oldest messages are dropped instead.

        An entry is a duplicate if its place lies in the cover of its run, or if its identity is remembered. Covers grow
        in the same step in which the entries are stored. Runs of a feed store no identities. Raises FormerFilter if
        `matches` of a run are not sufficient.

        Entries that are `numbered` have no identities. Each physical queue stores its part together with the number. If
        it has already stored that number, or a higher one, of that producer, it stores nothing and all entries are
        duplicates."""

    async def has(self, batches: Batches, runs: Runs | None = None) -> bool:
        """Returns whether each entry would be a duplicate, according to the covers of its own filter."""

    async def lease(self, physical: int, messages_max: int, bytes_max: int, visibility_s: float) -> Granted: ...

    async def delete(self, receipts: list[str]) -> int:
        """Returns how many messages were deleted; the other receipts are stale. The three methods below count
        likewise."""

    async def extend(self, receipts: list[str], visibility_s: float) -> int: ...

    async def release(self, receipts: list[str], delay_s: float) -> int: ...

    async def give_back(self, receipts: list[str]) -> int:
        """Releases messages without delay, and does not count the delivery."""

    async def end_leases(self) -> int:
        """Ends every lease, as if its deadline had passed. Returns how many."""

    async def read(
        self, physical: int, start: int, stop: int, messages_max: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> SealedPage:
        """Returns messages with sequences from `start` to below `stop`, leased or not. The result does not exceed
        `bytes_max`, except that it has at least one message if there is any."""

    async def delete_below(self, physical: int, sequence: int) -> int: ...

    async def expire(self, before_s: float, messages_max: int) -> int:
        """Removes the oldest messages that came before a time and are not leased, according to the queue's
        `after_lifetime`. It removes up to `messages_max` of each physical queue, and returns how many in all."""

    async def note_read(self, at: float) -> None:
        """Stores when a consumer last read the queue, in seconds since 1970."""

    async def last_read(self) -> float | None:
        """Returns what `note_read` stored last, in this process or another; None if nothing."""

    async def set_aside(self, physical: int, sequence: int) -> None:
        """Takes a corrupt record out of the queue and keeps it for an operator to inspect."""

    async def redrive(self, messages_max: int) -> int:
        """Moves dead letters back into their queue, with no deliveries counted. Returns how many."""

    async def levels(self) -> list[Level]:
        """Returns one level for each physical queue."""

    def counts(self) -> StoreCounts:
        """Does not wait."""

    def watch(self, on_ready: OnReady) -> None:
        """Does not wait. `on_ready` is called in the event loop when more messages of a physical queue can be leased,
        as far as the store knows. A store in this process always calls it; a shared one only while `listen` is on."""

    def listen(self, *, is_on: bool) -> None:
        """Does not wait. Turns calls of `on_ready` on while requests wait for messages, and off when none does."""


class QueueFull(Overloaded):
    """A queue has no room. Nothing went into the `physical` queues; entries of the same batch for other physical queues
    are stored."""

    def __init__(self, code: str, message: str, remedy: str, physical: frozenset[int]) -> None:
        super().__init__(code, message, remedy, retry_after_s=2.0)
        self.physical = physical


class Receipt(msgspec.Struct, gc=False):
    """Identifies a message and one of its deliveries. `epoch` identifies the store's start, in stores whose leases end
    with the process."""

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
            raise QueueError("Q907", f"{text[:80]!r} is not a receipt", "use those that a dequeue returned") from None


def is_alone(delivery: int, max_deliveries: int) -> bool:
    """Returns whether a message must be granted alone in this delivery."""
    return delivery > SUSPECT_AFTER or (delivery > 1 and delivery == max_deliveries)


def no_such_queue(name: str) -> NoSuchQueue:
    return NoSuchQueue("Q901", f"there is no queue {name!r}", "create it: tidegate queue create, or PUT /v1/queues")


def queue_full(name: str, what: str, bound: str, physical: Iterable[int] = ()) -> QueueFull:
    return QueueFull(
        "L608",
        f"queue {name!r} is full: {what}",
        f"try again when consumers have deleted messages, or raise its {bound}",
        frozenset(physical),
    )


def store_failed(what: str) -> Unavailable:
    return Unavailable("U707", f"the store of the queues has failed: {what}", "nothing was accepted; check the store")


def disk_full(where: str) -> Unavailable:
    return Unavailable(
        "U707",
        f"the disk of the queues is full: {where}",
        "nothing was accepted; free space on the disk, or delete messages",
    )


def durability_rank(durability: Durability) -> int:
    return ("memory", "os", "fsync").index(durability)
