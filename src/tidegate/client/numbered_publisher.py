"""Publishing under a chosen name and chosen numbers, for a program that may repeat itself after a crash.

The broker publishes each number of a publisher once, and remembers its publishers until it stops. A queue remembers the
numbers of each publisher as long as the queue exists, even when the broker restarts. So a program that gives the same
notification the same number in every run publishes it once.

Anyone may publish under a plain name and use up its numbers. With a `key`, a secret text, the numbers belong to the
programs that use the same name and key. Subscribers see the name with a digest of the key.

What may go wrong: two programs use one name, and the second disconnects the first with A504. Or a program numbers its
notifications differently than before: the broker silently ignores numbers that were used.
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
    """For use in `async with`. It has its own link; the end of the block closes it and calls `on_closed`."""

    def __init__(
        self,
        options: LinkOptions,
        name: str,
        key: str,
        tasks: asyncio.TaskGroup,
        on_closed: Callable[[NumberedPublisher], None],
    ) -> None:
        self.name = name
        self._publisher = Publisher(options, name, key)
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
        """Publishes notifications, each encoded as a MessagePack map, under the numbers `first`, `first` + 1, … Waits
        for their acknowledgement, and returns how many the broker had not acknowledged before.

        Numbers must increase and may have gaps. Raises NotificationError if the broker refused a notification, and
        Overloaded (L611) if a full queue did not store one; the others were published. Repeating a refused notification
        under the same number acknowledges it without raising again."""
        async with self._publishing:
            if first <= self._last:
                raise ProtocolError(
                    "P332",
                    f"publisher {self.name!r} has used the numbers up to {self._last}, and cannot publish {first}",
                    "count up from 1; to repeat a notification, open a new publisher with the same name",
                )
            self._last = first + len(encoded) - 1
            done = max(0, self._publisher.statistics().acknowledged - first + 1)
            await self._publisher.publish_encoded(first + done, encoded[done:])
            return max(0, len(encoded) - done)

    def close(self) -> None:
        self._publisher.close()
        self._on_closed(self)
