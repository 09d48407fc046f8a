"""Wake-ups from Redis: while somebody waits for messages, one blocked read for each physical queue, and no polling.

A listener looks how many messages wait, tells of them, and blocks until the queue's wake-up stream has an entry that it
has not seen, or the next lease ends. Looking gives the stream's last entry together with the counts, so that nothing
that comes between looking and blocking is missed.

Requests come and go faster than connections are made. So a listener that is turned off only stays blocked until it
wakes, and then ends; turned on before that, it looks at once and stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from tidegate.errors import Unavailable
from tidegate.queues.stores.redis_link import RedisLink
from tidegate.queues.stores.redis_scripts import BLOCK_MS, KEYS, LOOK

log = logging.getLogger(__name__)

# Those who wait know of messages and have not taken them: they want more, or others are quicker.
PAUSE_S: Final = 0.003
RECONNECT_S: Final = 0.5
# Looks that a lease may spoil before what was seen is told all the same.
LOOKS_MAX: Final = 4


class Listener:
    """Of one physical queue. `tell` gets the messages that can be leased, and the leases that have expired."""

    def __init__(self, link: RedisLink, keys: Sequence[str], tell: Callable[[int, int], None]) -> None:
        self._link = link
        self._keys = keys
        self._wakeups = keys[KEYS.index("w")]
        self._tell = tell
        self._is_on = False
        self._task: asyncio.Task[None] | None = None
        self._leases = 0

    def on_lease(self) -> None:
        """A lease begins or ends here: counts that are under way are old when they come, and a lease brings its own."""
        self._leases += 1

    def turn_on(self) -> None:
        if self._is_on:
            return
        self._is_on = True
        if self._task is None or self._task.done():
            self._task = self._link.start(self._listen())
        else:
            self._link.start(self._look())

    def turn_off(self) -> None:
        self._is_on = False

    def stop(self) -> None:
        """The queue is gone, or the broker ends."""
        self._is_on = False
        if self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        while self._is_on:
            try:
                waiting, deadline_ms, last = await self._look()
                if waiting:
                    await asyncio.sleep(PAUSE_S)
                if self._is_on:
                    block_ms = BLOCK_MS if deadline_ms < 0 else min(BLOCK_MS, deadline_ms)
                    await self._link.read_blocked(self._wakeups, last, block_ms)
            except Unavailable as error:
                log.warning("no wake-ups from Redis for now: %s", error)
                await asyncio.sleep(RECONNECT_S)

    async def _look(self) -> tuple[int, int, bytes]:
        for _ in range(LOOKS_MAX):
            leases = self._leases
            waiting, deadline_ms, last, expired = await self._link.run(LOOK, self._keys)
            if leases == self._leases:
                break
        self._tell(waiting, expired)
        return waiting, deadline_ms, last
