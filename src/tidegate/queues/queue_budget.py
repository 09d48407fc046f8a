"""Queue budget: how much memory the definitions of queues and their idle physical queues may use.

Queues belong to no client: they remain when the client that created them has disconnected. So all queues share one
budget. A queue is charged for a fixed part, its physical queues, those of its dead letters, and its definition. Its
messages are in the store and have bounds of their own. The attribute names in filters that fill queues are counted as
well, because they share the 65,536 numbers of an index with the subscriptions of clients.

What may go wrong: the budget is used up; then a new queue is refused (L622, L621). Queues that exist at the start, or
that another broker on the same store has created, are charged too, but never refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from tidegate.errors import Overloaded
from tidegate.filters import Filter
from tidegate.queues.definition import Definition

# Measured with LMDB: the controllers, statistics and tables of a queue; and one idle physical queue.
QUEUE_BYTES: Final = 5 * 1024
PHYSICAL_QUEUE_BYTES: Final = 1400


class QueueBudget:
    """Invariant: `bytes` and `names` are the sums over the queues that were charged and not given back."""

    def __init__(self, bytes_max: int, names_max: int) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._names_max = names_max
        self._names: Counter[str] = Counter()
        self._charged: dict[str, tuple[int, frozenset[str]]] = {}

    @property
    def names(self) -> int:
        return len(self._names)

    def check(self, definition: Definition) -> None:
        """Raises Overloaded if this definition exceeds a budget and takes more than the queue took before."""
        before_bytes, before_names = self._charged.get(definition.name, (0, frozenset()))
        size_bytes, names = _cost(definition)
        in_all = self.bytes - before_bytes + size_bytes
        if size_bytes > before_bytes and in_all > self._bytes_max:
            raise Overloaded(
                "L622",
                f"queue {definition.name!r} with {definition.settings.physical_queues} physical queues needs "
                f"{size_bytes} bytes of memory, and {len(self._charged)} queues already use {self.bytes}",
                f"use at most {self._bytes_max}: drop queues, use fewer physical queues, or raise queues_bytes_max",
                retry_after_s=5.0,
            )
        new = sum(name not in self._names for name in names - before_names)
        freed = sum(self._names[name] == 1 for name in before_names - names)
        if new and self.names + new - freed > self._names_max:
            raise Overloaded(
                "L621",
                f"the filters of queues use {self.names} attribute names, and that of {definition.name!r} adds {new}",
                f"use at most {self._names_max}: put what varies into values, or raise queue_attribute_names_max",
                retry_after_s=5.0,
            )

    def charge(self, definition: Definition) -> None:
        """Charges a queue, in place of its previous charge."""
        self.give_back(definition.name)
        size_bytes, names = self._charged[definition.name] = _cost(definition)
        self.bytes += size_bytes
        self._names.update(names)

    def give_back(self, queue: str) -> None:
        """Frees what a queue was charged; does nothing for a queue that was not charged."""
        size_bytes, names = self._charged.pop(queue, (0, frozenset()))
        self.bytes -= size_bytes
        self._names.subtract(names)
        for name in names:
            if not self._names[name]:
                del self._names[name]


def _cost(definition: Definition) -> tuple[int, frozenset[str]]:
    """Returns the bytes of a queue with its dead letters, and the attribute names of its filter."""
    settings = definition.settings
    size_bytes = QUEUE_BYTES + 2 * settings.physical_queues * PHYSICAL_QUEUE_BYTES
    size_bytes += 2 * len(msgspec.msgpack.encode(settings))
    if settings.filter is None:
        return size_bytes, frozenset()
    return size_bytes, frozenset(constraint.name for constraint in Filter.parse(settings.filter).constraints)
