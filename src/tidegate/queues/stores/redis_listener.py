"""Wake-ups from Redis: while requests wait for messages, one blocked read for each physical queue, and no polling.

A listener reads how many messages wait and reports them. Then it blocks until the queue's wake-up stream has a new
entry, or the next lease ends. Reading the counts also returns the stream's last entry, so that no message that arrives
between reading and blocking is missed.

Requests come and go faster than connections are made. So a listener that is turned off stays blocked until it wakes,
and then ends. If it is turned on before that, it reads the counts at once and stays.
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

# Messages were reported, but are not taken yet: the requests want more, or other consumers are faster.
PAUSE_S: Final = 0.003
RECONNECT_S: Final = 0.5
# How often the counts are read again because of a lease, before they are reported all the same.
LOOKS_MAX: Final = 4


class Listener:
    """Listens to one physical queue. `report` receives the number of messages that can be leased, and of leases that
    have expired."""

    def __init__(self, link: RedisLink, keys: Sequence[str], report: Callable[[int, int], None]) -> None:
        self._link = link
        self._keys = keys
        self._wakeups = keys[KEYS.index("w")]
        self._report = report
        self._is_on = False
        self._task: asyncio.Task[None] | None = None
        self._leases = 0

    def on_lease(self) -> None:
        """Records that a lease starts or ends here. Counts in flight are then out of date, and the lease reports newer
        ones."""
        self._leases += 1

    def turn_on(self) -> None:
        if self._is_on:
            return
        self._is_on = True
        if self._task is None or self._task.done():
            self._task = self._link.start(self._listen())
        else:
            self._link.start(self._read_counts())

    def turn_off(self) -> None:
        self._is_on = False

    def stop(self) -> None:
        """Stops at once, because the queue was dropped or the broker stops."""
        self._is_on = False
        if self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        while self._is_on:
            try:
                waiting, deadline_ms, last = await self._read_counts()
                if waiting:
                    await asyncio.sleep(PAUSE_S)
                if self._is_on:
                    block_ms = BLOCK_MS if deadline_ms < 0 else min(BLOCK_MS, deadline_ms)
                    await self._link.read_blocked(self._wakeups, last, block_ms)
            except Unavailable as error:
                log.warning("Redis sends no wake-ups, trying again: %s", error)
                await asyncio.sleep(RECONNECT_S)

    async def _read_counts(self) -> tuple[int, int, bytes]:
        for _ in range(LOOKS_MAX):
            leases = self._leases
            waiting, deadline_ms, last, expired = await self._link.run(LOOK, self._keys)
            if leases == self._leases:
                break
        self._report(waiting, expired)
        return waiting, deadline_ms, last
