"""Carrier: takes frames from slice to slice within one process, and events to its sessions. It hands over frames for
other processes.

Frames are handled in the order in which they were sent, so every channel is FIFO. An error inside a slice is a bug in
Tidegate: the slice's promises no longer hold, so the carrier calls `on_failure`, which must end the process. The
exception is an invalid frame from another process: the slice has changed nothing, and the reader closes the channel.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from tidegate.errors import ForeignFrame
from tidegate.layers.control import NextPart
from tidegate.layers.frames import LayerFrame
from tidegate.layers.session_events import Output, SessionHandler
from tidegate.layers.slice import Slice

# The pause between two parts of a long task. Each part takes a millisecond or two, at the sender and at the receiver.
# Without a pause, moving 100,000 subscriptions would occupy two cores for half a second, and batches would wait.
PAUSE_S: Final = 0.006


class Carrier(ABC):
    """Carries frames between the slices of a process, and events to the `handlers` of its sessions. `clock` returns the
    time in seconds; slices read no clock."""

    def __init__(self, clock: Callable[[], float], on_failure: Callable[[Exception], None]) -> None:
        self.slices: dict[str, Slice] = {}
        self.handlers: dict[int, SessionHandler] = {}
        # Each has a source, and a frame with the name of its slice or an event with the number of its session.
        self._queue: deque[tuple[str, str | int, Any]] = deque()
        self._is_carrying = False
        self._clock = clock
        self._on_failure = on_failure

    def add(self, part: Slice) -> None:
        self.slices[part.name] = part

    def carry(self, outputs: Sequence[Output], source: str) -> None:
        """Carries a slice's frames and events, and all that follow from them, to their addresses.

        A handler may call this again; its frames then queue behind the ones in flight."""
        queue = self._queue
        queue.extend((source, address, frame) for address, frame in outputs)
        if self._is_carrying:
            return
        self._is_carrying = True
        now_s = self._clock()
        try:
            while queue:
                source, address, frame = queue.popleft()
                if isinstance(address, int):
                    if (handler := self.handlers.get(address)) is not None:
                        handler.on_event(frame)
                    continue
                part = self.slices.get(address)
                if part is None:
                    self._hand_over(source, address, frame)
                    continue
                for following in part.handle(source, frame, now_s):
                    if type(following[1]) is NextPart:
                        self._schedule(part.name, following[1])
                    else:
                        queue.append((part.name, *following))
        except Exception as error:  # a bug in a slice: its promises no longer hold, so the process must end
            if not isinstance(error, ForeignFrame) or not source or source in self.slices:
                self._on_failure(error)
            raise
        finally:
            self._is_carrying = False

    def _schedule(self, name: str, frame: NextPart) -> None:
        """Schedules the next part of a long task, after a pause in which other frames and processes get the core."""
        asyncio.get_running_loop().call_later(PAUSE_S, self.carry, [(name, frame)], name)

    @abstractmethod
    def _hand_over(self, source: str, address: str, frame: LayerFrame) -> None:
        """Takes a frame for a slice that is not in this process."""
