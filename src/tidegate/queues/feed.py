"""A feed: notifications on their way from the queue point into a logical queue, with a claim about their completeness.

Each part has one publisher and ascending numbers. Its claim: everything of the publisher that matches `filter`, from
the number `since` on, was put before this part or is in it. A feed that is cut in two keeps the claim true as long as
its first part is stored before its second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple

from tidegate.messages import NewMessage


class FeedPart(NamedTuple):
    messages: list[NewMessage]
    since: int
    filter: str


class Feed:
    """The parts in order; `len` counts messages. Immutable."""

    def __init__(self, parts: Iterable[FeedPart]) -> None:
        self.parts = [part for part in parts if part.messages]
        self._ends = list(accumulate(len(part.messages) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def first(self, count: int) -> Feed:
        """Returns the first `count` messages, or all if there are fewer."""
        return Feed(
            part._replace(messages=part.messages[: max(0, count - (end - len(part.messages)))])
            for part, end in zip(self.parts, self._ends, strict=True)
        )

    def after(self, count: int) -> Feed:
        """Returns the messages after the first `count`."""
        return Feed(
            part._replace(messages=part.messages[max(0, count - (end - len(part.messages))) :])
            for part, end in zip(self.parts, self._ends, strict=True)
        )

    def only(self, is_wanted: Callable[[NewMessage], bool]) -> Feed:
        """Returns the messages for which `is_wanted` is true, in their order."""
        return Feed(part._replace(messages=[each for each in part.messages if is_wanted(each)]) for part in self.parts)

    def then(self, other: Feed) -> Feed:
        """Returns this feed followed by another."""
        return Feed([*self.parts, *other.parts])

    def ids(self) -> set[int]:
        """Returns the ids of the message objects."""
        return {id(message) for part in self.parts for message in part.messages}
