"""A slice: one part of a layer, in an OS process of its own or beside the others in one.

All slices obey the newest coordinator only, and they ignore frames from slices that were declared dead. Such a slice
may only have been suspended: when it resumes, its frames have no effect.
"""

from __future__ import annotations

from tidegate.errors import ForeignFrame
from tidegate.layers.control import Command, Fence, Reply, Step
from tidegate.layers.frames import LayerFrame, Outputs
from tidegate.layers.session_events import OutputsAndEvents


class Slice:
    def __init__(self, name: str) -> None:
        self.name = name
        self._fenced: set[str] = set()
        self._term = 0
        self._coordinator = ""

    def handle(self, source: str, frame: LayerFrame, now_s: float) -> OutputsAndEvents:
        """Handles one frame by calling the handler that it names. Raises ForeignFrame if the sender is at fault. In
        that case the slice has sent nothing in response, and its own promises still hold."""
        if source in self._fenced:
            return []
        if isinstance(frame, Command):
            if frame.term < self._term:
                return []
            self._term, self._coordinator = frame.term, source
        handler = getattr(self, frame.handler, None)
        if handler is None:
            raise ForeignFrame(f"{self.name} does not handle {type(frame).__name__} frames")
        outputs: OutputsAndEvents = handler(source, frame, now_s)
        return outputs

    def on_fence(self, source: str, frame: Fence, now_s: float) -> Outputs:
        self._fenced |= frame.dead
        return self._reply(Step.FENCED, frame.epoch)

    def _reply(self, step: Step, epoch: int, last: dict[str, int] | None = None) -> Outputs:
        """Replies to the newest coordinator. If none is known yet, it drops the reply: a coordinator repeats its
        commands."""
        if not self._coordinator:
            return []
        return [(self._coordinator, Reply(step, epoch, last or {}))]
