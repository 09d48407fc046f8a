"""The uplink of a Connection Point: which Access Point it sends through, and what is not acknowledged yet.

When that Access Point dies, everything without an acknowledgement goes through another one, in order. When it is only
to be removed, what comes is held back until nothing sent through it is open, so that one publisher's notifications
never travel by two ways at once.
"""

from __future__ import annotations

from tidegate.layers.control import Step, Switch, Transaction
from tidegate.layers.frames import Change, Outputs, Submit
from tidegate.layers.selector import choose_by_name
from tidegate.layers.slice import Slice


class Uplink:
    """Without an Access Point it holds everything until a configuration names one."""

    def __init__(self, owner: str, access_point: str) -> None:
        self._owner = owner
        self._access_point = access_point
        self._next: str | None = None
        self._epoch = 0
        self._submits: dict[tuple[str, int], Submit] = {}
        self._changes: dict[tuple[int, int], Change] = {}
        self._held: list[Submit | Change] = []

    def __len__(self) -> int:
        """How much is not acknowledged."""
        return len(self._submits) + len(self._changes)

    @property
    def is_home(self) -> bool:
        """Whether it sends through the Access Point that the configuration gives it."""
        return self._next is None and bool(self._access_point)

    @property
    def pending_changes(self) -> frozenset[tuple[int, int]]:
        """That are not in force yet."""
        return frozenset(self._changes)

    def submit(self, frame: Submit) -> Outputs:
        self._submits[frame.batch.publisher, frame.batch.last] = frame
        return self._send(frame)

    def change(self, frame: Change) -> Outputs:
        self._changes[frame.subscription, frame.version] = frame
        return self._send(frame)

    def is_acknowledged(self, publisher: str, last: int) -> bool:
        """Takes note of it; False when it was not open."""
        return self._submits.pop((publisher, last), None) is not None

    def is_changed(self, subscription: int, version: int) -> bool:
        """The same for a change."""
        return self._changes.pop((subscription, version), None) is not None

    def switch(self, transaction: Transaction) -> Outputs:
        """What goes out because the configuration is another."""
        if transaction.epoch <= self._epoch:
            return []
        self._epoch = transaction.epoch
        access_points = transaction.new.access_points
        if self._access_point in transaction.dead:
            return self._go(
                choose_by_name(self._owner, access_points), [*self._changes.values(), *self._submits.values()]
            )
        if self._access_point in access_points:
            return self._go(self._access_point, self._held)
        if not self._access_point:
            return self._go(choose_by_name(self._owner, access_points), self._held)
        self._next = choose_by_name(self._owner, access_points)
        return self.settle()

    def settle(self) -> Outputs:
        """Moves when everything that was sent through the Access Point that is left is acknowledged."""
        if self._next is None or len(self) > len(self._held):
            return []
        return self._go(self._next, self._held)

    def _go(self, access_point: str, frames: list[Submit | Change]) -> Outputs:
        self._access_point, self._next, self._held = access_point, None, []
        return [(access_point, frame) for frame in frames]

    def _send(self, frame: Submit | Change) -> Outputs:
        if not self.is_home:
            self._held.append(frame)
            return []
        return [(self._access_point, frame)]


class Edge(Slice):
    """A slice at the edge of the layers: what comes from clients or leaves to them passes it."""

    def __init__(self, name: str, access_point: str) -> None:
        super().__init__(name)
        self._uplink = Uplink(name, access_point)
        self._stream = 0
        self._moving: int | None = None

    def on_switch(self, source: str, frame: Switch, now_s: float) -> Outputs:
        transaction = frame.transaction
        self._fenced |= transaction.dead
        self._stream = max(self._stream, transaction.new.stream)
        outputs = self._uplink.switch(transaction)
        self._moving = transaction.epoch
        return outputs + self._tell_home()

    def _settle(self) -> Outputs:
        """To be called after every acknowledgement."""
        return self._uplink.settle() + self._tell_home() if self._moving is not None else []

    def _tell_home(self) -> Outputs:
        if self._moving is None or not self._uplink.is_home:
            return []
        epoch, self._moving = self._moving, None
        return self._reply(Step.REHOMED, epoch)

    def _is_replaced(self, stream: int) -> bool:
        """Whether a delivery is of a stream that a newer one has replaced: what it brings comes again."""
        if stream < self._stream:
            return True
        self._stream = stream
        return False
