"""The uplink of a Connection Point: which Access Point it sends through, and what is not acknowledged yet.

When that Access Point dies, all unacknowledged frames go through another one, in order. When it is only to be removed,
new frames are held back until everything sent through it is acknowledged. One publisher's notifications therefore never
take two routes at once.
"""

from __future__ import annotations

from tidegate.layers.control import Step, Switch, Transaction
from tidegate.layers.frames import Change, Outputs, Submit
from tidegate.layers.selector import choose_by_name
from tidegate.layers.slice import Slice


class Uplink:
    """Sends frames to an Access Point, and keeps them until they are acknowledged. Without an Access Point it holds all
    frames until a configuration names one."""

    def __init__(self, owner: str, access_point: str) -> None:
        self._owner = owner
        self._access_point = access_point
        self._next: str | None = None
        self._epoch = 0
        self._submits: dict[tuple[str, int], Submit] = {}
        self._changes: dict[tuple[int, int], Change] = {}
        self._held: list[Submit | Change] = []

    def __len__(self) -> int:
        """Returns the number of unacknowledged frames, held ones included."""
        return len(self._submits) + len(self._changes)

    @property
    def is_home(self) -> bool:
        """Whether frames go through the Access Point that the configuration assigns, rather than being held back."""
        return self._next is None and bool(self._access_point)

    @property
    def pending_changes(self) -> frozenset[tuple[int, int]]:
        """The changes, as (subscription, version), that are not in force yet."""
        return frozenset(self._changes)

    def submit(self, frame: Submit) -> Outputs:
        self._submits[frame.batch.publisher, frame.batch.last] = frame
        return self._send(frame)

    def change(self, frame: Change) -> Outputs:
        self._changes[frame.subscription, frame.version] = frame
        return self._send(frame)

    def acknowledge_submit(self, publisher: str, last: int) -> bool:
        """Records the acknowledgement of a batch. Returns False if it was not pending, as for a duplicate."""
        return self._submits.pop((publisher, last), None) is not None

    def acknowledge_change(self, subscription: int, version: int) -> bool:
        """Records the acknowledgement of a change. Returns False if it was not pending, as for a duplicate."""
        return self._changes.pop((subscription, version), None) is not None

    def switch(self, transaction: Transaction) -> Outputs:
        """Adopts the configuration of a transaction, and returns the frames to send because of it."""
        if transaction.epoch <= self._epoch:
            return []
        self._epoch = transaction.epoch
        access_points = transaction.new.access_points
        if self._access_point in transaction.dead:
            return self._move_to(
                choose_by_name(self._owner, access_points), [*self._changes.values(), *self._submits.values()]
            )
        if self._access_point in access_points:
            return self._move_to(self._access_point, self._held)
        if not self._access_point:
            return self._move_to(choose_by_name(self._owner, access_points), self._held)
        self._next = choose_by_name(self._owner, access_points)
        return self.settle()

    def settle(self) -> Outputs:
        """Moves to the next Access Point once everything sent through the old one is acknowledged."""
        if self._next is None or len(self) > len(self._held):
            return []
        return self._move_to(self._next, self._held)

    def _move_to(self, access_point: str, frames: list[Submit | Change]) -> Outputs:
        self._access_point, self._next, self._held = access_point, None, []
        return [(access_point, frame) for frame in frames]

    def _send(self, frame: Submit | Change) -> Outputs:
        if not self.is_home:
            self._held.append(frame)
            return []
        return [(self._access_point, frame)]


class Edge(Slice):
    """A slice at the edge of the layers, where notifications enter from clients or leave to them."""

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
        return outputs + self._report_rehomed()

    def _settle(self) -> Outputs:
        """Continues a move to another Access Point. Call it after every acknowledgement."""
        return self._uplink.settle() + self._report_rehomed() if self._moving is not None else []

    def _report_rehomed(self) -> Outputs:
        if self._moving is None or not self._uplink.is_home:
            return []
        epoch, self._moving = self._moving, None
        return self._reply(Step.REHOMED, epoch)

    def _is_replaced(self, stream: int) -> bool:
        """Reports whether a newer stream has replaced that of a delivery; the newer stream brings the batch again.
        Records the newest stream seen."""
        if stream < self._stream:
            return True
        self._stream = stream
        return False
