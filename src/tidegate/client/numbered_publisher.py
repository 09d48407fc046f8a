"""Publishing under a name and numbers of one's own: for a program that repeats what it may have published.

The broker publishes a number of a publisher once, and knows its publishers for as long as it lives; a queue that keeps
what it was sent knows them by name and number for its `deduplication_s`, also after a restart of the broker. So a
program that gives the same notification the same number whenever it runs publishes it once.

What may go wrong: two programs use one name (the second ends the first with A504), or number otherwise than before
(what comes under a number that was used is silently left out).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from tidegate.client.link import LinkOptions
from tidegate.client.publisher import Publisher
from tidegate.errors import ProtocolError


class NumberedPublisher:
    """For use in `async with`; a link of its own, which is closed at the end of the block. `on_closed` is told so."""

    def __init__(
        self,
        options: LinkOptions,
        name: str,
        tasks: asyncio.TaskGroup,
        on_closed: Callable[[NumberedPublisher], None],
    ) -> None:
        self.name = name
        self._publisher = Publisher(options, name)
        self._tasks = tasks
        self._on_closed = on_closed
        self._last = 0
        self._publishing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        try:
            await self._publisher.start(self._tasks)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def publish(self, first: int, encoded: Sequence[bytes]) -> int:
        """Publishes notifications, each encoded as a map of MessagePack, under the numbers `first`, `first` + 1, … and
        returns when the broker has acknowledged them: how many it had not acknowledged before. Numbers go up and may
        have gaps. NotificationError when the broker refused one; the others went."""
        async with self._publishing:
            if first <= self._last:
                raise ProtocolError(
                    "P332",
                    f"publisher {self.name!r} is at {self._last}, and cannot publish {first}",
                    "count upwards from 1; to repeat something, begin anew under the same name",
                )
            self._last = first + len(encoded) - 1
            done = max(0, self._publisher.statistics().acknowledged - first + 1)
            await self._publisher.publish_encoded(first + done, encoded[done:])
            return max(0, len(encoded) - done)

    def close(self) -> None:
        self._publisher.close()
        self._on_closed(self)
