"""Carrier: takes frames from slice to slice within one process, and hands over what is for others.

A frame is handled as soon as the ones before it are, so every channel is FIFO. An error inside a slice is a mistake of
ours: what it promises no longer holds, so `on_failure` is told, which must end the process.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from tidegate.layers.control import GoOn
from tidegate.layers.frames import LayerFrame, Outputs
from tidegate.layers.slice import Slice

# Between two parts of a long work. Each takes a millisecond or two, here and where it goes to; without a pause moving
# 100,000 subscriptions would fill two cores for half a second, and batches would wait for their turn.
PAUSE_S: Final = 0.006


class Carrier(ABC):
    """`clock` gives the time in seconds; the slices themselves read none."""

    def __init__(self, clock: Callable[[], float], on_failure: Callable[[Exception], None]) -> None:
        self.slices: dict[str, Slice] = {}
        self._queue: deque[tuple[str, str | int, LayerFrame]] = deque()
        self._is_carrying = False
        self._clock = clock
        self._on_failure = on_failure

    def add(self, part: Slice) -> None:
        self.slices[part.name] = part

    def carry(self, outputs: Outputs, source: str) -> None:
        """Carries frames of a slice, and all that follow from them, to where they are addressed.

        A handler may call back in here; its frames queue up behind those that are under way."""
        queue = self._queue
        queue.extend((source, address, frame) for address, frame in outputs)
        if self._is_carrying:
            return
        self._is_carrying = True
        now_s = self._clock()
        try:
            while queue:
                source, address, frame = queue.popleft()
                part = self.slices.get(address)  # type: ignore[arg-type]
                if part is None:
                    self._hand_over(source, address, frame)
                    continue
                for following in part.handle(source, frame, now_s):
                    if type(following[1]) is GoOn:
                        self._put_off(part.name, following[1])
                    else:
                        queue.append((part.name, *following))
        except Exception as error:
            self._on_failure(error)
            raise
        finally:
            self._is_carrying = False

    def _put_off(self, name: str, frame: GoOn) -> None:
        """The next part of a long work: after what has come meanwhile, and a pause for whoever shares the cores."""
        outputs: Outputs = [(name, frame)]
        asyncio.get_running_loop().call_later(PAUSE_S, self.carry, outputs, name)

    @abstractmethod
    def _hand_over(self, source: str, address: str | int, frame: LayerFrame) -> None:
        """What is not for a slice of this process."""
