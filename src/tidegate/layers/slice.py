"""A slice: one part of a layer, in an OS process of its own or beside the others in one.

What all slices have in common: they obey the newest coordinator only, and they are deaf to the dead. A slice that was
declared dead may be asleep rather than dead; when it wakes up, nobody listens to what it still has to say.
"""

from __future__ import annotations

from tidegate.layers.control import Command, Fence, Reply, Step
from tidegate.layers.frames import LayerFrame, Outputs


class Slice:
    def __init__(self, name: str) -> None:
        self.name = name
        self._fenced: set[str] = set()
        self._term = 0
        self._coordinator = ""

    def handle(self, source: str, frame: LayerFrame, now_s: float) -> Outputs:
        """The one way in: every frame names its handler."""
        if source in self._fenced:
            return []
        if isinstance(frame, Command):
            if frame.term < self._term:
                return []
            self._term, self._coordinator = frame.term, source
        outputs: Outputs = getattr(self, frame.handler)(source, frame, now_s)
        return outputs

    def on_fence(self, source: str, frame: Fence, now_s: float) -> Outputs:
        self._fenced |= frame.dead
        return self._reply(Step.FENCED, frame.epoch)

    def _reply(self, step: Step, epoch: int, last: dict[str, int] | None = None) -> Outputs:
        """To the newest coordinator; one that is not known yet asks again."""
        if not self._coordinator:
            return []
        return [(self._coordinator, Reply(step, epoch, last or {}))]
