"""The pace of a persistent query's requests: active control, on the clock of the event loop.

`ActiveControl` decides when the next request is due. This is its shell: it sleeps until then, and wakes up earlier if
another event brings the request forward.
"""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import Final

from tidegate.client.control import ActiveControl, Control, ControlStatistics, Hints
from tidegate.errors import Overloaded, Unavailable

SLEEP_S_MAX: Final = 3600.0


class PersistentPace:
    """Paces openings and checks alike. At most one of them is in flight."""

    def __init__(self, control: Control) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = ActiveControl(control, Random().random, self._loop.time())  # noqa: S311
        self._replanned = asyncio.Event()

    async def wait_until_due(self) -> None:
        """Waits until a request must be sent."""
        while True:
            while (wait_s := self._control.wait_s(self._loop.time())) > 0:
                self._replanned.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(wait_s, SLEEP_S_MAX)):
                        await self._replanned.wait()
            if self._control.on_due(self._loop.time()):
                return

    def request_within(self, seconds: float | None) -> None:
        """Brings the next request forward to a random time within `seconds`. With None it falls within the backoff, if
        there is one."""
        self._control.on_announcement(seconds, self._loop.time())
        self._replanned.set()

    def on_response(self, losses: int, hints: Hints) -> None:
        self._control.on_losses(losses)
        self._control.on_response(hints, self._loop.time())

    def on_failure(self, error: Overloaded | Unavailable) -> None:
        if isinstance(error, Overloaded):
            self._control.on_refusal(error.retry_after_s, self._loop.time())
        else:
            self._control.on_timeout(self._loop.time())

    def on_losses(self, losses: int) -> None:
        self._control.on_losses(losses)

    def on_notification(self, spread_s: float | None) -> None:
        self._control.on_notification(self._loop.time(), spread_s)

    def statistics(self) -> ControlStatistics:
        return self._control.statistics()
